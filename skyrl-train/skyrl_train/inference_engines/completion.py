"""Completions: the one form of an engine's answer inside of this package, from the native engine's core over the client
to the dialogue that continues with it. `InferenceEngineOutput` has the same as columns, at the public interface."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from skyrl_train.expert_routes import ExpertRoutes
from skyrl_train.inference_engines.base import (
    DraftCounts,
    InferenceEngineOutput,
    SamplingKeywords,
    TopLogProbs,
    top_log_probs_of,
)
from skyrl_train.kept_tokens import KeptTokens

if TYPE_CHECKING:
    from skyrl_train.inference_engines.native.requests import EngineSamplingParams


@dataclass(frozen=True)
class Completion:
    """Tokens that an engine generated behind one prompt. The lists but `prompt_log_probs` have one entry a token."""

    token_ids: list[int]
    stop_reason: str
    weight_versions: list[int]
    log_probs: list[float] | None = None
    text: str = ""
    prompt_log_probs: list[float] | None = None
    """Log-prob of every prompt token but the first; None if not asked for."""
    prompt_top: TopLogProbs | None = None
    """Likeliest words in the place of each of them; None if not asked for."""
    routes: ExpertRoutes | None = None
    """Experts of prompt and generated tokens, but for the last, which no pass computed; None if the engine returns
    none."""
    kept_tokens: KeptTokens | None = None
    """Tokens that truncation kept when each was drawn, which `log_probs` are over; None if not asked for."""
    num_cached_prompt_tokens: int | None = None
    """Tokens at the beginning of the prompt that were not computed for this request; None: not known."""
    drafts: DraftCounts | None = None
    """Speculative decoding; None: not known."""
    top: TopLogProbs | None = None
    """Likeliest tokens in the place of each token; None if not asked for."""
    failure: Exception | None = None
    """Error for which there is no answer; the stop reason is `error` then."""


def failed_completion(failure: Exception, params: SamplingKeywords | None = None) -> Completion:
    """Return the completion of a request that failed beside others: no token, and the columns that `params` ask for."""
    given = params or {}
    num_top, num_prompt_top = given.get("logprobs"), given.get("prompt_logprobs")
    return Completion(
        token_ids=[],
        stop_reason="error",
        weight_versions=[],
        log_probs=[],
        prompt_log_probs=None if num_prompt_top is None else [],
        prompt_top=top_log_probs_of([], num_prompt_top) if num_prompt_top else None,
        top=top_log_probs_of([], num_top) if num_top else None,
        failure=failure,
    )


def raise_if_all_failed(completions: Sequence[Completion]) -> None:
    """Raise the first failure of a call without an answer, as of one with a single request."""
    failures = [each.failure for each in completions if each.failure is not None]
    if failures and len(failures) == len(completions):
        raise failures[0]


def to_completions(output: InferenceEngineOutput) -> list[Completion]:
    """Return the completions of an engine's output, in the order of the requests."""
    log_probs, prompt_log_probs = output["response_logprobs"], output.get("prompt_logprobs")
    routes, prompt_top = output.get("expert_routes"), output.get("prompt_top_logprobs")
    kept, cached = output.get("kept_tokens"), output.get("num_cached_prompt_tokens")
    drafts, top = output.get("draft_counts"), output.get("response_top_logprobs")
    failures = output.get("failures")
    return [
        Completion(
            token_ids=list(token_ids),
            stop_reason=output["stop_reasons"][row],
            weight_versions=list(output["weight_versions"][row]),
            log_probs=None if log_probs is None else list(log_probs[row]),
            top=None if top is None else top[row],
            text=output["responses"][row],
            prompt_log_probs=None if prompt_log_probs is None else prompt_log_probs[row],
            prompt_top=None if prompt_top is None else prompt_top[row],
            routes=None if routes is None else routes[row],
            kept_tokens=None if kept is None else kept[row],
            num_cached_prompt_tokens=None if cached is None else cached[row],
            drafts=None if drafts is None else DraftCounts(*drafts[row]),
            failure=None if failures is None else failures[row],
        )
        for row, token_ids in enumerate(output["response_ids"])
    ]


def to_engine_output(completions: Sequence[Completion]) -> InferenceEngineOutput:
    """Return completions as columns. A column of log-probs is there only if every completion has them."""
    log_probs = [each.log_probs for each in completions if each.log_probs is not None]
    prompt_log_probs = [each.prompt_log_probs for each in completions if each.prompt_log_probs is not None]
    output = InferenceEngineOutput(
        responses=[each.text for each in completions],
        response_ids=[each.token_ids for each in completions],
        stop_reasons=[each.stop_reason for each in completions],
        response_logprobs=log_probs if len(log_probs) == len(completions) else None,
        weight_versions=[each.weight_versions for each in completions],
    )
    top = [each.top for each in completions if each.top is not None]
    if top and len(top) == len(completions):
        output["response_top_logprobs"] = top
    if prompt_log_probs and len(prompt_log_probs) == len(completions):
        output["prompt_logprobs"] = prompt_log_probs
    prompt_top = [each.prompt_top for each in completions if each.prompt_top is not None]
    if prompt_top and len(prompt_top) == len(completions):
        output["prompt_top_logprobs"] = prompt_top
    if any(each.routes is not None for each in completions):
        output["expert_routes"] = [each.routes for each in completions]
    if any(each.kept_tokens is not None for each in completions):
        output["kept_tokens"] = [each.kept_tokens for each in completions]
    cached = [each.num_cached_prompt_tokens for each in completions if each.num_cached_prompt_tokens is not None]
    if cached and len(cached) == len(completions):
        output["num_cached_prompt_tokens"] = cached
    drafts = [each.drafts for each in completions if each.drafts is not None]
    if drafts and len(drafts) == len(completions):
        output["draft_counts"] = drafts
    if any(each.failure is not None for each in completions):
        output["failures"] = [each.failure for each in completions]
    return output


def requested_output(
    completions: Sequence[Completion],
    params: "EngineSamplingParams",
    decode: Callable[[list[int], bool], str],
    count_cached_tokens: bool = False,
) -> InferenceEngineOutput:
    """Return completions as an engine's output, with their text and the log-probs that `params` ask for.

    Args:
        decode: (token ids, skip special tokens) -> text.
    """
    num_top = params.prompt_logprobs or 0
    return to_engine_output(
        [
            replace(
                each,
                text=decode(each.token_ids, params.skip_special_tokens),
                log_probs=None if params.logprobs is None else each.log_probs,
                top=(each.top or top_log_probs_of([], params.logprobs)) if params.logprobs else None,
                prompt_log_probs=None if params.prompt_logprobs is None else each.prompt_log_probs or [],
                # A prompt of one token has no place that was scored.
                prompt_top=(each.prompt_top or top_log_probs_of([], num_top)) if num_top else None,
                num_cached_prompt_tokens=each.num_cached_prompt_tokens if count_cached_tokens else None,
                drafts=each.drafts if count_cached_tokens else None,
            )
            for each in completions
        ]
    )

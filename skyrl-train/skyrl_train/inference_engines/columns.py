"""Batches of requests as parallel columns, for custom callers and engines (`generate_batch`). This package itself
handles single requests and completions.
"""

from collections.abc import Sequence
from typing import Any, NotRequired, TypedDict

from skyrl_train.errors import RolloutError
from skyrl_train.expert_routes import ExpertRoutes
from skyrl_train.inference_engines.constraints import ConstraintFailed
from skyrl_train.inference_engines.request import (
    Completion,
    DraftCounts,
    GenerationRequest,
    SamplingKeywords,
    TopLogProbs,
    build_top_log_probs,
)
from skyrl_train.kept_tokens import KeptTokens
from skyrl_train.types import ConversationType

RequestFailure = (ConstraintFailed, RolloutError)
"""Errors of one request that do not affect the rest of its batch."""


class InferenceEngineInput(TypedDict):
    """A batch of requests. Exactly one of `prompts` and `prompt_token_ids`; only the client accepts the former."""

    prompts: NotRequired[list[ConversationType] | None]
    prompt_token_ids: NotRequired[list[list[int]] | None]
    sampling_params: NotRequired[SamplingKeywords | None]
    session_ids: NotRequired[list[str | int] | None]
    """Requests of one session are sent to the same engine to reuse its prefix cache."""
    lora_name: NotRequired[str | None]
    """Loaded adapter that generates (its tokens carry the adapter's version); None: the base model. An unknown name
    raises ValueError."""
    count_cached_tokens: NotRequired[bool]
    """Ask for `num_cached_prompt_tokens` and `draft_counts`: unlike all else in an output, they depend on other
    requests."""


class InferenceEngineOutput(TypedDict):
    """Completions in the order of the requests. The columns are fields of `Completion`; columns that were not requested
    are missing or None.
    """

    responses: list[str]
    response_ids: list[list[int]]
    stop_reasons: list[str]
    """A `StopReason`, or `error` for a request that failed alone and has no tokens."""
    response_logprobs: list[list[float]] | None
    response_top_logprobs: NotRequired[list[TopLogProbs] | None]
    weight_versions: list[list[int]]
    prompt_logprobs: NotRequired[list[list[float]] | None]
    prompt_top_logprobs: NotRequired[list[TopLogProbs] | None]
    expert_routes: NotRequired[list[ExpertRoutes | None] | None]
    kept_tokens: NotRequired[list[KeptTokens | None] | None]
    num_cached_prompt_tokens: NotRequired[list[int] | None]
    draft_counts: NotRequired[list[DraftCounts] | None]
    failures: NotRequired[list[Exception | None]]
    """Error of each failed request; missing if none failed. If all requests fail, the first error is raised."""


def raise_failures(output: InferenceEngineOutput) -> None:
    """Raise the first failure of a request, for callers that need every completion."""
    for failure in output.get("failures") or []:
        if failure is not None:
            raise failure


def to_requests(input_batch: InferenceEngineInput) -> list[GenerationRequest]:
    """Return the requests of a batch. Request i uses the seed pair [seed, i], or its own pair if `seed` is a list of
    pairs.

    Raises:
        ValueError: token ids are missing, or columns have different lengths.
    """
    prompts = input_batch.get("prompt_token_ids")
    if prompts is None:
        raise ValueError(
            "engines need prompt_token_ids; InferenceEngineClient converts conversations (prompts) to them"
        )
    sessions = input_batch.get("session_ids") or [None] * len(prompts)
    if len(sessions) != len(prompts):
        raise ValueError(f"{len(prompts)} prompts need the same number of session_ids; got {len(sessions)}")
    params = input_batch.get("sampling_params") or {}
    return [
        GenerationRequest(
            prompt_token_ids=prompt,
            sampling_params=params if seed is None else params | {"seed": seed},
            session_id=session,
            lora_name=input_batch.get("lora_name"),
            count_cached_tokens=input_batch.get("count_cached_tokens", False),
        )
        for prompt, session, seed in zip(prompts, sessions, _split_seeds(params, len(prompts)), strict=True)
    ]


def _split_seeds(params: SamplingKeywords, num: int) -> list[object]:
    seed = params.get("seed")
    if isinstance(seed, list | tuple):
        if len(seed) != num:
            raise ValueError(
                f"sampling parameter seed must be an integer, or one [seed, index] pair for each of the {num} "
                f"requests; got {len(seed)} pairs"
            )
        return list(seed)
    if isinstance(seed, int) and not isinstance(seed, bool):
        return [[seed, index] for index in range(num)]
    return [None] * num  # the engine reports the error


def to_batch(request: GenerationRequest) -> InferenceEngineInput:
    """Convert a request to a batch of one."""
    params = request.sampling_params
    if isinstance(params.get("seed"), list | tuple):
        params = params | {"seed": [params["seed"]]}
    batch = InferenceEngineInput(
        prompt_token_ids=[request.prompt_token_ids],
        sampling_params=params,
        lora_name=request.lora_name,
        count_cached_tokens=request.count_cached_tokens,
    )
    if request.session_id is not None:
        batch["session_ids"] = [request.session_id]
    return batch


def to_completion(output: InferenceEngineOutput) -> Completion:
    """Return the completion of a batch of one, or raise its failure."""
    raise_failures(output)
    log_probs, drafts = output["response_logprobs"], output.get("draft_counts")

    def of(name: str) -> Any:
        column = output.get(name)
        return None if column is None else column[0]

    return Completion(
        token_ids=list(output["response_ids"][0]),
        stop_reason=output["stop_reasons"][0],
        weight_versions=list(output["weight_versions"][0]),
        log_probs=None if log_probs is None else list(log_probs[0]),
        text=output["responses"][0],
        prompt_log_probs=of("prompt_logprobs"),
        prompt_top=of("prompt_top_logprobs"),
        routes=of("expert_routes"),
        kept_tokens=of("kept_tokens"),
        num_cached_prompt_tokens=of("num_cached_prompt_tokens"),
        drafts=None if drafts is None else DraftCounts(*drafts[0]),
        top=of("response_top_logprobs"),
    )


def to_output(completions: Sequence[Completion | Exception], params: SamplingKeywords) -> InferenceEngineOutput:
    """Convert completions to columns. A requested column is present if all completions have it (routes and kept tokens:
    if any has); a failed request has no tokens.

    Args:
        params: of the requests.

    Raises:
        Exception: the first failure, if all failed.
    """
    failures = [each if isinstance(each, Exception) else None for each in completions]
    if all(failures):
        for failure in filter(None, failures):
            raise failure
    rows = [_build_failed_completion(params) if isinstance(each, Exception) else each for each in completions]

    def column(field: str) -> Any:
        values = [getattr(row, field) for row in rows]
        is_there = any if field in ("routes", "kept_tokens") else all
        return values if rows and is_there(value is not None for value in values) else None

    output = InferenceEngineOutput(
        responses=[row.text for row in rows],
        response_ids=[row.token_ids for row in rows],
        stop_reasons=[row.stop_reason for row in rows],
        response_logprobs=column("log_probs"),
        weight_versions=[row.weight_versions for row in rows],
    )
    for name, field in _COLUMNS.items():
        if (values := column(field)) is not None:
            output[name] = values
    if any(failures):
        output["failures"] = failures
    return output


_COLUMNS = {
    "response_top_logprobs": "top",
    "prompt_logprobs": "prompt_log_probs",
    "prompt_top_logprobs": "prompt_top",
    "expert_routes": "routes",
    "kept_tokens": "kept_tokens",
    "num_cached_prompt_tokens": "num_cached_prompt_tokens",
    "draft_counts": "drafts",
}
"""Optional columns, and their fields of a completion."""


def _build_failed_completion(params: SamplingKeywords) -> Completion:
    """Build the completion of a failed request: no tokens, and the columns that `params` request."""
    num_top, num_prompt_top = params.get("logprobs"), params.get("prompt_logprobs")
    return Completion(
        token_ids=[],
        stop_reason="error",
        weight_versions=[],
        log_probs=[],
        prompt_log_probs=None if num_prompt_top is None else [],
        prompt_top=build_top_log_probs([], num_prompt_top) if num_prompt_top else None,
        top=build_top_log_probs([], num_top) if num_top else None,
    )

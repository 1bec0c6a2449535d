"""Continuation of interrupted completions: arithmetic of tokens and budgets, independent of engines.

A completion has several parts if its engine aborted or crashed. The next part is requested by a new call with the
tokens so far at the end of the prompt, the remaining budget and the same randomness. The joined completion equals an
uninterrupted one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from skyrl_train.expert_routes import ExpertRoutes, join_routes
from skyrl_train.inference_engines.base import SamplingKeywords, TopLogProbs
from skyrl_train.inference_engines.native.stop_strings import StopStringFinder
from skyrl_train.inference_engines.request import Completion, join_top_log_probs
from skyrl_train.kept_tokens import KeptTokens, join_kept_tokens

Decode = Callable[[list[int]], str]


@dataclass(frozen=True)
class EngineCall:
    """Prompt and settings of the next call of an engine."""

    prompt_token_ids: list[int]
    sampling_params: SamplingKeywords


def depends_on_answer(params: SamplingKeywords) -> bool:
    """Return whether the tokens depend on where the completion begins (`num_answer_tokens`)."""
    return any(params.get(name) for name in ("constraint", "frequency_penalty", "presence_penalty"))


def build_next_call(
    prompt: list[int],
    params: SamplingKeywords,
    parts: Sequence[Completion],
    decode: Decode,
    max_model_len: int | None = None,
) -> EngineCall | Completion:
    """Build the next engine call, or the entire completion.

    The next call has `max_tokens` and `min_tokens` reduced by the tokens so far, and all other settings unchanged,
    including the seed: engines derive a token's randomness from the seed and its position in the sequence. No call
        requests 0 tokens: an exhausted budget (or context) ends the completion with `length`. For settings that depend
        on the completion (constraint, penalties), `num_answer_tokens` is set.

    Args:
        prompt, params: prompt and settings of the caller.
        parts: in order; all but the last ended with `abort`.
        decode: token ids to text, as `skip_special_tokens` says.
        max_model_len: maximum number of tokens of prompt and completion in the engines; None: unknown.
    """
    if not parts:
        return EngineCall(prompt, params)
    if len(parts) == 1 and parts[0].stop_reason != "abort":
        return parts[0]
    token_ids = [token for part in parts for token in part.token_ids]
    end = _find_straddling_stop_end(parts, params, decode)
    if end is not None:
        return join(prompt, parts, decode, "stop", end)
    if parts[-1].stop_reason != "abort":
        return join(prompt, parts, decode, parts[-1].stop_reason)
    max_tokens = params.get("max_tokens")
    out_of_context = max_model_len is not None and len(prompt) + len(token_ids) >= max_model_len
    if (max_tokens is not None and len(token_ids) >= max_tokens) or (token_ids and out_of_context):
        return join(prompt, parts, decode, "length")
    remaining = dict(params)
    if max_tokens is not None:
        remaining["max_tokens"] = max_tokens - len(token_ids)
    if params.get("min_tokens"):
        remaining["min_tokens"] = max(0, params["min_tokens"] - len(token_ids))
    if depends_on_answer(params):
        remaining["num_answer_tokens"] = (params.get("num_answer_tokens") or 0) + len(token_ids)
    if _find_prompt_log_probs(prompt, parts) is not None:
        remaining.pop("prompt_logprobs", None)
    return EngineCall(prompt + token_ids, remaining)


def join(
    prompt: list[int], parts: Sequence[Completion], decode: Decode, stop_reason: str, num_tokens: int | None = None
) -> Completion:
    """Join parts to one completion with decoded text, truncated to `num_tokens` tokens if given."""
    with_log_probs = bool(parts) and all(part.log_probs is not None for part in parts)
    token_ids = [token for part in parts for token in part.token_ids][:num_tokens]
    return Completion(
        token_ids=token_ids,
        stop_reason=stop_reason,
        weight_versions=[version for part in parts for version in part.weight_versions][:num_tokens],
        log_probs=[value for part in parts for value in part.log_probs or []][:num_tokens] if with_log_probs else None,
        top=_join_top(parts, len(token_ids)),
        text=decode(token_ids),
        prompt_log_probs=_find_prompt_log_probs(prompt, parts),
        prompt_top=_find_prompt_top(prompt, parts),
        routes=_join_routes(prompt, parts, len(token_ids)),
        kept_tokens=_join_kept_tokens(parts, len(token_ids)),
    )


def can_stop_across_border(parts: Sequence[Completion], params: SamplingKeywords, decode: Decode) -> bool:
    """Return whether a stop string may begin before the last, unfinished part and end in it: it does, or the part is
    too short to decide.
    """
    stop = _stop_texts(params)
    if not stop or len(parts) < 2:
        return False
    return (
        len(parts[-1].token_ids) < _compute_stop_reach(stop)
        or _find_straddling_stop_end(parts, params, decode) is not None
    )


def _stop_texts(params: SamplingKeywords) -> tuple[str, ...]:
    stop = params.get("stop") or ()
    return (stop,) if isinstance(stop, str) else tuple(stop)


def _compute_stop_reach(stop: tuple[str, ...]) -> int:
    """Return the maximum number of tokens of a stop string: one character may take four, and special tokens have no
    text.
    """
    return 4 * max(map(len, stop)) + 8


def _find_prompt_log_probs(prompt: list[int], parts: Sequence[Completion]) -> list[float] | None:
    """Return the log-probs of the original prompt from the first part that has them: prompts of later parts contain
    generated tokens.
    """
    given = (part.prompt_log_probs for part in parts)
    return next(
        (values[: len(prompt) - 1] for values in given if values is not None and len(values) >= len(prompt) - 1), None
    )


def _find_prompt_top(prompt: list[int], parts: Sequence[Completion]) -> TopLogProbs | None:
    """Return the most likely tokens at the positions of the original prompt, from the same part as its log-probs."""
    count = len(prompt) - 1
    given = (part.prompt_top for part in parts)
    return next(
        (TopLogProbs(top.ids[:count], top.log_probs[:count]) for top in given if top and len(top.ids) >= count), None
    )


def _join_top(parts: Sequence[Completion], num_tokens: int) -> TopLogProbs | None:
    """Join the most likely tokens of all parts; None if a non-empty part has none."""
    given = [part.top for part in parts if part.token_ids]
    known = [each for each in given if each is not None]
    if not known or len(known) < len(given):
        return None
    joined = join_top_log_probs(known)
    return TopLogProbs(joined.ids[:num_tokens], joined.log_probs[:num_tokens])


def _join_routes(prompt: list[int], parts: Sequence[Completion], num_tokens: int) -> ExpertRoutes | None:
    """Join the routes of all parts. A later part recomputed the earlier ones as its prompt, possibly with other
    weights: tokens keep the routes of the pass that computed their log-probs.
    """
    routes = join_routes([part.routes for part in parts])
    return None if routes is None else routes.first(len(prompt) + num_tokens)


def _join_kept_tokens(parts: Sequence[Completion], num_tokens: int) -> KeptTokens | None:
    """Join the kept tokens of all parts; None if a non-empty part has none."""
    kept = [part.kept_tokens for part in parts if part.token_ids]
    known = [each for each in kept if each is not None]
    return join_kept_tokens(known).first(num_tokens) if known and len(known) == len(kept) else None


def _find_straddling_stop_end(parts: Sequence[Completion], params: SamplingKeywords, decode: Decode) -> int | None:
    """Find a stop string that begins in one part and ends in a later one. Returns the number of tokens up to its end,
    or None.

    The engine of the later part does not see the earlier text, and generates past such an end. Only the boundaries
    between parts are searched: engines find stop strings within a part.
    """
    stop = _stop_texts(params)
    if not stop:
        return None
    token_ids = [token for part in parts for token in part.token_ids]
    reach = _compute_stop_reach(stop)
    border = 0
    for part in parts[:-1]:
        border += len(part.token_ids)
        finder = StopStringFinder(stop, decode)
        first = max(0, border - reach)
        for position, token in enumerate(token_ids[first : border + reach], start=first + 1):
            complete = finder.push(token)
            if complete and position >= (params.get("min_tokens") or 0):
                return position
    return None

"""How an answer that was interrupted goes on: arithmetic of tokens and budgets, without engines.

An answer comes in parts when its engine was told to abort, or died. What follows is asked for as a new request whose
prompt ends with the tokens that are there, with what remains of the budget and the same randomness. The whole must be
what an engine that nobody interrupted would have written.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from skyrl_train.inference_engines.native.stop_strings import StopStringFinder

Decode = Callable[[list[int]], str]


@dataclass(frozen=True)
class Part:
    """What one engine wrote of an answer, in one go."""

    token_ids: list[int]
    stop_reason: str
    weight_versions: list[int]
    log_probs: list[float] | None = None
    text: str = ""
    prompt_log_probs: list[float] | None = None
    """Of the prompt that this part was asked for with."""


@dataclass(frozen=True)
class Ask:
    """What to ask an engine for next."""

    prompt_token_ids: list[int]
    sampling_params: dict[str, Any]


Answer = Part
"""A whole answer looks like a part that ends it."""


def next_step(
    prompt: list[int],
    params: dict[str, Any],
    parts: Sequence[Part],
    decode: Decode,
    max_model_len: int | None = None,
) -> Ask | Answer:
    """What is to be asked for next, or the whole answer.

    The next request has `max_tokens` and `min_tokens` less what is there, and everything else as given, the seed as
    well: engines derive a token's randomness from the seed and its place behind the prompt's beginning. No engine is
    ever asked for 0 tokens: a used-up budget (or context) ends the answer with `length`.

    Args:
        prompt, params: as the caller gave them.
        parts: in order; all but the last ended with `abort`.
        decode: token ids to text, as `skip_special_tokens` says.
        max_model_len: the most tokens of prompt and answer that the engines take; None: not known.
    """
    if not parts:
        return Ask(prompt, params)
    if len(parts) == 1 and parts[0].stop_reason != "abort":
        return parts[0]
    token_ids = [token for part in parts for token in part.token_ids]
    end = _end_by_straddling_stop(parts, params, decode)
    if end is not None:
        return joined(prompt, parts, decode, "stop", end)
    if parts[-1].stop_reason != "abort":
        return joined(prompt, parts, decode, parts[-1].stop_reason)
    max_tokens = params.get("max_tokens")
    out_of_context = max_model_len is not None and len(prompt) + len(token_ids) >= max_model_len
    if (max_tokens is not None and len(token_ids) >= max_tokens) or (token_ids and out_of_context):
        return joined(prompt, parts, decode, "length")
    remaining = dict(params)
    if max_tokens is not None:
        remaining["max_tokens"] = max_tokens - len(token_ids)
    if params.get("min_tokens"):
        remaining["min_tokens"] = max(0, params["min_tokens"] - len(token_ids))
    if _prompt_log_probs(prompt, parts) is not None:
        remaining.pop("prompt_logprobs", None)
    return Ask(prompt + token_ids, remaining)


def joined(
    prompt: list[int], parts: Sequence[Part], decode: Decode, stop_reason: str, num_tokens: int | None = None
) -> Answer:
    """The parts as one answer, with text decoded from all of it; of `num_tokens` tokens if given."""
    with_log_probs = bool(parts) and all(part.log_probs is not None for part in parts)
    token_ids = [token for part in parts for token in part.token_ids][:num_tokens]
    return Answer(
        token_ids=token_ids,
        stop_reason=stop_reason,
        weight_versions=[version for part in parts for version in part.weight_versions][:num_tokens],
        log_probs=[value for part in parts for value in part.log_probs or []][:num_tokens] if with_log_probs else None,
        text=decode(token_ids),
        prompt_log_probs=_prompt_log_probs(prompt, parts),
    )


def _prompt_log_probs(prompt: list[int], parts: Sequence[Part]) -> list[float] | None:
    """Of the prompt alone, from the first part that has them: later ones count tokens of the answer as prompt."""
    given = (part.prompt_log_probs for part in parts)
    return next(
        (values[: len(prompt) - 1] for values in given if values is not None and len(values) >= len(prompt) - 1), None
    )


def _end_by_straddling_stop(parts: Sequence[Part], params: dict[str, Any], decode: Decode) -> int | None:
    """After how many tokens a stop string that begins in one part and ends in a later one is complete, if one is.

    An engine that goes on does not see the text before its part, and writes past such an end. Only near the borders of
    parts is there anything to find: stop strings within a part are the engine's own business.
    """
    stop = params.get("stop") or ()
    stop = (stop,) if isinstance(stop, str) else tuple(stop)
    if not stop:
        return None
    token_ids = [token for part in parts for token in part.token_ids]
    reach = 4 * max(map(len, stop)) + 8  # tokens: one character may take four, and special ones have no text
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

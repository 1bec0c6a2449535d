"""Sampling settings of a request, as the engines' keywords."""

from collections.abc import Mapping
from typing import Any

from skyrl_train.inference_engines.base import SamplingKeywords
from skyrl_train.inference_engines.native.requests import EngineSamplingParams
from skyrl_train.inference_engines.openai_api.errors import refused
from skyrl_train.inference_engines.openai_api.schema import ChatRequest, CompletionRequest

_DEFAULTED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_SAME_NAME = (*_DEFAULTED, "min_tokens", "stop_token_ids", "ignore_eos")


def checked_defaults(defaults: Mapping[str, object] | None) -> SamplingKeywords:
    """Keywords for requests that name none. Raises ValueError for others than temperature, top_p, top_k, min_p and
    repetition_penalty."""
    if unknown := sorted(set(defaults or {}) - set(_DEFAULTED)):
        raise ValueError(f"sampling_defaults may hold {', '.join(_DEFAULTED)}; got {', '.join(unknown)}")
    return dict(defaults or {})


def sampling_keywords(
    request: ChatRequest | CompletionRequest,
    budget: int | None,
    room: int,
    defaults: Mapping[str, Any],
    log_probs: bool,
) -> SamplingKeywords:
    """The keywords of `InferenceEngineInput.sampling_params`, without `seed`.

    Args:
        budget: the most tokens that the request allows; None: what the context leaves.
        room: what the context leaves. An answer that would be longer ends there with finish reason `length`.
        log_probs: whether someone else than the client wants them.

    Raises:
        ApiError: a value is out of range.
    """
    if budget is not None and budget < 1:
        raise refused(f"max_tokens must be at least 1; got {budget}", "max_tokens")
    keywords = dict(defaults)
    keywords |= {name: value for name in _SAME_NAME if (value := getattr(request, name)) is not None}
    keywords["max_tokens"] = room if budget is None else min(budget, room)
    if keywords.get("min_tokens"):
        keywords["min_tokens"] = min(keywords["min_tokens"], room)
    if request.stop_texts:
        keywords["stop"] = request.stop_texts
    client_wants_log_probs = request.logprobs is not None and request.logprobs is not False
    keywords["logprobs"] = 0 if client_wants_log_probs or log_probs else None
    if client_wants_log_probs and isinstance(request, CompletionRequest) and request.echo:
        keywords["prompt_logprobs"] = 0
    try:
        EngineSamplingParams.from_dict(keywords)  # what an engine would say, before it is asked
    except ValueError as error:
        raise refused(str(error)) from error
    return keywords

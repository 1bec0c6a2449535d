"""Conversion of a request's sampling settings to engine keywords."""

from collections.abc import Mapping
from typing import Any

from skyrl_train.endpoint.errors import build_refusal
from skyrl_train.endpoint.openai_api.schema import ChatRequest, CompletionRequest
from skyrl_train.inference_engines.base import Feature, SamplingKeywords
from skyrl_train.inference_engines.constraints import Constraint
from skyrl_train.inference_engines.native.requests import EngineSamplingParams

_DEFAULTED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_SAME_NAME = (*_DEFAULTED, "frequency_penalty", "presence_penalty", "min_tokens", "stop_token_ids", "ignore_eos")


def check_defaults(defaults: Mapping[str, object] | None) -> SamplingKeywords:
    """Return the validated default keywords. Raises ValueError for keywords other than temperature, top_p, top_k, min_p
    and repetition_penalty.
    """
    if unknown := sorted(set(defaults or {}) - set(_DEFAULTED)):
        raise ValueError(f"sampling_defaults may contain {', '.join(_DEFAULTED)}; got {', '.join(unknown)}")
    return dict(defaults or {})


def build_sampling_keywords(
    request: ChatRequest | CompletionRequest,
    budget: int | None,
    room: int,
    defaults: Mapping[str, Any],
    log_probs: bool,
) -> SamplingKeywords:
    """Build the keywords of `GenerationRequest.sampling_params`, without `seed`.

    Args:
        budget: maximum number of tokens of the request; None: up to the context length.
        room: tokens left in the context. A longer response ends there with finish reason `length`.
        log_probs: whether log-probs are needed by others than the client.

    Raises:
        ApiError: a value is out of range.
    """
    if budget is not None and budget < 1:
        raise build_refusal(f"max_tokens must be at least 1; got {budget}", "max_tokens")
    keywords = dict(defaults)
    keywords |= {name: value for name in _SAME_NAME if (value := getattr(request, name)) is not None}
    keywords["max_tokens"] = room if budget is None else min(budget, room)
    if keywords.get("min_tokens"):
        keywords["min_tokens"] = min(keywords["min_tokens"], room)
    if request.logit_bias:
        keywords["logit_bias"] = _parse_biases(request.logit_bias)
    if request.stop_texts:
        keywords["stop"] = request.stop_texts
    keywords["logprobs"] = 0 if request.num_top is None and log_probs else request.num_top
    if request.num_top is not None and isinstance(request, CompletionRequest) and request.echo:
        keywords["prompt_logprobs"] = request.num_top
    try:
        EngineSamplingParams.from_dict(keywords)  # the engine's validation, before the request is sent
    except ValueError as error:
        raise build_refusal(str(error)) from error
    return keywords


def _parse_biases(given: Mapping[str, float]) -> dict[int, float]:
    for token in given:
        if not token.isascii() or not token.isdigit():
            raise build_refusal(f"logit_bias keys must be token ids; got {token!r}", "logit_bias")
    return {int(token): value for token, value in given.items()}


_FEATURES: tuple[tuple[str, Feature, str], ...] = (
    ("frequency_penalty", "penalties", "frequency_penalty"),
    ("presence_penalty", "penalties", "presence_penalty"),
    ("logit_bias", "logit_bias", "logit_bias"),
    ("logprobs", "top_log_probs", "logprobs"),
    ("prompt_logprobs", "prompt_top_log_probs", "logprobs"),
)


def check_supported(
    keywords: Mapping[str, Any], constraint: Constraint | None, param: str | None, unsupported: Mapping[Feature, str]
) -> None:
    """Reject settings that the engine does not support.

    Args:
        param: request field of the constraint.
        unsupported: see `EngineInfo`.

    Raises:
        ApiError: unsupported; names the field and the engine's reason.
    """
    wanted: list[tuple[Feature, str]] = [(feature, field) for name, feature, field in _FEATURES if keywords.get(name)]
    if constraint is not None:
        wanted.append(("json_schema" if constraint.kind == "json_schema" else "grammar", param or "response_format"))
    for feature, field in wanted:
        if feature in unsupported:
            raise build_refusal(
                f"{field}: not supported by the engine: {unsupported[feature]}", field, "unsupported_by_engine"
            )

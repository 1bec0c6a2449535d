"""Checks of request values against the model and its losses. Errors name the field, the value and the rule."""

from typing import Protocol

import numpy as np

from skyrl_gym.suggestions import did_you_mean
from tx.errors import RequestError
from tx.tinker.chunked_lists import to_array
from tx.tinker.types import Datum, LoraSpec, SampleParams, SampleSpec, TrainingPass
from tx.tinker.wire.codec import TrainingRequest
from tx.tinker.wire.losses import ELSEWHERE, LOSS_RULES, TARGETS, LossRule, fill_default_config

MAX_SAMPLES = 1024
MAX_STOPS = 64
MAX_TOPK = 1000
MAX_TOPK_NUMBERS = 2**22
"""Maximum of prompt positions times k in one response."""
TEMPERATURES = (1e-3, 100.0)


# ---- training


class ModelBounds(Protocol):
    """Limits that data are checked against, as `BaseModelFacts` has them."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_context(self) -> int: ...


def check_training(request: TrainingRequest | TrainingPass, facts: ModelBounds, *, finite: bool = True) -> None:
    """Check data, loss and settings.

    Args:
        finite: require finite inputs; the training backend accepts others, which only affect their model's gradient.

    Raises:
        RequestError: the request cannot be trained on.
    """
    rule = _get_rule(request.loss_fn)
    _check_loss_config(request, rule)
    if not request.data:
        raise RequestError("data must contain at least one datum; got none")
    for i, datum in enumerate(request.data):
        _check_datum(datum, f"data[{i}]", request.loss_fn, rule, facts, finite)


def _get_rule(loss_fn: str) -> LossRule:
    if loss_fn in LOSS_RULES:
        return LOSS_RULES[loss_fn]
    if loss_fn in ELSEWHERE:
        raise RequestError(f"loss_fn {loss_fn!r} is not supported by this server: {ELSEWHERE[loss_fn]}")
    hint = did_you_mean(loss_fn, LOSS_RULES, otherwise="no similar name")
    raise RequestError(f"loss_fn must be one of {', '.join(LOSS_RULES)}; got {loss_fn[:80]!r}; {hint}")


def _check_loss_config(request: TrainingRequest | TrainingPass, rule: LossRule) -> None:
    config = fill_default_config(request.loss_fn, request.loss_config)
    for name, value in config.items():
        if name not in rule.config:
            hint = did_you_mean(name, rule.config, otherwise="no similar name")
            takes = f"takes {', '.join(rule.config)}; {hint}" if rule.config else "takes no settings"
            raise RequestError(f"loss_fn_config[{name[:80]!r}]: {request.loss_fn} {takes}")
        if not np.isfinite(value):
            raise RequestError(f"loss_fn_config[{name!r}] must be finite; got {value}")
    low, high = (config.get(f"clip_{end}_threshold", 0.0) for end in ("low", "high"))
    if "clip_low_threshold" in rule.config and not 0 <= low <= high:
        raise RequestError(
            "loss_fn_config: clip_low_threshold and clip_high_threshold are bounds of the ratio, "
            f"0 <= low <= high; got {low} and {high}"
        )
    if config.get("beta", 0.0) < 0:
        raise RequestError(f"loss_fn_config['beta'] must be 0 or more; got {config['beta']}")


def _check_datum(datum: Datum, name: str, loss_fn: str, rule: LossRule, facts: ModelBounds, finite: bool) -> None:
    length = len(datum.tokens)
    if not 0 < length <= facts.max_context:
        raise RequestError(f"{name}.model_input must be 1 to {facts.max_context} tokens, the context; got {length}")
    check_tokens(datum.tokens, f"{name}.model_input", facts)
    for key in rule.required:
        if key not in datum.inputs:
            raise RequestError(f"{name}.loss_fn_inputs must have {key!r} for {loss_fn}; got {sorted(datum.inputs)[:8]}")
    targets = datum.inputs[TARGETS]
    _check_target_shape(targets, f"{name}.loss_fn_inputs[{TARGETS!r}]", length, loss_fn, rule)
    check_tokens(targets, f"{name}.loss_fn_inputs[{TARGETS!r}]", facts)
    for key, array in datum.inputs.items():
        if key != TARGETS:
            field = f"{name}.loss_fn_inputs[{key[:80]!r}]"
            _check_input(array, key, field, targets.shape, loss_fn, rule)
            if finite and not np.isfinite(array).all():
                place = tuple(int(i) for i in np.argwhere(~np.isfinite(array))[0])
                raise RequestError(f"{field} must be finite; got {array[place]} at {_format_location(place)}")
    _check_bounds(datum, name)


def _check_target_shape(targets: np.ndarray, name: str, length: int, loss_fn: str, rule: LossRule) -> None:
    shape, right = list(targets.shape), targets.shape[:1] == (length,)
    if not rule.many_targets and (targets.ndim != 1 or not right):
        raise RequestError(f"{name} must have shape [{length}], one for each input token, for {loss_fn}; got {shape}")
    if targets.ndim not in (1, 2) or not right or not targets.size:
        raise RequestError(
            f"{name} must have shape [{length}] or [{length}, K], one or K for each input token; got {shape}"
        )


def _check_input(array: np.ndarray, key: str, name: str, shape: tuple[int, ...], loss_fn: str, rule: LossRule) -> None:
    if key not in rule.inputs:
        hint = did_you_mean(key, rule.inputs, otherwise="no similar name")
        raise RequestError(f"{name} is no input of {loss_fn}, which takes {', '.join(rule.inputs)}; {hint}")
    if array.shape != shape:
        raise RequestError(f"{name} must have the shape of the targets, {list(shape)}; got {list(array.shape)}")


def _check_bounds(datum: Datum, name: str) -> None:
    """Check that no token's lower bound is above its upper bound, where both are given."""
    low, high = datum.inputs.get("clip_low_threshold"), datum.inputs.get("clip_high_threshold")
    if low is not None and high is not None and (low > high).any():
        place = int(np.argmax(low > high))
        raise RequestError(
            f"{name}.loss_fn_inputs['clip_low_threshold'] must not be above 'clip_high_threshold'; "
            f"got {low[place]} and {high[place]} at {place}"
        )


def check_tokens(tokens: np.ndarray, name: str, facts: ModelBounds) -> None:
    """Check token ids of any shape.

    Raises:
        RequestError: an id is outside the vocabulary.
    """
    if not tokens.size or (tokens.min() >= 0 and tokens.max() < facts.vocab_size):
        return
    place = tuple(int(i) for i in np.argwhere((tokens < 0) | (tokens >= facts.vocab_size))[0])
    raise RequestError(
        f"{name} must be token ids from 0 to {facts.vocab_size - 1}, the vocabulary; "
        f"got {tokens[place]} at {_format_location(place)}"
    )


def _format_location(place: tuple[int, ...]) -> str:
    return str(place[0]) if len(place) == 1 else str(list(place))


def check_lora(lora: LoraSpec, max_rank: int, can_train_unembed: bool = True) -> None:
    """Check that a backend supports an adapter.

    Raises:
        RequestError: unsupported.
    """
    if not 0 < lora.rank <= max_rank:
        raise RequestError(f"lora_config.rank must be 1 to {max_rank}; got {lora.rank}")
    if not (lora.train_attn or lora.train_mlp or (lora.train_unembed and can_train_unembed)):
        raise RequestError("lora_config must train something: train_attn, train_mlp or train_unembed")


# ---- sampling


def check_sample(spec: SampleSpec, facts: ModelBounds) -> None:
    """Check prompt, remaining context and sampling parameters.

    Raises:
        RequestError: the prompt cannot be sampled from.
    """
    if not spec.prompt:
        raise RequestError("prompt must contain at least one token; got none")
    _check_room(len(spec.prompt), spec.params.max_tokens, facts.max_context)
    check_tokens(np.asarray(spec.prompt), "prompt", facts)
    if not 1 <= spec.num_samples <= MAX_SAMPLES:
        raise RequestError(f"num_samples must be 1 to {MAX_SAMPLES}; got {spec.num_samples}")
    _check_distribution(spec.params)
    _check_stops(spec.params, facts)
    _check_targets(spec, facts)
    k = spec.topk_prompt_logprobs
    if not 0 <= k <= min(MAX_TOPK, facts.vocab_size) or k * len(spec.prompt) > MAX_TOPK_NUMBERS:
        raise RequestError(
            f"topk_prompt_logprobs must be 0 to {min(MAX_TOPK, facts.vocab_size)}, "
            f"and at most {MAX_TOPK_NUMBERS} numbers over the whole prompt; got {k}"
        )


def _check_targets(spec: SampleSpec, facts: ModelBounds) -> None:
    if (targets := spec.targets) is None:
        return
    if targets.shape[0] != len(spec.prompt) - 1:
        raise RequestError(
            f"target_prompt_logprobs.shape must be [{len(spec.prompt) - 1}, K], a row for each prompt token but the "
            f"first; got {list(targets.shape)}"
        )
    if len(targets.ids) > MAX_TOPK_NUMBERS:
        raise RequestError(f"target_prompt_logprobs must be at most {MAX_TOPK_NUMBERS} tokens; got {len(targets.ids)}")
    ids = to_array(targets.ids)
    if ids.size and not -1 <= ids.min() <= ids.max() < facts.vocab_size:
        raise RequestError(
            f"target_prompt_logprobs.data must be token ids below {facts.vocab_size}, or -1 for none; got "
            f"{next(token for token in targets.ids if not -1 <= token < facts.vocab_size)}"
        )


def _check_room(prompt: int, max_tokens: int | None, context: int) -> None:
    if prompt >= context:
        raise RequestError(f"prompt must leave room for a completion in the context of {context} tokens; got {prompt}")
    if max_tokens is not None and not 1 <= max_tokens <= context - prompt:
        raise RequestError(
            f"sampling_params.max_tokens must be 1 to {context - prompt}, which is what the prompt's {prompt} tokens "
            f"leave in the context of {context}; got {max_tokens}"
        )


def _check_distribution(params: SampleParams) -> None:
    low, high = TEMPERATURES
    if params.temperature != 0 and not low <= params.temperature <= high:
        raise RequestError(
            f"sampling_params.temperature must be 0 (greedy) or {low} to {high:g}; got {params.temperature}"
        )
    if not 0 < params.top_p <= 1:
        raise RequestError(f"sampling_params.top_p must be above 0 and at most 1; got {params.top_p}")
    if params.top_k != -1 and params.top_k < 1:
        raise RequestError(f"sampling_params.top_k must be 1 or more, or -1 for all tokens; got {params.top_k}")


def _check_stops(params: SampleParams, facts: ModelBounds) -> None:
    if len(params.stop_strings) + len(params.stop_token_ids) > MAX_STOPS:
        raise RequestError(
            f"sampling_params.stop must be at most {MAX_STOPS} stops; "
            f"got {len(params.stop_strings) + len(params.stop_token_ids)}"
        )
    if "" in params.stop_strings:
        raise RequestError("sampling_params.stop must not contain an empty string, which would stop immediately")
    check_tokens(np.asarray(params.stop_token_ids, dtype=object), "sampling_params.stop", facts)

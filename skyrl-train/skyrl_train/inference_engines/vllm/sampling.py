"""Our sampling keywords in vLLM's words, for its Python interface and for its servers. Does not import vllm at the top.

The meaning of every keyword is the native engine's (`native/requests.py` checks them); here is only what vLLM calls it.
"""

from typing import TYPE_CHECKING, Any

from skyrl_train.inference_engines.base import SamplingKeywords
from skyrl_train.inference_engines.native.requests import EngineSamplingParams
from skyrl_train.inference_engines.native.sampling import random_key

if TYPE_CHECKING:
    from vllm import SamplingParams as VLLMSamplingParams

SMALLEST_TEMPERATURE = 0.01
"""vLLM raises smaller ones to this (`vllm/sampling_params.py`, `_MAX_TEMP`), so they are refused."""

SeedPair = tuple[int, int]


def split_seeds(given: SamplingKeywords | None, num: int) -> tuple[EngineSamplingParams, list[SeedPair | None]]:
    """The checked keywords, and what the randomness of each of `num` requests is made of.

    Args:
        given: the keywords of `InferenceEngineInput`; `seed` may be one number or one `[seed, index]` a request.

    Returns:
        The settings, and a (seed, index) a request; None where the engine's own random numbers will do.

    Raises:
        ValueError: an unknown keyword, or a value out of range.
    """
    values = dict(given or {})
    pairs = values.pop("seed") if isinstance(values.get("seed"), list | tuple) else None
    params = EngineSamplingParams.from_dict(values)
    if not params.is_greedy and params.temperature < SMALLEST_TEMPERATURE:
        raise ValueError(
            f"sampling parameter temperature must be 0 (greedy) or at least {SMALLEST_TEMPERATURE}, which vLLM takes "
            f"smaller ones for; got {params.temperature!r}"
        )
    if pairs is not None:
        return params, _checked_pairs(pairs, num)
    if params.seed is None:
        return params, [None] * num
    return params, [(params.seed, index) for index in range(num)]


def _checked_pairs(pairs: Any, num: int) -> list[SeedPair | None]:
    if len(pairs) != num:
        raise ValueError(f"sampling parameter seed must have one [seed, index] a request; got {len(pairs)} for {num}")
    checked: list[SeedPair | None] = []
    for pair in pairs:
        if not (isinstance(pair, list | tuple) and len(pair) == 2 and all(isinstance(word, int) for word in pair)):
            raise ValueError(f"sampling parameter seed must be an integer or a list of [seed, index]; got {pair!r}")
        checked.append((pair[0], pair[1]))
    return checked


def seed_of(pair: SeedPair | None, num_prompt_tokens: int) -> int | None:
    """One number in [0, 2**63) from (seed, index) and the prompt's length.

    vLLM begins a request's random numbers anew with each request. The length keeps an aborted answer that is sent again
    behind its prompt from drawing the numbers of its first tokens a second time.
    """
    if pair is None:
        return None
    return int(random_key(int(random_key(*pair)), num_prompt_tokens)) >> 1


def http_sampling(params: EngineSamplingParams, seed: int | None) -> SamplingKeywords:
    """The sampling part of a body for `/v1/completions`. Every keyword is there, so that a server's own defaults (those
    of the model's `generation_config.json`) change nothing."""
    return {
        "max_tokens": params.max_tokens,
        "temperature": 0.0 if params.is_greedy else params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p,
        "repetition_penalty": params.repetition_penalty,
        "stop": list(params.stop),
        "stop_token_ids": list(params.stop_token_ids),
        "ignore_eos": params.ignore_eos,
        "min_tokens": params.min_tokens,
        "seed": seed,
        "logprobs": params.logprobs,
        "prompt_logprobs": params.prompt_logprobs,
        "skip_special_tokens": params.skip_special_tokens,
        "spaces_between_special_tokens": False,
        "include_stop_str_in_output": True,
    }


def vllm_sampling(params: EngineSamplingParams, seed: int | None) -> "VLLMSamplingParams":
    """vLLM's own object. Tokens arrive in two parts: the first one, which tells that the request has begun, and the
    rest when it ends; parts in between would only cost time."""
    from vllm import SamplingParams as VLLMSamplingParams
    from vllm.sampling_params import RequestOutputKind

    return VLLMSamplingParams(
        **http_sampling(params, seed),
        detokenize=bool(params.stop),
        flat_logprobs=True,
        output_kind=RequestOutputKind.DELTA,
        stream_interval=1 << 30,
    )

"""Conversion of sampling keywords for vLLM's Python interface and servers. Imports vllm lazily.

Keywords are defined and validated by the native engine (`native/requests.py`); this module only translates them.
"""

from typing import TYPE_CHECKING, Any

from skyrl_train.errors import UnsupportedByEngine
from skyrl_train.inference_engines.base import SamplingKeywords
from skyrl_train.inference_engines.constraints import Constraint
from skyrl_train.inference_engines.native.requests import EngineSamplingParams, SeedPair, split_seed
from skyrl_train.inference_engines.native.sampling import compute_random_key

if TYPE_CHECKING:
    from vllm import SamplingParams as VLLMSamplingParams

SMALLEST_TEMPERATURE = 0.01
"""Smallest temperature that vLLM does not change (`vllm/sampling_params.py`, `_MAX_TEMP`); smaller ones are rejected.
"""


ANSWER_FROM_START = (
    "constraints and penalties start at the first generated token; only the native engine can continue those of the "
    "prompt"
)


def check_and_split_seed(given: SamplingKeywords) -> tuple[EngineSamplingParams, SeedPair | None]:
    """Check sampling settings as `split_seed` does, and that vLLM would not change the temperature. Used for remote
    servers of every kind.
    """
    params, seed = split_seed(given)
    if params.return_kept_tokens:
        raise UnsupportedByEngine("return_kept_tokens: only the native engine returns the tokens kept by truncation")
    if params.num_answer_tokens and params.depends_on_answer:
        raise UnsupportedByEngine(f"num_answer_tokens={params.num_answer_tokens}: {ANSWER_FROM_START}")
    if not params.is_greedy and params.temperature < SMALLEST_TEMPERATURE:
        raise ValueError(
            f"sampling parameter temperature must be 0 (greedy) or at least {SMALLEST_TEMPERATURE}, because vLLM "
            f"raises smaller values to it; got {params.temperature!r}"
        )
    return params, seed


def compute_seed(pair: SeedPair | None, num_prompt_tokens: int) -> int | None:
    """Compute one number in [0, 2**63) from (seed, index) and the prompt's length.

    vLLM restarts the random numbers with each request. The length prevents a continued completion from reusing the
    numbers of its first tokens.
    """
    if pair is None:
        return None
    return int(compute_random_key(int(compute_random_key(*pair)), num_prompt_tokens)) >> 1


def build_http_sampling(params: EngineSamplingParams, seed: int | None) -> SamplingKeywords:
    """Build the sampling fields of a body for `/v1/completions`. Every keyword is set, so that a server's defaults
    (from the model's `generation_config.json`) have no effect.
    """
    return {
        "max_tokens": params.max_tokens,
        "temperature": 0.0 if params.is_greedy else params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p,
        "repetition_penalty": params.repetition_penalty,
        "frequency_penalty": params.frequency_penalty,
        "presence_penalty": params.presence_penalty,
        "logit_bias": dict(params.logit_bias) or None,
        "structured_outputs": None if params.constraint is None else build_structured_outputs(params.constraint),
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


def build_structured_outputs(constraint: Constraint) -> dict[str, Any]:
    """Convert a constraint to vLLM's fields. Raises ValueError if its text is not a JSON object."""
    if constraint.kind == "lark":
        return {"grammar": constraint.text}
    return {"json": constraint.build_bounded_schema()}


def build_vllm_sampling(params: EngineSamplingParams, seed: int | None) -> "VLLMSamplingParams":
    """Build vLLM's `SamplingParams`. Output arrives in two parts: the first token, which shows that the request has
    started, and the rest at its end; intermediate parts would only cost time.
    """
    from vllm import SamplingParams as VLLMSamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    keywords = build_http_sampling(params, seed)
    if params.constraint is not None:
        keywords["structured_outputs"] = StructuredOutputsParams(**build_structured_outputs(params.constraint))
    return VLLMSamplingParams(
        **keywords,
        detokenize=bool(params.stop),
        flat_logprobs=True,
        output_kind=RequestOutputKind.DELTA,
        stream_interval=1 << 30,
    )

"""Log-probs as computed by the trainer, for vLLM: log softmax(logits / temperature), temperature 1 if greedy.

vLLM reports either log softmax(logits) (`raw_logprobs`) or log-probs after penalties and truncation
(`processed_logprobs`), both after the mask of a constraint. Therefore the step from raw logits to reported log-probs is
replaced in the worker processes by one that divides by each request's temperature. Sampled tokens do not change.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import torch

if TYPE_CHECKING:
    from vllm.v1.sample.metadata import SamplingMetadata

P = ParamSpec("P")
T = TypeVar("T")

_GREEDY_BELOW = 1e-5


def compute_tempered_log_softmax(logits: torch.Tensor, temperature: torch.Tensor | float | None) -> torch.Tensor:
    """Compute log softmax(logits / temperature) in float32.

    Args:
        logits: [B, V]
        temperature: [B], a scalar, or None for 1. Below 1e-5 sampling is greedy and 1 is used.
    """
    logits = logits.float()
    if isinstance(temperature, torch.Tensor):
        divisor = torch.where(temperature < _GREEDY_BELOW, 1.0, temperature)[:, None].to(logits)
        logits = logits / divisor
    elif temperature is not None and temperature >= _GREEDY_BELOW:
        logits = logits / temperature
    return logits.log_softmax(-1)


def apply_temperature_to_log_probs(runner: Any) -> None:
    """Make a vLLM model runner (`vllm.v1.worker.gpu_model_runner.GPUModelRunner`) report log-probs as described above.

    Raises:
        RuntimeError: unsupported sampler of this vLLM version.
    """
    sampler = getattr(runner, "sampler", None)
    if sampler is None or not all(
        hasattr(owner, name)
        for owner, name in (
            (sampler, "compute_logprobs"),
            (runner, "_get_prompt_logprobs_dict"),
            (runner, "num_prompt_logprobs"),
        )
    ):
        raise RuntimeError(
            "the sampler of this vLLM release cannot be changed to report log softmax(logits / temperature)"
        )
    if sampler.logprobs_mode != "raw_logprobs":
        raise RuntimeError(f"logprobs_mode must be raw_logprobs; got {sampler.logprobs_mode}")
    state = _SamplerState()
    sampler.compute_logprobs = lambda logits: compute_tempered_log_softmax(
        logits if state.unmasked is None else state.unmasked, state.present
    )
    _save_unmasked_logits(state)
    sampler.forward = _forward_with_temperatures(sampler.forward, state)
    runner._get_prompt_logprobs_dict = _apply_temperature_to_prompt_log_probs(runner, state)


class _SamplerState:
    """Temperatures of the current rows, and their logits before constraint masks."""

    def __init__(self) -> None:
        self.present: torch.Tensor | float | None = None
        self.unmasked: torch.Tensor | None = None


def _save_unmasked_logits(state: _SamplerState) -> None:
    """Save unmasked logits: vLLM masks the logits of constrained requests in place before the sampler sees them."""
    from vllm.v1.worker import gpu_model_runner as gpu_model_runner_module

    gpu_model_runner: Any = gpu_model_runner_module
    original = gpu_model_runner.apply_grammar_bitmask

    def masked(scheduler_output: Any, grammar_output: Any, input_batch: Any, logits: torch.Tensor) -> None:
        state.unmasked = logits.clone()
        original(scheduler_output, grammar_output, input_batch, logits)

    gpu_model_runner.apply_grammar_bitmask = masked


def _forward_with_temperatures(
    forward: Callable[Concatenate[torch.Tensor, "SamplingMetadata", P], T], state: _SamplerState
) -> Callable[Concatenate[torch.Tensor, "SamplingMetadata", P], T]:
    def tempered(logits: torch.Tensor, sampling_metadata: "SamplingMetadata", *args: P.args, **kwargs: P.kwargs) -> T:
        state.present = None if sampling_metadata.all_greedy else sampling_metadata.temperature
        try:
            return forward(logits, sampling_metadata, *args, **kwargs)
        finally:
            state.present = state.unmasked = None

    return tempered


def _apply_temperature_to_prompt_log_probs(runner: Any, state: _SamplerState) -> Callable[..., dict[str, object]]:
    """Make vLLM compute prompt log-probs for one temperature at a time, since it ignores a request's temperature."""
    original = runner._get_prompt_logprobs_dict

    def tempered(*args: object, **kwargs: object) -> dict[str, object]:
        everything: dict[str, int] = runner.num_prompt_logprobs
        if not everything:
            return {}
        groups: dict[float, dict[str, int]] = {}
        for request_id, wanted in everything.items():
            request = runner.requests.get(request_id)
            temperature = request.sampling_params.temperature if request is not None else 1.0
            groups.setdefault(temperature, {})[request_id] = wanted
        result: dict[str, object] = {}
        try:
            for temperature, group in groups.items():
                state.present = temperature
                runner.num_prompt_logprobs = group
                names = list(group)
                result |= original(*args, **kwargs)  # removes complete requests from the group
                for request_id in names:
                    if request_id not in group:
                        del everything[request_id]
        finally:
            state.present = None
            runner.num_prompt_logprobs = everything
        return result

    return tempered

"""Trial of a loaded model: generate a few tokens and compare with the model's own forward.

Attention and cache are reimplemented, so a model with an unsupported part would fail at the first request, or silently
generate wrong completions.
"""

import numpy as np
import torch
from transformers import PreTrainedModel

from skyrl_train.inference_engines.native.architecture import build_unfit_error
from skyrl_train.inference_engines.native.attention import ATTENTION_NAME
from skyrl_train.inference_engines.native.core import NativeEngineCore
from skyrl_train.inference_engines.native.requests import EngineSamplingParams, Request

_PROMPT_TOKENS, _NEW_TOKENS = 40, 3
_STEP = 7919
"""A prime, so that the prompt's tokens cover the entire vocabulary."""

_TOLERANCE = {torch.float32: 1e-2, torch.bfloat16: 0.5, torch.float16: 0.2}
"""Nats, mean over the new tokens: rounding differences between kernels are smaller."""


def check_generation(core: NativeEngineCore, model_path: str) -> None:
    """Check generation of a few tokens from an arbitrary prompt. Only while nothing runs.

    Raises:
        ConfigError: the model cannot be computed, or its log-probs differ from its own forward.
    """
    try:
        problem = _find_difference(core)
    except NotImplementedError as error:
        problem = str(error)
    except Exception as error:  # a model may raise any error when its attention or cache is replaced
        problem = f"{type(error).__name__}: {error}"
    if problem is not None:
        raise build_unfit_error(core.model.config, model_path, problem)
    core.release_cache()
    core.num_prompt_tokens_computed = 0


def _find_difference(core: NativeEngineCore) -> str | None:
    """Generate a few tokens, and describe the error of their log-probs; None if they are correct."""
    length = min(_PROMPT_TOKENS, core.max_model_len - 1)
    prompt = core.check_prompt((np.arange(1, length + 1) * _STEP % core.vocabulary).tolist())
    request = Request(prompt, EngineSamplingParams(max_tokens=_NEW_TOKENS, temperature=0.0, ignore_eos=True), (0, 0))
    core.add_request(request)
    while not (outcomes := core.step()):
        pass
    completion = outcomes[request]
    if isinstance(completion, Exception):  # weights with NaN: requests will fail, and an update may fix it
        return None
    ids = torch.tensor([*prompt.tolist(), *completion.token_ids], device=core.model.device)
    expected = _compute_transformers_log_probs(core.model, ids)[-len(completion.token_ids) :]
    difference = (torch.tensor(completion.log_probs) - expected).abs().mean().item()
    tolerance = _TOLERANCE[core.model.dtype]
    if difference <= tolerance:
        return None
    return f"log-probs of its tokens differ from those of the model's own forward by {difference:.3g} (> {tolerance:g})"


@torch.inference_mode()
def _compute_transformers_log_probs(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """Compute the log-prob of every token [L] but the first, [L - 1], by transformers' attention, without a cache."""
    model.set_attn_implementation("eager")
    try:
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
    finally:
        model.set_attn_implementation(ATTENTION_NAME)
    return logits.float().log_softmax(-1).gather(1, ids[1:, None])[:, 0].cpu()

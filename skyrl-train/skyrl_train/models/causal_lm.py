"""Causal language models from transformers, and the log-probs they give to responses. Knows no process but its own.

Shapes: B sequences, T tokens of prompt and response, R of the response, V words of the vocabulary.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.import_utils import is_flash_attn_2_available

from skyrl_train.models.cpu_linear import use_onednn_linear


def attention_implementation(flash_attn: bool, device: torch.device) -> str:
    """The fastest exact attention there is on `device`, or the eager one."""
    if not flash_attn:
        return "eager"
    return "flash_attention_2" if device.type == "cuda" and is_flash_attn_2_available() else "sdpa"


def load_causal_lm(
    path: str,
    *,
    device: torch.device,
    flash_attn: bool = True,
    config_overrides: dict[str, Any] | None = None,
    gradient_checkpointing: bool = False,
    use_reentrant: bool = False,
) -> nn.Module:
    """A model in float32 in training mode (dropout off: rollouts had none), from a folder or a hub name.

    Args:
        config_overrides: fields of the model's config to replace, such as `rope_theta`.
    """
    config = AutoConfig.from_pretrained(path, trust_remote_code=True)
    for name, value in (config_overrides or {}).items():
        if not hasattr(config, name):
            raise ValueError(f"model_config_kwargs.{name}: the config of {path} has no such field")
        setattr(config, name, value)
    model = AutoModelForCausalLM.from_pretrained(
        path,
        config=config,
        dtype=torch.float32,
        attn_implementation=attention_implementation(flash_attn, device),
        trust_remote_code=True,
    )
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model.train()
    if gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        model.config.use_cache = False
    if device.type == "cpu":
        use_onednn_linear(model)
    return nn.Module.to(model, device)


def trim(
    sequences: torch.Tensor, attention_mask: torch.Tensor, num_response: int
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Drops the columns that are padding in every row.

    Args:
        sequences, attention_mask: [B, T], prompts padded on the left, responses (the last `num_response` columns) on
            the right.

    Returns:
        both without those columns, and the number of response columns that are left (at least 1).
    """
    used = attention_mask.bool().any(dim=0)
    columns = used.nonzero()
    if len(columns) == 0:
        return sequences, attention_mask, num_response
    num_prompt = sequences.shape[1] - num_response
    first = min(int(columns[0]), num_prompt - 1)
    last = max(int(columns[-1]) + 1, num_prompt + 1)
    return sequences[:, first:last], attention_mask[:, first:last], last - num_prompt


def response_log_probs(
    model: nn.Module,
    sequences: torch.Tensor,
    attention_mask: torch.Tensor,
    num_response: int,
    temperature: float,
    *,
    with_entropy: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probs that the model gives to each response token, under softmax(logits / temperature).

    Args:
        sequences, attention_mask: [B, T]; the last `num_response` columns are the response.

    Returns:
        log_probs [B, R] and, if asked for, entropy [B, R] in nats, both float32. What stands at padding means nothing.
    """
    position_ids = (attention_mask.long().cumsum(dim=-1) - 1).clamp(min=0)
    output = model(
        input_ids=sequences,
        attention_mask=attention_mask,
        position_ids=position_ids,
        use_cache=False,
        logits_to_keep=num_response + 1,
    )
    # The logits at a position are about the next token: those before the first response token up to before the last.
    logits_BRV = output.logits[:, :-1].float() / temperature
    labels_BR = sequences[:, -num_response:]
    log_probs = -F.cross_entropy(logits_BRV.flatten(0, 1), labels_BR.flatten(), reduction="none").view_as(labels_BR)
    entropy = _entropy(logits_BRV) if with_entropy else None
    return log_probs, entropy


def _entropy(logits_BRV: torch.Tensor) -> torch.Tensor:
    """H = logsumexp(z) - sum_v softmax(z)_v z_v, in nats. [B, R]"""
    return logits_BRV.logsumexp(-1) - (logits_BRV.softmax(-1) * logits_BRV).sum(-1)

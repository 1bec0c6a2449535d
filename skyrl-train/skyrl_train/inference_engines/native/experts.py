"""Mixture-of-experts layers whose rows do not depend on what else is routed to the same expert."""

import torch
import torch.nn.functional as F
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from skyrl_train.inference_engines.native.attention import MIN_ROWS

EXPERTS_NAME = "skyrl_native"


def native_experts(
    module: torch.nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Each expert on the tokens routed to it, padded to `MIN_ROWS`: fewer rows would take another matrix kernel.

    A token adds up its experts in the order of their numbers, so its sum is the same in every batch.

    Args:
        module: holds `gate_up_proj` [E, 2I, D], `down_proj` [E, D, I] and `_apply_gate`
        hidden_states: [N, D]
        top_k_index, top_k_weights: [N, k]
    Returns: [N, D]
    """
    output = torch.zeros_like(hidden_states)
    for expert in top_k_index.unique().tolist():
        token, choice = torch.where(top_k_index == expert)
        rows = hidden_states[token]
        if len(rows) < MIN_ROWS:
            rows = F.pad(rows, (0, 0, 0, MIN_ROWS - len(rows)))
        gated = module._apply_gate(F.linear(rows, module.gate_up_proj[expert]))  # pyright: ignore
        answer = F.linear(gated, module.down_proj[expert])[: len(token)]  # pyright: ignore
        output.index_add_(0, token, (answer * top_k_weights[token, choice, None]).to(output.dtype))
    return output


ALL_EXPERTS_FUNCTIONS.register(EXPERTS_NAME, native_experts)


def use_native_experts(model: torch.nn.Module) -> None:
    """Switches a model's expert layers to `native_experts`, if it has such layers and they are of the plain kind."""
    layers = [module for module in model.modules() if hasattr(module, "_is_expert_parallel")]
    plain = all(layer.has_gate and not layer.has_bias and not layer.is_transposed for layer in layers)
    if layers and plain:
        model.set_experts_implementation(EXPERTS_NAME)  # pyright: ignore[reportCallIssue]

"""Mixture-of-experts layers with adapters, in which a row does not depend on other rows routed to the same expert.

Shapes: N tokens, k experts per token, E experts, D width of the model, I of an expert, R padded rank of an adapter.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from skyrl_train.inference_engines.native.attention import MIN_ROWS

EXPERTS_NAME = "skyrl_native"
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
"""Names of the three linear layers of an expert in peft's files."""


class ExpertAdapters:
    """Adapter matrices of the experts of one layer in a pass, by projection and slot."""

    def __init__(self) -> None:
        self.matrices: dict[str, dict[int, tuple[torch.Tensor, torch.Tensor, float]]] = {p: {} for p in PROJECTIONS}
        """Projection -> slot -> A [E, R, in], B [E, out, R], scaling."""
        self.slots: torch.Tensor | None = None
        """[B] the slot of each row of the pass; None: no row uses one."""

    def compute_token_slots(self, num_tokens: int) -> torch.Tensor | None:
        """Compute the slot of each token [N]; rows have equally many tokens."""
        return None if self.slots is None else self.slots.repeat_interleave(num_tokens // len(self.slots))

    def add_to(self, output: torch.Tensor, projection: str, expert: int, x: torch.Tensor, slots: torch.Tensor) -> None:
        """Add scaling B A x to the rows that an expert computes, in place. Rows with the same adapter are computed
        together, padded to `MIN_ROWS`.

        Args:
            output, x: [n, out] and [n, in]; extra rows are padding
            slots: [n]
        """
        for slot, (a, b, scaling) in self.matrices[projection].items():
            rows = torch.where(slots == slot)[0]
            if len(rows):
                low = F.linear(pad_rows(x[rows]), a[expert]).mul_(scaling)
                output.index_add_(0, rows, F.linear(low, b[expert])[: len(rows)])


def compute_native_experts(
    module: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Apply each expert to the tokens routed to it, padded to `MIN_ROWS` (fewer rows would use another matrix kernel).
    A token sums its experts in index order, so its sum is the same in every batch.

    Args:
        module: holds `gate_up_proj` [E, 2I, D], `down_proj` [E, D, I] and `_apply_gate`; `is_transposed` matrices are
            [E, D, 2I] and [E, I, D], and `has_bias` adds `gate_up_proj_bias` and `down_proj_bias`
        hidden_states: [N, D]
        top_k_index, top_k_weights: [N, k]
    Returns: [N, D]
    """
    adapters: ExpertAdapters | None = getattr(module, "adapters", None)
    slots = adapters.compute_token_slots(len(hidden_states)) if adapters is not None else None
    output = torch.zeros_like(hidden_states)
    for expert in top_k_index.unique().tolist():
        token, choice = torch.where(top_k_index == expert)
        rows = pad_rows(hidden_states[token])
        both = _apply_expert_linear(module, "gate_up_proj", expert, rows)
        if adapters is not None and slots is not None:
            for half, projection in zip(both.chunk(2, dim=-1), ("gate_proj", "up_proj"), strict=True):
                adapters.add_to(half, projection, expert, rows, slots[token])
        gated = module._apply_gate(both)  # pyright: ignore
        answer = _apply_expert_linear(module, "down_proj", expert, gated)
        if adapters is not None and slots is not None:
            adapters.add_to(answer, "down_proj", expert, gated, slots[token])
        answer = answer[: len(token)]
        output.index_add_(0, token, (answer * top_k_weights[token, choice, None]).to(output.dtype))
    return output


def _apply_expert_linear(module: Any, name: str, expert: int, x: torch.Tensor) -> torch.Tensor:
    """Apply one linear layer of one expert."""
    weight = getattr(module, name)[expert]
    bias = getattr(module, f"{name}_bias")[expert] if module.has_bias else None
    return F.linear(x, weight.t() if module.is_transposed else weight, bias)


ALL_EXPERTS_FUNCTIONS.register(EXPERTS_NAME, compute_native_experts)


def use_native_experts(model: nn.Module) -> None:
    """Switch a model's gated expert layers, if any, to `compute_native_experts`."""
    layers = [module for module in model.modules() if hasattr(module, "_is_expert_parallel")]
    if layers and all(module.has_gate for module in layers):
        model.set_experts_implementation(EXPERTS_NAME)  # pyright: ignore[reportCallIssue]


def is_plain(module: Any) -> bool:
    """Return whether a module is a fused expert layer that supports adapters: gate before up, and no biases."""
    is_layer = hasattr(module, "_is_expert_parallel")
    return is_layer and module.has_gate and not module.has_bias and not module.is_transposed and module.is_concatenated


def get_expert_shape(module: Any, projection: str) -> tuple[int, int, int]:
    """Return the number of experts, and output and input size of one of their linear layers."""
    num_experts, width, inner = module.down_proj.shape
    return (num_experts, width, inner) if projection == "down_proj" else (num_experts, inner, width)


def pad_rows(rows: torch.Tensor) -> torch.Tensor:
    """Pad with zeros to at least `MIN_ROWS` rows."""
    return rows if len(rows) >= MIN_ROWS else F.pad(rows, (0, 0, 0, MIN_ROWS - len(rows)))

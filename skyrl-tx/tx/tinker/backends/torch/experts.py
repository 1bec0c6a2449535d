"""Mixture-of-experts layers on a CPU whose rows do not depend on what else is routed to the same expert.

Each expert's rows are filled up to whole blocks (see `layout`). Experts are frozen and have no adapters.

Shapes: N tokens, k experts of each, S slots in which the N k pairs lie by expert, D width of the model, I of an expert.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from tx.tinker.backends.torch.adapters import FrozenProduct
from tx.tinker.backends.torch.layout import BLOCK, Exchange

EXPERTS = "tx_rows"


class _Slots(NamedTuple):
    rows_of_expert: list[tuple[int, int, int]]
    """Expert, first slot, slot after the last; only of those that are used."""
    pair_of_slot: torch.Tensor
    """[S]; some pair at filler"""
    filler: torch.Tensor
    slot_of_pair: torch.Tensor
    """[N k]"""


def exact_experts(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The weighted sum of each token's experts; transformers' calling convention.

    Args:
        module: holds `gate_up_proj` [E, 2I, D], `down_proj` [E, D, I] and `_apply_gate`
        hidden_states: [N, D]
        top_k_index, top_k_weights: [N, k]

    Returns: [N, D]
    """
    num_chosen = top_k_index.shape[1]
    slots = _slots(top_k_index.flatten().numpy(), BLOCK)
    nothing = slots.filler[:0]
    pairs = hidden_states[:, None].expand(-1, num_chosen, -1).flatten(0, 1)
    x: Any = Exchange.apply(pairs, slots.pair_of_slot, slots.slot_of_pair, nothing)
    gated = module._apply_gate(_ExpertProduct.apply(x, module.gate_up_proj, slots.rows_of_expert))
    y: Any = _ExpertProduct.apply(gated, module.down_proj, slots.rows_of_expert)
    of_pairs: Any = Exchange.apply(y, slots.slot_of_pair, slots.pair_of_slot, slots.filler)
    weighted = of_pairs.unflatten(0, (-1, num_chosen)) * top_k_weights[:, :, None]
    return weighted.sum(dim=1).to(hidden_states.dtype)


ALL_EXPERTS_FUNCTIONS.register(EXPERTS, exact_experts)


def use_exact_experts(model: Any) -> bool:
    """Switches a model's expert layers to `exact_experts`. Returns whether all of them are of a kind that it knows."""
    layers = [module for module in model.modules() if hasattr(module, "_is_expert_parallel")]
    if not all(layer.has_gate and not layer.has_bias and not layer.is_transposed for layer in layers):
        return False
    if layers:
        model.set_experts_implementation(EXPERTS)
    in_lists = (name for name, module in model.named_modules() if isinstance(module, nn.Linear))
    return not any("experts" in name.split(".") for name in in_lists)


def _slots(expert_of_pair: np.ndarray, block: int) -> _Slots:
    order = np.argsort(expert_of_pair, kind="stable")
    counts = np.bincount(expert_of_pair)
    rows, pair_of_slot, filler, slot_of_pair = [], [], [], np.empty(len(order), np.int64)
    at = taken = 0
    for expert in np.flatnonzero(counts).tolist():
        count = int(counts[expert])
        end = at + -(-count // block) * block
        pairs = order[taken : taken + count]
        slot_of_pair[pairs] = np.arange(at, at + count)
        pair_of_slot += [pairs, np.full(end - at - count, pairs[0])]
        filler.append(np.arange(at + count, end))
        rows.append((expert, at, end))
        at, taken = end, taken + count
    return _Slots(
        rows, *(torch.from_numpy(x) for x in (np.concatenate(pair_of_slot), np.concatenate(filler), slot_of_pair))
    )


class _ExpertProduct(torch.autograd.Function):
    """x_s W_e^T of the slots of each expert; W is frozen."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weights: torch.Tensor, rows: list[tuple[int, int, int]]) -> torch.Tensor:
        ctx.weights, ctx.rows = weights, rows
        return torch.cat([FrozenProduct(weights[expert], None).forward(x[a:b]) for expert, a, b in rows])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        dy = gradient.contiguous()
        dx = [FrozenProduct(ctx.weights[expert], None).backward(dy[a:b]) for expert, a, b in ctx.rows]
        return torch.cat(dx), None, None

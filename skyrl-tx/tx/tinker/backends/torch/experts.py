"""Mixture-of-experts layers with adapters, whose rows do not depend on other rows routed to the same expert.

Each model's rows of an expert are contiguous and padded to whole blocks (see `layout`).

Shapes: N tokens, k experts of each, S slots that hold the N k pairs sorted by expert, D width of the model, I of an
expert.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from peft.utils.transformers_weight_conversion import _MOE_TARGET_MODULE_MAPPING
from torch import nn
from transformers.conversion_mapping import _MODEL_TO_CONVERSION_PATTERN, get_checkpoint_conversion_mapping

from skyrl_train.inference_engines.native.experts import PROJECTIONS, get_expert_shape, is_plain
from tx.tinker.backends.torch.adapters import Adaptable, FrozenProduct, Site, compute_adapted_product
from tx.tinker.backends.torch.layout import BLOCK, Exchange
from tx.tinker.backends.torch.parts import Part


class _Rows(NamedTuple):
    """Slots of one expert that belong to one model."""

    expert: int
    part: int
    """Index of the model among those with adapters here; -1: a model without one."""
    start: int
    end: int


class _ExpertSlots(NamedTuple):
    rows: list[_Rows]
    """Rows by expert, then by model; used experts only."""
    pair_of_slot: torch.Tensor
    """[S]; some pair at padding"""
    padding: torch.Tensor
    slot_of_pair: torch.Tensor
    """[N k]"""


class AdaptedExperts:
    """Replacement of the `forward` of a layer of fused experts that adds adapters.

    Args:
        module: holds `gate_up_proj` [E, 2I, D], `down_proj` [E, D, I] and `_apply_gate`
    """

    def __init__(self, module: Any):
        self._module, self._whole = module, module.forward
        self._on_cpu = module.down_proj.device.type == "cpu"
        self.projections = {projection: Adaptable() for projection in PROJECTIONS}

    def sites(self, layer: str) -> list[Site]:
        """
        Args:
            layer: the module's name.
        """
        sites = []
        for projection in PROJECTIONS:
            num_experts, num_out, num_in = get_expert_shape(self._module, projection)
            sites.append(Site(f"{layer}.{projection}", "mlp", num_in, num_out, num_experts))
        return sites

    def __call__(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> Any:
        """Compute the weighted sum of each token's experts; transformers' calling convention.

        Args:
            hidden_states: [N, D]
            top_k_index, top_k_weights: [N, k]

        Returns: [N, D]
        """
        gate, up, down = self.projections.values()
        # A CPU takes the blocks below even if no model of the pass has an adapter here: the layer's own kernel gives
        # other bits, so a model's results would depend on whether another one has adapted its experts.
        if not gate.parts and not self._on_cpu:
            return self._whole(hidden_states, top_k_index, top_k_weights)
        # Only here: the three products get slots, of which there are more than rows of the pass.
        gate.check(hidden_states)
        slots = _build_slots(top_k_index, gate.parts, BLOCK)
        num_chosen = top_k_index.shape[1]
        nothing = slots.padding[:0]
        pairs = hidden_states[:, None].expand(-1, num_chosen, -1).flatten(0, 1)
        x: Any = Exchange.apply(pairs, slots.pair_of_slot, slots.slot_of_pair, nothing)
        _, inner, _ = get_expert_shape(self._module, "gate_proj")
        halves = slice(0, inner), slice(inner, 2 * inner)
        of_gate_and_up = [
            part
            for projection, columns in zip((gate, up), halves, strict=True)
            for part in _build_parts(slots.rows, projection.parts, columns)
        ]
        product = _ExpertsProduct(lambda: self._module.gate_up_proj, slots.rows)
        gated = self._module._apply_gate(
            compute_adapted_product(x, product, of_gate_and_up, gate.root, gate.is_grouped)
        )
        product = _ExpertsProduct(lambda: self._module.down_proj, slots.rows)
        y: Any = compute_adapted_product(
            gated, product, list(_build_parts(slots.rows, down.parts)), down.root, down.is_grouped
        )
        # In the backward, padding slots get the gradient 0 here: their copies add nothing to the adapters' gradients.
        of_pairs: Any = Exchange.apply(y, slots.slot_of_pair, slots.pair_of_slot, slots.padding)
        # Some routers give float32 weights: then the sum over experts is float32, and only the result is rounded.
        weighted = of_pairs.unflatten(0, (-1, num_chosen)) * top_k_weights[:, :, None]
        return weighted.sum(dim=1).to(hidden_states.dtype)


def adapt_experts(model: Any) -> dict[str, AdaptedExperts]:
    """Replace the forward of a model's layers of fused experts by one that adds adapters, in place. Returns them by
    name. Layers of an unknown kind are unchanged.
    """
    layers = {name: module for name, module in model.named_modules() if hasattr(module, "_is_expert_parallel")}
    if not all(map(is_plain, layers.values())):
        return {}
    adapted = {}
    for name, module in layers.items():
        adapted[name] = module.forward = AdaptedExperts(module)
    return adapted


def has_standard_file_names(model: Any) -> bool:
    """Return True if model files name each expert's three layers as `PROJECTIONS`, and peft applies adapters of these
    names to the experts (for Qwen3.5-MoE it would apply them to the shared expert).
    """
    model_type = model.config.get_text_config().model_type
    conversions = get_checkpoint_conversion_mapping(model_type) or []
    sources = {pattern for conversion in conversions for pattern in conversion.source_patterns}
    read_by_peft = _MODEL_TO_CONVERSION_PATTERN.get(model_type) in _MOE_TARGET_MODULE_MAPPING
    return read_by_peft and {f"mlp.experts.*.{projection}.weight" for projection in PROJECTIONS} <= sources


def has_experts_in_lists(model: nn.Module) -> bool:
    """Return True if experts are separate modules, which are not supported."""
    in_lists = (name for name, module in model.named_modules() if isinstance(module, nn.Linear))
    return any("experts" in name.split(".") for name in in_lists)


def _build_slots(top_k_index: torch.Tensor, parts: Sequence[Part], block: int) -> _ExpertSlots:
    # On the host: the numbers of rows are the shapes of the products, so a GPU has to be waited for in any case.
    chosen = top_k_index.cpu().numpy()
    part_of_token = np.full(len(chosen), -1)
    for index, part in enumerate(parts):
        part_of_token[part.start : part.end] = index
    # Expert and model in one key, so that one sort brings a model's rows of an expert together; + 1 makes -1 a key too.
    keys = (chosen * (len(parts) + 1) + part_of_token[:, None] + 1).ravel()
    # Stable: gradients sum over these rows in the order of the model's tokens, whatever other models were routed here.
    order = np.argsort(keys, kind="stable")
    counts = np.bincount(keys)
    rows, pair_of_slot, padding, slot_of_pair = [], [], [], np.empty(len(order), np.int64)
    at = taken = 0
    for key in np.flatnonzero(counts).tolist():
        count = int(counts[key])
        end = at + -(-count // block) * block
        pairs = order[taken : taken + count]
        slot_of_pair[pairs] = np.arange(at, at + count)
        # Filler copies a row of the same model: a number that is not finite must not reach another model.
        pair_of_slot += [pairs, np.full(end - at - count, pairs[0])]
        padding.append(np.arange(at + count, end))
        expert, part = divmod(key, len(parts) + 1)
        rows.append(_Rows(expert, part - 1, at, end))
        at, taken = end, taken + count
    arrays = np.concatenate(pair_of_slot), np.concatenate(padding), slot_of_pair
    return _ExpertSlots(rows, *(torch.from_numpy(array).to(top_k_index.device) for array in arrays))


def _build_parts(rows: Sequence[_Rows], parts: Sequence[Part], columns: slice = slice(None)) -> Iterator[Part]:
    """Return each expert's parts of the models' adapters."""
    for expert, index, start, end in rows:
        if index >= 0:
            of_model = parts[index]
            matrices = of_model.matrices.of_expert(expert)
            gradient = None if of_model.gradient is None else of_model.gradient.of_expert(expert)
            yield Part(start, end, matrices, of_model.scaling, gradient, columns)


class _ExpertsProduct:
    """x_s W_e^T for the slots of each expert, with frozen W.

    Args:
        weights: returns [E, out, in]. Called at each product: a sharded model is gathered only then.
    """

    def __init__(self, weights: Callable[[], torch.Tensor], rows: Sequence[_Rows]):
        self._weights = weights
        spans: dict[int, tuple[int, int]] = {}
        # Rows lie by expert, so all models share one product with an expert's weight. With whole blocks, a row's bits
        # do not depend on the number of rows in it.
        for expert, _, start, end in rows:
            spans[expert] = spans.get(expert, (start, end))[0], end
        self._spans = [(expert, slice(*span)) for expert, span in spans.items()]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self._weights()
        return torch.cat([FrozenProduct(weights[expert], None).forward(x[span]) for expert, span in self._spans])

    def backward(self, gradient: torch.Tensor) -> torch.Tensor:
        weights = self._weights()
        return torch.cat([FrozenProduct(weights[e], None).backward(gradient[span]) for e, span in self._spans])

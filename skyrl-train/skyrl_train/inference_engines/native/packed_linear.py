"""Linear layers with weights packed for oneDNN: up to twice the speed of the default float32 product on AVX-512, and in
bfloat16, where the default product packs the weights at each call, 1.4 to 1.7 times the speed for one to eight rows
(hidden size 1024; the same bits).

A packed float32 product is also bit-exact per row for any batch of at least `attention.MIN_ROWS` rows. The packed copy
doubles the memory of these weights and must be renewed when they change (call `pack_linears` again). oneDNN looks for
its kernel at each call, which takes 10 to 25 us: longer than the whole default product of a small layer, and a reason
to compute layers with the same input in one product.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F

from skyrl_train.weight_sync.fingerprint import VerificationSample
from skyrl_train.weight_sync.one_hot import as_computed, columns_by_products

SMALLEST = 32 * 1024
"""Minimum number of weights of a float32 layer for which packing is faster."""
_ROWS_HINT = 64
"""Batch size that the layout is chosen for; it works bit-exactly for all sizes."""


class PackedLinears:
    """Linear layers with the same input, computed as one product, with packed weights if faster. For a single layer it
    replaces `forward`.

    Args:
        layers: all with a bias, or none
    """

    def __init__(self, *layers: torch.nn.Linear):
        self.layers = layers
        self._packed: torch.Tensor | None = None
        self._bias: torch.Tensor | None = None

    @property
    def packed_linears(self) -> tuple["PackedLinears", ...]:
        return (self,)

    def pack(self) -> None:
        """Pack the current weights, if that is faster."""
        with torch.inference_mode():
            weights = [layer.weight.detach() for layer in self.layers]
            if not is_faster_packed(weights):
                return
            self.drop()  # freed before the new one is allocated
            whole = weights[0] if len(weights) == 1 else torch.cat(weights)
            self._packed = torch.ops.mkldnn._reorder_linear_weight(whole, _ROWS_HINT)
            if len(weights) > 1 and self.layers[0].bias is not None:
                self._bias = torch.cat([layer.bias.detach() for layer in self.layers])

    def drop(self) -> None:
        """Free the copy."""
        self._packed = self._bias = None

    def find_stale_layers(self, sampling: VerificationSample) -> list[torch.nn.Linear]:
        """Return layers that differ from the packed copy in biases or sampled weight columns (read by products)."""
        if self._packed is None:
            return []
        weights = [layer.weight.detach() for layer in self.layers]
        outputs, inputs = sum(map(len, weights)), weights[0].shape[1]
        columns = sampling.of(inputs, sum(weight.nbytes for weight in weights))
        held = columns_by_products(
            lambda x: self._multiply(x, None), (outputs, inputs), columns, weights[0].dtype, weights[0].device
        )
        parts = held.split(list(map(len, weights)), dim=1)
        biases = [None] * len(parts) if self._bias is None else self._bias.split(list(map(len, weights)))
        return [
            layer
            for layer, part, bias in zip(self.layers, parts, biases, strict=True)
            if not torch.equal(part, as_computed(layer.weight.detach()[:, columns].t()))
            or (bias is not None and not torch.equal(bias, layer.bias))
        ]

    def _multiply(self, input: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(input, self._packed, bias, "none", [], "")

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        """Compute all layers: [..., in] -> [..., out of the first layer, of the second, ...]"""
        if self._packed is not None:
            return self._multiply(input, self.layers[0].bias if len(self.layers) == 1 else self._bias)
        outputs = [F.linear(input, layer.weight, layer.bias) for layer in self.layers]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)


def can_pack() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def pack_linears(model: torch.nn.Module) -> None:
    """Pack (or repack) every linear layer on the CPU for which it is possible and faster."""
    if not can_pack():
        return
    packed = list(_iter_packed_products(model))
    in_groups = {layer for each in packed for layer in each.layers}
    for layer in model.modules():
        if type(layer) is torch.nn.Linear and layer not in in_groups and is_faster_packed([layer.weight]):
            layer.forward = PackedLinears(layer)
            packed.append(layer.forward)
    for each in packed:
        each.pack()


def find_stale_copies(model: torch.nn.Module, sampling: VerificationSample) -> list[str]:
    """Return the names of layers with an outdated packed copy."""
    names = {layer: name for name, layer in model.named_modules()}
    return [names[layer] for each in _iter_packed_products(model) for layer in each.find_stale_layers(sampling)]


def is_faster_packed(weights: Sequence[torch.Tensor]) -> bool:
    """Return whether layers with these weights are faster when packed."""
    first = weights[0]
    if first.device.type != "cpu" or not can_pack():
        return False
    if first.dtype == torch.bfloat16:  # always computed by oneDNN
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return first.dtype == torch.float32 and sum(weight.numel() for weight in weights) >= SMALLEST


def drop_packed(model: torch.nn.Module) -> None:
    """Free the packed copies until the next `pack_linears`."""
    for each in _iter_packed_products(model):
        each.drop()


def _iter_packed_products(model: torch.nn.Module) -> Iterator[PackedLinears]:
    """Yield the packed products used by a module's `forward`."""
    for module in model.modules():
        yield from getattr(module.forward, "packed_linears", ())

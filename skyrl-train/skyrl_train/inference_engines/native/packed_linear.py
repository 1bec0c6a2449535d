"""Linear layers with weights packed for oneDNN: up to twice the speed of the default float32 product on AVX-512, and in
bfloat16, where the default product packs the weights at each call, 1.4 to 1.7 times that of one to eight rows (hidden
size 1024; the same bits).

A packed float32 product also gives a row the same bits in every batch of at least `attention.MIN_ROWS` rows. The packed
copy doubles the memory of these weights and must be made anew when they change (`pack_linears` again). oneDNN looks for
its kernel at each call, which takes 10 to 25 us: longer than the whole default product of a small layer.
"""

import torch

from skyrl_train.weight_sync.fingerprint import VerificationSample
from skyrl_train.weight_sync.one_hot import as_computed, columns_by_products

SMALLEST = 32 * 1024
"""Weights of a float32 layer from which on packing pays."""
_ROWS_HINT = 64
"""The batch size that the layout is chosen for; it works, with the same bits, for all."""


class PackedForward:
    """Replacement of one linear layer's `forward` that uses packed weights."""

    def __init__(self, linear: torch.nn.Linear):
        self._linear = linear
        self._packed: torch.Tensor | None = None
        self.pack()

    def pack(self) -> None:
        """Copy the weights as they are now."""
        with torch.inference_mode():
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self._linear.weight.detach(), _ROWS_HINT)

    def drop(self) -> None:
        """Free the copy."""
        self._packed = None

    def holds_its_weights(self, sampling: VerificationSample) -> bool:
        """Return whether the sampled columns of the packed copy, read by products, are those of the layer's weight."""
        weight = self._linear.weight.detach()
        columns = sampling.of(weight.shape[1], weight.nbytes)
        rows, width = weight.shape
        held = columns_by_products(self._multiply, (rows, width), columns, weight.dtype, weight.device)
        return torch.equal(held, as_computed(weight[:, columns].t()))

    def _multiply(self, input: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(input, self._packed, None, "none", [], "")

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(input, self._packed, self._linear.bias, "none", [], "")


def can_pack() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def pack_linears(model: torch.nn.Module) -> None:
    """Pack every linear layer on the CPU for which it pays, or pack it again, where that is possible."""
    if not can_pack():
        return
    for layer in model.modules():
        if isinstance(layer.forward, PackedForward):
            layer.forward.pack()
        elif type(layer) is torch.nn.Linear and _is_worth_it(layer.weight):
            layer.forward = PackedForward(layer)


def stale_copies(model: torch.nn.Module, sampling: VerificationSample) -> list[str]:
    """Names of the layers that do not multiply by their weights."""
    return [
        name
        for name, layer in model.named_modules()
        if isinstance(layer.forward, PackedForward) and not layer.forward.holds_its_weights(sampling)
    ]


def _is_worth_it(weight: torch.Tensor) -> bool:
    if weight.device.type != "cpu":
        return False
    if weight.dtype == torch.bfloat16:  # oneDNN computes it in any case
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return weight.dtype == torch.float32 and weight.numel() >= SMALLEST


def drop_packed(model: torch.nn.Module) -> None:
    """Free the packed copies until the next `pack_linears`."""
    for layer in model.modules():
        if isinstance(layer.forward, PackedForward):
            layer.forward.drop()

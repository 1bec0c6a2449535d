"""Low-rank adapters of many models on the linear layers, including experts, of one frozen base model.

A layer computes W x for the rows of all models at once and adds (32 / rank) B A x to each model's rows in separate
products with that model's matrices: shapes and memory alignment, and so results, do not depend on co-batched requests.

An adapter's matrices are views of one vector, and its gradient is another: optimizer, norms and files use vectors. With
several ranks, each holds a shard of every vector (`rank_group`); whole vectors exist only during a pass.

Shapes: N rows of a pass, n of a model, r rank, P numbers of an adapter, E experts of a layer.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from tx.tinker.backends.torch.adam import AdamState
from tx.tinker.backends.torch.grouped import PartGroup, add_adapters, add_gradients, group_parts
from tx.tinker.backends.torch.parts import Matrices, Part
from tx.tinker.backends.torch.rank_group import ALONE, RankGroup
from tx.tinker.types import LORA_ALPHA, LoraSpec

_SMALL = 2**14
"""Numbers of a weight."""


class Site(NamedTuple):
    """A linear layer that can have adapters, or the same one of all experts of a layer, each with its own."""

    name: str
    """Name in the transformers model; for experts, the layer's name and that of the projection."""
    kind: str
    """`attn`, `mlp` or `unembed`."""
    num_in: int
    num_out: int
    num_experts: int | None = None
    shared: Literal["a", "b"] | None = None
    """Matrix that all experts have in common."""

    def to_shared_experts(self) -> "Site":
        """Return the site with one matrix for all experts on the side of the model's width: A of what reads hidden
        states (gate and up), B of what writes them (down)."""
        if self.num_experts is None:
            return self
        return self._replace(shared="b" if self.name.endswith(".down_proj") else "a")

    @property
    def layers(self) -> list[str]:
        """Names of its linear layers in files, in the order of its matrices."""
        layer, _, projection = self.name.rpartition(".")
        experts = range(self.num_experts or 0)
        return [f"{layer}.{expert}.{projection}" for expert in experts] or [self.name]

    def shapes(self, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of A and B (see `Matrices`)."""
        stacked = {
            side: () if self.num_experts is None or self.shared == side else (self.num_experts,) for side in "ab"
        }
        return (*stacked["a"], rank, self.num_in), (*stacked["b"], rank, self.num_out)


class Adapter:
    """Adapter of one model: weights, accumulated gradient and optimizer state. All float32.

    Args:
        sites: the layers it adapts, in the base model's order.
        dtype: of its products.
        ranks: each holds a part [p] of every vector [P]; alone, p = P.
    """

    def __init__(
        self,
        lora: LoraSpec,
        sites: Sequence[Site],
        device: torch.device,
        dtype: torch.dtype,
        ranks: RankGroup = ALONE,
    ):
        self.lora, self.sites, self.dtype, self.ranks = lora, tuple(sites), dtype, ranks
        self.scaling = LORA_ALPHA / lora.rank
        self._shapes = [shape for site in sites for shape in site.shapes(lora.rank)]
        self._sizes = [math.prod(shape) for shape in self._shapes]
        self.num_weights = sum(self._sizes)
        """P."""
        # float32 even where products are bfloat16, which would round away any update below 1/512 of a weight.
        self.weights = torch.zeros(ranks.get_part_size(self.num_weights), device=device)
        self.gradient: torch.Tensor | None = None
        """[p], None where nothing is accumulated."""
        self.mean: torch.Tensor | None = None
        self.square: torch.Tensor | None = None
        self.step = 0
        self._computed_with: dict[str, Matrices] | None = None

    def initialize(self) -> None:
        """Initialize A from the seed and the layer's name, uniform in +-1 / sqrt(in) like peft; B zero. The numbers are
        the same on every device.
        """
        whole = torch.zeros(self.num_weights)
        for site, (a, _) in zip(self.sites, self.split_matrices(whole), strict=True):
            # A generator for each layer: its numbers do not depend on which other layers the model adapts.
            digest = hashlib.blake2b(f"{self.lora.seed}:{site.name}".encode(), digest_size=8).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
            bound = 1 / math.sqrt(site.num_in)
            a.uniform_(-bound, bound, generator=generator)
        self.weights.copy_(self.ranks.extract_part(whole))
        self.changed()

    def changed(self) -> None:
        """Invalidate caches after a write to the weights."""
        self._computed_with = None

    def vectors(self, *, state: bool) -> dict[str, torch.Tensor]:
        """Return the weights, and with `state` moments and gradient where they exist, by name; [p] each."""
        kinds = ("weights", "mean", "square", "gradient") if state else ("weights",)
        return {kind: vector for kind in kinds if (vector := getattr(self, kind)) is not None}

    def adam_state(self) -> AdamState:
        """Return weights and moments; moments are zero before the first step."""
        mean, square = (torch.zeros_like(self.weights) if each is None else each for each in (self.mean, self.square))
        return AdamState(self.weights, mean, square)

    def take(self, state: AdamState) -> None:
        """Store the result of an optimizer step, and clear the gradient. Cannot fail, so a step is atomic."""
        self.weights, self.mean, self.square = state
        self.step += 1
        self.gradient = None
        self.changed()

    def split_matrices(self, vector: torch.Tensor) -> Iterator[Matrices]:
        """Split a vector [P] into views: the matrices of each site."""
        pieces = [piece.view(shape) for piece, shape in zip(vector.split(self._sizes), self._shapes, strict=True)]
        return map(Matrices, pieces[::2], pieces[1::2])

    def group_by_site(self, vector: torch.Tensor) -> dict[str, Matrices]:
        return dict(zip((site.name for site in self.sites), self.split_matrices(vector), strict=True))

    def gather(self) -> dict[str, Matrices]:
        """Return the matrices of each site in `dtype`. A collective."""
        if self._computed_with is not None:
            return self._computed_with
        gathered = self.group_by_site(self.ranks.gather_vector(self.weights.to(self.dtype), self.num_weights))
        # Cast once for each optimizer step, not for each pass. In float32 nothing is copied: these are the weights. Of
        # several ranks none keeps the whole weights, which would need the memory that sharding saves.
        if self.ranks.size == 1:
            self._computed_with = gathered
        return gathered

    def zero_gradient(self) -> torch.Tensor:
        """Return a vector for the gradient of a pass, as `RankGroup.reduce_scatter` takes it."""
        # A matrix that experts share sums a product of each of them, which bfloat16 would round away one by one.
        dtype = torch.float32 if any(site.shared for site in self.sites) else self.dtype
        return torch.zeros(self.ranks.size * len(self.weights), device=self.weights.device, dtype=dtype)

    def parts(
        self, start: int, end: int, matrices: Mapping[str, Matrices], gradient: torch.Tensor | None
    ) -> dict[str, Part]:
        """Return the parts of each layer for a pass in which this model has the rows `start` to `end`.

        Args:
            matrices: from `gather`.
            gradient: from `zero_gradient`; the backward adds to it.
        """
        gradients = {} if gradient is None else self.group_by_site(gradient[: self.num_weights])
        return {
            name: Part(start, end, of_site, self.scaling, gradients.get(name)) for name, of_site in matrices.items()
        }

    def accumulate(self, gradient: torch.Tensor) -> None:
        """Add the gradient of a pass, from `zero_gradient`, to the model's own. A collective."""
        if self.gradient is None:
            self.gradient = torch.zeros_like(self.weights)
        # float32, although the pass computes in the base model's dtype: bfloat16 would round at each micro-batch.
        self.gradient.add_(self.ranks.reduce_scatter(gradient))


class FrozenProduct:
    """y = W x + b of rows, and the gradient of x (W and b are frozen).

    float32 on a CPU uses oneDNN, which torch would not choose (`skyrl_train.models.cpu_linear`), except for layers too
    small to profit. The choice depends on the layer only, not on the number of rows.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None):
        self.weight, self.bias = weight, bias
        self._onednn = _is_for_onednn(weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[N, in] -> [N, out]"""
        if self._onednn:
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return F.linear(x, self.weight, self.bias)

    def backward(self, gradient: torch.Tensor) -> torch.Tensor:
        """[N, out] -> [N, in]"""
        if self._onednn:
            return torch.ops.mkldnn._linear_pointwise(gradient, self.weight.t(), None, "none", [], "")
        return gradient @ self.weight


def _is_for_onednn(weight: torch.Tensor) -> bool:
    on_cpu = weight.device.type == "cpu" and weight.dtype == torch.float32
    return on_cpu and torch.backends.mkldnn.is_available() and weight.numel() > _SMALL


class FrozenLinear(FrozenProduct):
    """Frozen product of an `nn.Linear`, or of transformers' Conv1D (weight [in, out]). The module is read at each
    product: a sharded model holds the whole weight only then.
    """

    def __init__(self, module: Any):
        self._module, self._transposed = module, not isinstance(module, nn.Linear)
        # numel() of a sharded weight (DTensor) counts the parts of all ranks, so sharding does not change the kernel.
        self._onednn = _is_for_onednn(module.weight)

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        return self._module.weight.t() if self._transposed else self._module.weight

    @property
    def bias(self) -> torch.Tensor | None:  # type: ignore[override]
        return self._module.bias


class Adaptable:
    """State that a pass gives to a layer with adapters."""

    def __init__(self) -> None:
        self.parts: Sequence[Part] = ()
        self.num_rows = 0
        self.root: torch.Tensor | None = None
        """A scalar that the backward starts from: without it there would be none in the first layers, whose input has
        no gradient. None: no gradient is wanted."""
        self.is_grouped = False
        """True: by one product for all parts (`grouped`)."""

    def check(self, rows: torch.Tensor) -> None:
        """
        Raises:
            ValueError: these are not the rows of the pass.
        """
        # Parts are ranges of rows: among other rows, an adapter would be added to tokens of another model.
        if self.parts and len(rows) != self.num_rows:
            raise ValueError(f"a layer with adapters received {len(rows)} rows, but the pass has {self.num_rows}")


class AdaptedLinear(Adaptable):
    """Replacement of a base-model linear layer's `forward` that adds adapters."""

    def __init__(self, product: FrozenProduct):
        super().__init__()
        self.product = product

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        self.check(rows)
        y = compute_adapted_product(rows, self.product, self.parts, self.root, self.is_grouped)
        return y.view(*x.shape[:-1], y.shape[-1])


class Product(Protocol):
    """Forward and backward product of a frozen layer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor: ...

    def backward(self, gradient: torch.Tensor) -> torch.Tensor: ...


def compute_adapted_product(
    x: torch.Tensor, product: Product, parts: Sequence[Part], root: torch.Tensor | None, is_grouped: bool = False
) -> torch.Tensor:
    """Compute the frozen product of rows, plus the adapters' products.

    Args:
        x: [N, in]
        parts, root, is_grouped: as in `Adaptable`.

    Returns: [N, out]
    """
    groups: list[PartGroup] = []
    if is_grouped:
        groups, parts = group_parts(parts)
    if root is None:
        return _add_adapters(product.forward(x), x, parts, groups)[0]
    return _Adapted.apply(x, root, product, parts, groups)  # type: ignore[return-value]


def _add_adapters(
    y: torch.Tensor, x: torch.Tensor, parts: Sequence[Part], groups: Sequence[PartGroup]
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Add scaling B A x to the rows of each part and group, in place. Returns y, and scaling A x of each."""
    inner = []
    for part in parts:
        low = torch.mm(x[part.start : part.end], part.matrices.a.t()).mul_(part.scaling)
        y[part.start : part.end, part.columns].addmm_(low, part.matrices.b)
        inner.append(low)
    return y, inner + [add_adapters(y, x, group) for group in groups]


class _Adapted(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        root: torch.Tensor,
        product: Product,
        parts: Sequence[Part],
        groups: Sequence[PartGroup],
    ):
        y, inner = _add_adapters(product.forward(x), x, parts, groups)
        ctx.product, ctx.parts, ctx.groups = product, parts, groups
        ctx.save_for_backward(x, *inner)
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        x, *inner = ctx.saved_tensors
        dy = dy.contiguous()
        dx = ctx.product.backward(dy) if ctx.needs_input_grad[0] else None
        for part, low in zip(ctx.parts, inner, strict=False):  # those of groups follow
            rows = slice(part.start, part.end)
            add_gradient(part, x[rows], low, dy[rows, part.columns], None if dx is None else dx[rows])
        for group, low in zip(ctx.groups, inner[len(ctx.parts) :], strict=True):
            add_gradients(group, x, low, dy, dx)
        # `root` needs no gradient: it makes autograd call this function in layers whose input has no history.
        return dx, None, None, None, None


def add_gradient(part: Part, x: torch.Tensor, low: torch.Tensor, dy: torch.Tensor, dx: torch.Tensor | None) -> None:
    """Run the backward of y += scaling B A x for a model's rows: adds to `part.gradient`, and to dx if required, in
    place.

        dB += dy^T (scaling A x)      dA += (scaling dy B)^T x      dx += (scaling dy B) A

    Args:
        x, dy, dx: [n, in], [n, out], [n, in]
        low: [n, r], scaling A x
    """
    # Through the rank: `back` is [n, r], and dx never needs the [out, in] matrix B A.
    back = torch.mm(dy, part.matrices.b.t()).mul_(part.scaling)
    if part.gradient is not None:
        _add_product(part.gradient.a, back.t(), x)
        _add_product(part.gradient.b, low.t(), dy)
    if dx is not None:
        dx.addmm_(back, part.matrices.a)


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total.add_(left @ right)


def set_parts(layers: Mapping[str, Adaptable], parts: Sequence[dict[str, Part]], num_rows: int, root: Any) -> None:
    """Set what every layer of the base model computes in the next pass.

    Args:
        parts: of each model, by the layers' names.
        root: as in `Adaptable`.
    """
    for name, layer in layers.items():
        # Models come in the same order in every layer: experts find a model's `up` and `down` by its index in `gate`.
        layer.parts = [of_model[name] for of_model in parts if name in of_model]
        layer.num_rows, layer.root = num_rows, root

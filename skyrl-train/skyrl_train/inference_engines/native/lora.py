"""Low-rank adapters in the native engine: several named adapters at a time, batched with requests that use none.

Each adapter has a slot. Every adapted layer keeps the matrices of all slots stacked, padded with zeros to a common
rank, and adds to its output

    scaling_s B_s A_s x        for the rows of requests with slot s, in a few batched products for any number of rows
    and adapters: in decoding, rows are gathered by slot into groups of equal size; in prefill a row is a group. Experts
    process few rows each, so their slots are computed one by one (`experts.py`). Without adapters the model is
    unchanged, and a pass without adapted rows costs one comparison per layer.

The bits of a row do not depend on the other rows (float32 on a CPU), as for the layers themselves: groups have at
least `MIN_ROWS` rows, and ranks are padded to at least `RANK_BLOCK`, above which the width of a product does not change
its columns.

Dimensions: B rows of a pass, T tokens a row, S slots, R padded rank, G groups of M rows.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from skyrl_train.inference_engines.native.attention import MIN_ROWS, round_up
from skyrl_train.inference_engines.native.experts import ExpertAdapters, use_native_experts
from skyrl_train.inference_engines.native.lora_loading import LayerMatrices, get_features, get_tensor_names
from skyrl_train.inference_engines.native.requests import NO_LORA
from skyrl_train.weight_sync.base import LoraLoadRequest, WeightReport
from skyrl_train.weight_sync.fingerprint import Verification, fingerprints_of

RANK_BLOCK = 16


@dataclass(eq=False)
class Lora:
    """Loaded adapter. Requests hold a reference; reloading under the same name changes it in place."""

    name: str
    slot: int
    version: int
    serial: int
    """Number that changes at every loading: keys and values are valid only under the serial that computed them."""


@dataclass(frozen=True)
class Groups:
    """Grouping of the rows of one pass by adapter."""

    num_rows: int
    """B"""
    slots: torch.Tensor | slice
    """[G] slot of each group."""
    size: int
    """M"""
    gathered: torch.Tensor | None
    """[G M] row at each position; padding repeats some row. None: all rows in order, one group."""
    rows: torch.Tensor | None = None
    """[n] rows that use an adapter."""
    places: torch.Tensor | None = None
    """[n] their positions in `gathered`."""


def group_rows_by_slot(slots: np.ndarray, device: torch.device, *, apart: bool) -> Groups | None:
    """Group rows by slot; None if no row uses an adapter.

    Args:
        slots: [B], `NO_LORA` where a row uses none.
        apart: every row is a separate group (its many tokens fill the product); else rows of a slot form a group.
    """
    rows = np.flatnonzero(slots != NO_LORA)
    if not len(rows):
        return None
    used, group_of_row, sizes = np.unique(slots[rows], return_inverse=True, return_counts=True)
    if len(used) == 1 and len(rows) == len(slots):
        return Groups(len(slots), slice(int(used[0]), int(used[0]) + 1), len(slots), None)
    if apart:
        indices = torch.from_numpy(rows).to(device)
        places = torch.arange(len(rows), device=device)
        return Groups(len(slots), torch.from_numpy(slots[rows]).to(device), 1, indices, indices, places)
    order = np.argsort(group_of_row, kind="stable")
    starts = np.cumsum(sizes) - sizes
    # Smaller groups would use another matrix kernel, so a row's bits would depend on the number of rows with its
    # adapter.
    size = max(int(sizes.max()), MIN_ROWS)
    places = np.empty(len(rows), np.int64)
    places[order] = group_of_row[order] * size + np.arange(len(rows)) - starts[group_of_row[order]]
    gathered = np.repeat(rows[order[starts]], size)
    gathered[places] = rows
    # A slice of the stacks is a view; indices would copy A and B of every layer in each pass.
    all_before = bool((used == np.arange(len(used))).all())
    return Groups(
        len(slots),
        slice(0, len(used)) if all_before else torch.from_numpy(used).to(device),
        size,
        torch.from_numpy(gathered).to(device),
        torch.from_numpy(rows).to(device),
        torch.from_numpy(places).to(device),
    )


@dataclass(frozen=True)
class SlotOfRows:
    """Adapter of every row of a pass, known on the device alone: all adapters process all rows, and each row takes the
    result of its own. For captured passes (`decode_graphs.py`), whose kernels do not depend on which rows use which.
    """

    slots: torch.Tensor
    """[B], `NO_LORA` where a row uses none."""


class _AdaptedLayer:
    """Adapter matrices of all slots in one layer. A slot that does not adapt this layer is zero."""

    def __init__(self, module: nn.Module, like: torch.Tensor, num_slots: int, rank: int):
        num_in, num_out = get_features(module)
        self.users: set[int] = set()
        self.a = like.new_zeros(num_slots, rank, num_in)
        self.b = like.new_zeros(num_slots, num_out, rank)
        self.scaling = like.new_zeros(num_slots, 1, 1)

    def set(self, slot: int, matrices: LayerMatrices) -> None:
        self.clear(slot)
        self.a[slot, : matrices.rank] = matrices.a
        self.b[slot, :, : matrices.rank] = matrices.b
        self.scaling[slot] = matrices.scaling
        self.users.add(slot)

    def clear(self, slot: int) -> None:
        for stack in (self.a, self.b, self.scaling):
            stack[slot].zero_()
        self.users.discard(slot)

    def grow(self, num_slots: int, rank: int) -> None:
        for name, shape in {
            "a": (num_slots, rank, self.a.shape[2]),
            "b": (num_slots, self.b.shape[1], rank),
            "scaling": (num_slots, 1, 1),
        }.items():
            held: torch.Tensor = getattr(self, name)
            grown = held.new_zeros(shape)
            grown[tuple(map(slice, held.shape))] = held
            setattr(self, name, grown)

    def to(self, device: torch.device) -> None:
        self.a, self.b, self.scaling = self.a.to(device), self.b.to(device), self.scaling.to(device)

    def get_loaded_tensors(self, slot: int, name: str, rank: int) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """Return the layer's name in files, and A and B of an adapter."""
        yield name, self.a[slot, :rank], self.b[slot, :, :rank]

    @property
    def device(self) -> torch.device:
        return self.a.device

    def add_by_row(self, output: torch.Tensor, input: torch.Tensor, slots: torch.Tensor) -> None:
        """Add the adapters of rows with one token each, in place; see `SlotOfRows`.

        Args:
            output, input: [B, 1, out] and [B, 1, in], or without the second dimension
            slots: [B]
        """
        x = input.reshape(1, len(slots), -1).expand(len(self.a), -1, -1)
        added = torch.bmm(
            torch.bmm(x, self.a.transpose(1, 2)).mul_(self.scaling), self.b.transpose(1, 2)
        )  # [S, B, out]
        # Selected, not multiplied by zero: no row sees the values of another row's adapter, even if they are NaN.
        own = added[slots.clamp(min=0), torch.arange(len(slots), device=slots.device)]
        output.view(len(slots), -1).add_(own.masked_fill_((slots < 0)[:, None], 0))

    def add_to(self, output: torch.Tensor, input: torch.Tensor, groups: Groups, rank: int) -> None:
        """Add the rows' adapters to the layer's output in place.

        Args:
            output, input: [B, T, out] and [B, T, in], or both with the first two dimensions as one
            rank: largest padded rank of the groups' adapters; entries beyond it are zero
        """
        x = input.reshape(groups.num_rows, -1, input.shape[-1])
        if groups.gathered is not None:
            x = x.index_select(0, groups.gathered)
        num_tokens = x.shape[1]
        a, b = self.a[groups.slots, :rank], self.b[groups.slots, :, :rank]
        scaling = self.scaling[groups.slots]
        x = x.reshape(len(a), groups.size * num_tokens, -1)
        added = torch.bmm(torch.bmm(x, a.transpose(1, 2)).mul_(scaling), b.transpose(1, 2))
        added = added.view(len(a) * groups.size, num_tokens, -1)
        # view, because reshape may copy, and the sum would then go into the copy.
        whole = output.view(groups.num_rows, num_tokens, -1)
        if groups.gathered is None:
            whole.add_(added)
        else:
            assert groups.rows is not None and groups.places is not None
            whole.index_add_(0, groups.rows, added.index_select(0, groups.places))


class _AdaptedProjection:
    """Adapter matrices of one linear layer of all experts of a layer, by slot."""

    def __init__(self, adapters: ExpertAdapters, projection: str, like: torch.Tensor):
        self._matrices, self._like = adapters.matrices[projection], like

    @property
    def users(self) -> set[int]:
        return set(self._matrices)

    def set(self, slot: int, matrices: LayerMatrices) -> None:
        more = round_up(matrices.rank, RANK_BLOCK) - matrices.rank
        a, b = (matrix.to(self._like.device, self._like.dtype) for matrix in (matrices.a, matrices.b))
        self._matrices[slot] = F.pad(a, (0, 0, 0, more)), F.pad(b, (0, more)), matrices.scaling

    def clear(self, slot: int) -> None:
        self._matrices.pop(slot, None)

    def grow(self, num_slots: int, rank: int) -> None:
        """Do nothing: slots are stored separately."""

    def to(self, device: torch.device) -> None:
        self._like = self._like.to(device)
        for slot, (a, b, scaling) in self._matrices.items():
            self._matrices[slot] = a.to(device), b.to(device), scaling

    def get_loaded_tensors(self, slot: int, name: str, rank: int) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        layer, _, projection = name.rpartition(".")
        for expert, (a, b) in enumerate(zip(*self._matrices[slot][:2], strict=True)):
            yield f"{layer}.{expert}.{projection}", a[:rank], b[:, :rank]

    @property
    def device(self) -> torch.device:
        return self._like.device


class Loras:
    """The adapters of one model, by name.

    Args:
        model: in eval mode; layers are adapted by hooks, added and removed with the adapters.
        max_loras: adapters that may be loaded at the same time.
    """

    def __init__(self, model: nn.Module, *, max_loras: int):
        self._model = model
        self._modules = dict(model.named_modules())
        self._like = next(model.parameters())
        self._max_loras = max_loras
        self._by_name: dict[str, Lora] = {}
        self._slots: dict[int, Lora] = {}
        self._layers: dict[str, _AdaptedLayer | _AdaptedProjection] = {}
        self._experts: dict[str, ExpertAdapters] = {}
        """Adapters of layers of experts."""
        self._hooks: dict[str, Any] = {}
        self._versions = np.zeros(0, np.int64)
        self._ranks = np.zeros(0, np.int64)
        """Padded rank of every slot."""
        self._rank = RANK_BLOCK
        """Rank of the stacks: the largest of any adapter so far."""
        self._serials = 0
        self.layout = 0
        """Number of changes of the adapted layers and of their memory."""
        self._groups: Groups | SlotOfRows | None = None
        self._rank_of_pass = RANK_BLOCK
        self._key: bytes = b""

    def __bool__(self) -> bool:
        """Return whether any adapter is loaded or still in use."""
        return bool(self._slots)

    def get_by_name(self, name: str | None) -> Lora | None:
        """Return the adapter with this name; None for None.

        Raises:
            ValueError: no adapter has that name.
        """
        if name is None:
            return None
        if name not in self._by_name:
            known = f"loaded adapters: {', '.join(self._by_name)}" if self._by_name else "no adapters are loaded"
            raise ValueError(f"no adapter named {name!r} is loaded; {known}")
        return self._by_name[name]

    @torch.inference_mode()
    def load(
        self, request: LoraLoadRequest, layers: Mapping[str, LayerMatrices], verification: Verification
    ) -> WeightReport:
        """Load an adapter, replacing one with the same name, also for running requests.

        Raises:
            ValueError: the maximum number of adapters is loaded.
        """
        lora = self._by_name.get(request.name) or Lora(request.name, self._free_slot(), 0, 0)
        rank = round_up(max(matrices.rank for matrices in layers.values()), RANK_BLOCK)
        self._grow_stacks(lora.slot, rank)
        self._by_name[request.name] = self._slots[lora.slot] = lora
        self._serials += 1
        lora.version, lora.serial = request.version, self._serials
        self._versions[lora.slot], self._ranks[lora.slot] = request.version, rank
        # The next pass groups its rows again: the slot's rank may have changed.
        self._key = b""
        # The previous version may have adapted other layers.
        for name in [name for name in self._layers if name not in layers]:
            self._clear(name, lora.slot)
        for name, matrices in layers.items():
            if name not in self._layers:
                self._wrap_layers(name)
            self._layers[name].set(lora.slot, matrices)
        held = self._collect_loaded_tensors(lora.slot, layers)
        return WeightReport(version=lora.version, fingerprints=fingerprints_of(held, lora.version, verification))

    def forget(self, name: str) -> Lora:
        """Remove an adapter's name, so that new requests cannot use it. Running requests keep it until `free`.

        Raises:
            ValueError: no adapter has that name.
        """
        lora = self.get_by_name(name)
        assert lora is not None
        del self._by_name[name]
        return lora

    @torch.inference_mode()
    def free(self, lora: Lora) -> None:
        """Free the memory of a forgotten adapter without requests."""
        del self._slots[lora.slot]
        for name in list(self._layers):
            self._clear(name, lora.slot)
        if not self._slots:
            self._versions, self._ranks, self._rank = np.zeros(0, np.int64), np.zeros(0, np.int64), RANK_BLOCK
            # `begin` is not called without adapters, so reset its state here.
            for adapters in self._experts.values():
                adapters.slots = None

    def to(self, device: torch.device) -> None:
        """Move all matrices."""
        self.layout += 1
        for layer in self._layers.values():
            layer.to(device)
        self._key = b""

    def begin(self, slots: np.ndarray, *, apart: bool) -> None:
        """Set the adapters of the next pass's rows (see `group_rows_by_slot`)."""
        key = slots.tobytes() + bytes([apart])
        if key != self._key:
            self._groups, self._key = group_rows_by_slot(slots, self._device, apart=apart), key
            if self._groups is not None:
                self._rank_of_pass = int(self._ranks[slots[slots != NO_LORA]].max())
            of_rows = None if self._groups is None else torch.from_numpy(slots.copy()).to(self._device)
            for adapters in self._experts.values():
                adapters.slots = of_rows

    def begin_by_row(self, slots: torch.Tensor | None) -> None:
        """Set the adapters of the next pass's rows [B], given on the device; None: no row uses one."""
        self._groups, self._key = None if slots is None else SlotOfRows(slots), b""

    def get_versions(self, slots: np.ndarray, otherwise: int) -> np.ndarray | int:
        """Return the version of each row's adapter, `otherwise` without one."""
        if not self._slots:
            return otherwise
        return np.where(slots == NO_LORA, otherwise, self._versions[slots])

    @property
    def _device(self) -> torch.device:
        return next(iter(self._layers.values())).device if self._layers else self._like.device

    def _free_slot(self) -> int:
        if len(self._slots) >= self._max_loras:
            names = ", ".join(lora.name for lora in self._slots.values())
            raise ValueError(f"max_loras={self._max_loras} adapters are loaded ({names}); unload one first")
        return next(slot for slot in range(self._max_loras) if slot not in self._slots)

    def _grow_stacks(self, slot: int, rank: int) -> None:
        """Grow the stacks: slots in powers of two, ranks to the largest."""
        num_slots = len(self._versions)
        if slot < num_slots and rank <= self._rank:
            return
        self._rank = max(self._rank, rank)
        more = np.zeros(max(num_slots, 1 << slot.bit_length()) - num_slots, np.int64)
        self._versions, self._ranks = np.append(self._versions, more), np.append(self._ranks, more)
        self.layout += 1
        for layer in self._layers.values():
            layer.grow(len(self._versions), self._rank)

    def _wrap_layers(self, name: str) -> None:
        self.layout += 1
        if name not in self._modules:
            self._wrap_experts(name)
            return
        module = self._modules[name]
        layer = _AdaptedLayer(module, self._build_stack(), len(self._versions), self._rank)
        self._layers[name] = layer

        def add(_module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            if isinstance(self._groups, SlotOfRows):
                layer.add_by_row(output, inputs[0], self._groups.slots)
            elif self._groups is not None:
                layer.add_to(output, inputs[0], self._groups, self._rank_of_pass)

        self._hooks[name] = module.register_forward_hook(add)

    def _wrap_experts(self, name: str) -> None:
        layer, _, projection = name.rpartition(".")
        if not self._experts:
            use_native_experts(self._model)
        if layer not in self._experts:
            self._experts[layer] = ExpertAdapters()
            setattr(self._modules[layer], "adapters", self._experts[layer])  # noqa: B010  # of a module of transformers
        self._layers[name] = _AdaptedProjection(self._experts[layer], projection, self._build_stack())

    def _build_stack(self) -> torch.Tensor:
        return torch.empty(0, dtype=self._like.dtype, device=self._device)

    def _clear(self, name: str, slot: int) -> None:
        layer = self._layers[name]
        layer.clear(slot)
        if not layer.users:
            self.layout += 1
            del self._layers[name]
            if name in self._hooks:
                self._hooks.pop(name).remove()

    def _collect_loaded_tensors(
        self, slot: int, layers: Mapping[str, LayerMatrices]
    ) -> Iterable[tuple[str, torch.Tensor]]:
        """Collect an adapter's tensors from the stacks, by peft's names."""
        for name, matrices in layers.items():
            for layer, a, b in self._layers[name].get_loaded_tensors(slot, name, matrices.rank):
                for kind, held in zip(get_tensor_names(layer), (a, b), strict=True):
                    yield kind, held.contiguous()

"""Keys and values of the running requests: one preallocated tensor per layer, one row per request. Layers of linear
attention have a fixed-size state per row instead.

Rows are dense: the running requests are rows 0 to n-1, so that attention reads a view. Independent of requests.
"""

import math

import torch
from transformers import Cache

from skyrl_train.inference_engines.native.attention import KEY_BLOCK, MIN_ROWS, round_up
from skyrl_train.models.linear_attention import DeltaState


class SlotCache(Cache):
    """Key-value cache that grows on demand up to `max_rows` x `max_length`, [rows, heads, length, width] per layer, and
    stays below `max_tokens` (rows x length) if that suffices.

    Before every forward pass `begin_prefill` or `begin_decode` sets where the pass writes; the model's layers then call
    `update`. Memory is zeroed when allocated: attention multiplies masked positions by zero, which is only zero if they
    are finite.
    """

    def __init__(self, num_layers: int, max_rows: int, max_length: int, max_tokens: float = math.inf):
        super().__init__(layers=[])
        self.max_rows = max_rows
        self.max_tokens = max_tokens
        self.max_length = round_up(max_length, KEY_BLOCK)
        self.num_rows = 0
        self.length = 0
        self.generation = 0
        """Number of times that the memory was replaced."""
        self._used = 0, 0
        self._keys: list[torch.Tensor | None] = [None] * num_layers
        self._values: list[torch.Tensor | None] = [None] * num_layers
        self._states: dict[int, DeltaState] = {}
        self._num_advancing = 0
        self._prefill: list[tuple[int, int, int]] | None = None
        self._rows = self._all_rows = torch.empty(0, dtype=torch.long)
        self._positions = torch.empty(0, dtype=torch.long)
        self._num_keys = 0

    def compute_size(self, num_rows: int, length: int) -> tuple[int, int]:
        """Return the rows and length to allocate, rounded up to powers of two."""
        rows = min(self.max_rows, max(MIN_ROWS, 1 << (num_rows - 1).bit_length()))
        return rows, min(self.max_length, max(KEY_BLOCK, 1 << (length - 1).bit_length()))

    def reserve(self, num_rows: int, length: int) -> None:
        """Allocate space for `num_rows` requests of up to `length` tokens, preserving contents. Existing space is kept
        unless the total would exceed `max_tokens`.
        """
        self._used = max(self._used[0], num_rows), max(self._used[1], length)
        if num_rows <= self.num_rows and length <= self.length:
            return
        rows, width = self.compute_size(num_rows, length)
        if max(rows, self.num_rows) * max(width, self.length) <= self.max_tokens:
            rows, width = max(rows, self.num_rows), max(width, self.length)
        self._resize(rows, width)

    def trim(self) -> bool:
        """Free memory unused since the last call, if it is at least half of the total. Only while nothing runs. Returns
        whether memory was freed.
        """
        rows, width = self.compute_size(*self._used)
        self._used = 0, 0
        is_too_large = 2 * rows * width <= self.num_rows * self.length
        if is_too_large:
            self._resize(rows, width)
        return is_too_large

    def _resize(self, rows: int, width: int) -> None:
        """Move the contents to memory of another size."""
        self.num_rows, self.length = rows, width
        self.generation += 1
        for tensors in (self._keys, self._values):
            for layer, held in enumerate(tensors):
                if held is not None:
                    fresh, kept = self._allocate(held), held[:rows, :, :width]
                    fresh[: kept.shape[0], :, : kept.shape[2]] = kept
                    tensors[layer] = fresh
        for layer, state in self._states.items():
            fresh_state = self._build_state(state)
            for fresh, held in zip(fresh_state, state, strict=True):
                kept = held[:rows]
                fresh[: len(kept)] = kept
            self._states[layer] = fresh_state

    def release(self) -> None:
        """Free all memory; the next `reserve` allocates again."""
        self.num_rows = self.length = 0
        self.generation += 1
        self._keys = [None] * len(self._keys)
        self._values = [None] * len(self._values)
        self._states = {}

    def begin_prefill(self, rows: list[int], starts: list[int], ends: list[int]) -> None:
        """Prepare a pass over positions `starts[i]` to `ends[i]` of `rows[i]`, which has the earlier ones."""
        self._prefill = list(zip(rows, starts, ends, strict=True))
        # Without earlier tokens, a layer attends only to newly computed keys: nothing is read back.
        self._num_keys = round_up(max(ends), KEY_BLOCK) if any(starts) else 0

    def begin_decode(self, positions: torch.Tensor, num_keys: int, num_advancing: int) -> None:
        """Prepare a pass over the first rows: row b writes at `positions[b]` and attends over `num_keys` keys.

        Args:
            positions: [B, T]
            num_keys: a multiple of KEY_BLOCK, above every position
            num_advancing: number of leading rows with a new token; states of the other (padding) rows stay unchanged
        """
        self._prefill, self._num_advancing = None, num_advancing
        self._positions = positions
        self._num_keys = num_keys
        # All rows at once: captured passes read this memory again (`decode_graphs.py`).
        if len(self._all_rows) < len(positions) or self._all_rows.device != positions.device:
            self._all_rows = torch.arange(max(self.max_rows, len(positions)), device=positions.device)[:, None]
            self.generation += 1
        self._rows = self._all_rows[: len(positions)]

    def update(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_args: object, **_kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store a layer's new keys and values, and return those to attend over.

        Args:
            key_states, value_states: [B, K, T, D]
        """
        if self._keys[layer_idx] is None:
            self._keys[layer_idx] = self._allocate(key_states)
            self._values[layer_idx] = self._allocate(value_states)
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        assert keys is not None and values is not None
        if self._prefill is None:
            batch, rows, positions = len(key_states), self._rows, self._positions
            if self._states:
                # Padding rows rewrite their current values; a state that has advanced would change.
                written = slice(self._num_advancing)
                rows, positions = rows[written], positions[written]
                key_states, value_states = key_states[written], value_states[written]
            keys[rows, :, positions] = key_states.transpose(1, 2)
            values[rows, :, positions] = value_states.transpose(1, 2)
            return keys[:batch, :, : self._num_keys], values[:batch, :, : self._num_keys]
        for index, (row, start, end) in enumerate(self._prefill):
            keys[row, :, start:end] = key_states[index, :, : end - start]
            values[row, :, start:end] = value_states[index, :, : end - start]
        if not self._num_keys:
            return key_states, value_states
        rows = [row for row, _, _ in self._prefill]
        return keys[rows, :, : self._num_keys], values[rows, :, : self._num_keys]

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of one row to another."""
        for tensor in self.tensors():
            tensor[target, :, :length] = tensor[source, :, :length]
        for state in self._states.values():
            for tensor in state:
                tensor[target] = tensor[source]

    def tensors(self) -> list[torch.Tensor]:
        """Return the keys of every layer, then the values, [rows, heads, length, width] each; empty before the first
        pass."""
        return [tensor for tensor in (*self._keys, *self._values) if tensor is not None]

    def clear_row(self, row: int) -> None:
        """Zero a row with non-finite values."""
        for tensor in [*self.tensors(), *(each for state in self._states.values() for each in state)]:
            tensor[row].zero_()

    # States of linear attention: see `DeltaCache`.

    def delta_state(self, layer: int) -> DeltaState | None:
        if self._prefill is None:
            return DeltaState(*(each[: len(self._positions)] for each in self._states[layer]))
        assert not any(start for _, start, _ in self._prefill), "there are no states within a row"
        return None

    def put_delta_state(self, layer: int, state: DeltaState) -> None:
        # Allocated at the first prompt, when the sizes are known.
        if layer not in self._states:
            self._states[layer] = self._build_state(state)
        for held, new in zip(self._states[layer], state, strict=True):
            if self._prefill is None:
                held[: self._num_advancing] = new[: self._num_advancing]
            else:
                held[[row for row, _, _ in self._prefill]] = new

    def delta_lengths(self) -> list[int] | None:
        return None if self._prefill is None else [end - start for _, start, end in self._prefill]

    def _build_state(self, state: DeltaState) -> DeltaState:
        return DeltaState(*(each.new_zeros(self.num_rows, *each.shape[1:]) for each in state))

    def _allocate(self, like: torch.Tensor) -> torch.Tensor:
        return like.new_zeros(self.num_rows, like.shape[1], self.length, like.shape[3])

"""Prefix cache: keys and values of computed tokens, for later requests with the same prefix.

`PrefixTree` maps prefixes to slots, `PrefixCache` stores their keys and values. Prefixes are matched by tokens, not
hashes, so collisions are impossible; and per token, not per block: the next turn of a conversation computes only new
tokens. Both are independent of requests and weights: call `clear` when the weights change; adapters are distinguished
by a number.
"""

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import torch

from skyrl_train.inference_engines.native.cache import SlotCache
from skyrl_train.inference_engines.native.route_table import RouteTable

_FIRST_TOKENS = 1024
"""Initial capacity in tokens; grows in powers of two."""


class _Node:
    """Node of the tree: tokens after its parent's, and the slots of their keys and values."""

    __slots__ = ("children", "key", "parent", "slots", "tokens")

    def __init__(self, key: tuple[int, int], parent: "_Node | None", tokens: np.ndarray, slots: np.ndarray):
        self.key = key
        self.parent = parent
        self.tokens = tokens
        self.slots = slots
        self.children: dict[tuple[int, int], _Node] = {}


class PrefixTree:
    """Radix tree of token sequences with a slot per token. Has at most `max_tokens` slots; the least recently used
    sequences are evicted.

    A sequence belongs to the adapter (0: none) that computed its keys and values.
    """

    def __init__(self, max_tokens: int):
        self.max_tokens = max_tokens
        self.clear()

    def clear(self) -> None:
        """Remove all sequences."""
        nothing = np.empty(0, np.int64)
        self._root = _Node((0, 0), None, nothing, nothing)
        # Using a node also uses its ancestors, which are moved after it: the first in this order never has children.
        self._by_use: OrderedDict[_Node, None] = OrderedDict()
        self._free: list[np.ndarray] = []
        self._num_ever = 0
        self.num_tokens = 0

    def match(self, tokens: np.ndarray, adapter: int = 0) -> np.ndarray:
        """Return the slots of the longest stored prefix of `tokens`, and mark it as used."""
        path, slots = self._walk(tokens, adapter)
        self._mark_used(path)
        return np.concatenate(slots) if slots else np.empty(0, np.int64)

    def get_match_length(self, tokens: np.ndarray, adapter: int = 0) -> int:
        """Return the length of the longest stored prefix of `tokens` without marking it as used."""
        return sum(map(len, self._walk(tokens, adapter)[1]))

    def insert(self, tokens: np.ndarray, adapter: int = 0) -> tuple[int, np.ndarray]:
        """Add a sequence and mark it as used, evicting the least recently used ones if needed.

        Returns: the length of the stored prefix, and slots for the tokens after it: fewer than tokens if the sequence
        exceeds the capacity.
        """
        path, matched = self._walk(tokens, adapter)
        known = sum(map(len, matched))
        if path and len(matched[-1]) < len(path[-1].tokens):
            path[-1] = self._split(path[-1], len(matched[-1]))
        self._mark_used(path)  # marked before eviction, so that it is not evicted
        slots = self._allocate(min(len(tokens) - known, self.max_tokens), keep=path)
        if len(slots):
            parent = path[-1] if path else self._root
            key = (adapter if parent is self._root else 0, int(tokens[known]))
            leaf = _Node(key, parent, np.array(tokens[known : known + len(slots)]), slots)
            parent.children[key] = leaf
            self._mark_used([*path, leaf])
        return known, slots

    def _walk(self, tokens: np.ndarray, adapter: int) -> tuple[list[_Node], list[np.ndarray]]:
        """Return the nodes along `tokens` from the root with their matching slots; the last may match partially."""
        path: list[_Node] = []
        slots: list[np.ndarray] = []
        node, position = self._root, 0
        while position < len(tokens):
            child = node.children.get((adapter if node is self._root else 0, int(tokens[position])))
            if child is None:
                break
            rest = tokens[position : position + len(child.tokens)]
            differ = np.flatnonzero(child.tokens[: len(rest)] != rest)
            count = int(differ[0]) if len(differ) else len(rest)
            path.append(child)
            slots.append(child.slots[:count])
            position += count
            if count < len(child.tokens):
                break
            node = child
        return path, slots

    def _mark_used(self, path: Sequence[_Node]) -> None:
        for node in reversed(path):
            self._by_use[node] = None
            self._by_use.move_to_end(node)

    def _split(self, node: _Node, length: int) -> _Node:
        """Split a node after `length` tokens; return the upper part."""
        parent = node.parent
        assert parent is not None and 0 < length < len(node.tokens)
        # Copies: a view of a few tokens would keep the entire array alive.
        upper = _Node(node.key, parent, node.tokens[:length].copy(), node.slots[:length].copy())
        parent.children[node.key] = upper
        node.key, node.parent = (0, int(node.tokens[length])), upper
        node.tokens, node.slots = node.tokens[length:].copy(), node.slots[length:].copy()
        upper.children[node.key] = node
        return upper

    def _allocate(self, count: int, keep: Sequence[_Node]) -> np.ndarray:
        """Return up to `count` free slots, evicting least recently used nodes as needed, except `keep`."""
        while self.max_tokens - self.num_tokens < count:
            oldest = next(iter(self._by_use), None)
            if oldest is None or oldest in keep:
                break
            self._evict(oldest)
        count = min(count, self.max_tokens - self.num_tokens)
        self.num_tokens += count
        parts: list[np.ndarray] = []
        while count and self._free:
            freed = self._free.pop()
            parts.append(freed[:count])
            if len(freed) > count:
                self._free.append(freed[count:])
            count -= len(parts[-1])
        parts.append(np.arange(self._num_ever, self._num_ever + count))  # none was freed: use new slots
        self._num_ever += count
        return np.concatenate(parts)

    def _evict(self, node: _Node) -> None:
        assert not node.children and node.parent is not None
        del self._by_use[node]
        del node.parent.children[node.key]
        self._free.append(node.slots)
        self.num_tokens -= len(node.slots)


class PrefixCache:
    """Storage of keys and values (and expert routes) of a `PrefixTree`, copied from and to rows of the cache.

    Args:
        max_tokens: capacity in tokens; 0: disabled.
        routes: routes of the rows of `cache`; None: not recorded.
    """

    def __init__(self, cache: SlotCache, max_tokens: int, routes: RouteTable | None = None):
        self.tree = PrefixTree(max_tokens)
        self._cache = cache
        self._routes = routes
        self._tensors: list[torch.Tensor] = []
        self._kept_routes = np.empty(0, np.uint8)

    @property
    def is_enabled(self) -> bool:
        return self.tree.max_tokens > 0

    def clear(self) -> None:
        """Remove all prefixes, after a weight change."""
        self.tree.clear()

    def release(self) -> None:
        """Remove all prefixes and free the memory."""
        self.clear()
        self._tensors, self._kept_routes = [], np.empty(0, np.uint8)

    def load(self, rows: Sequence[int], slots: Sequence[np.ndarray]) -> None:
        """Copy prefixes, found by `tree.match` since the last `store`, to the start of cache rows."""
        if not any(map(len, slots)):
            return
        row, position, slot = _flatten_positions(rows, [0] * len(rows), slots)
        to_row, to_position, from_slot = self._on_device(row, position, slot)
        for own, tensor in zip(self._tensors, self._cache.tensors(), strict=True):
            tensor[to_row, :, to_position] = own[from_slot]
        if self._routes is not None:
            self._routes.array[row, position] = self._kept_routes[slot]

    def store(self, rows: Sequence[int], tokens: Sequence[np.ndarray], adapters: Sequence[int]) -> None:
        """Store the contents of cache rows that begin with `tokens`."""
        found = [self.tree.insert(*sequence) for sequence in zip(tokens, adapters, strict=True)]
        if not any(len(slots) for _, slots in found):
            return
        row, position, slot = _flatten_positions(rows, [known for known, _ in found], [slots for _, slots in found])
        # A sequence may have been evicted by a later one of this call: the last owner of a slot counts.
        last = len(slot) - 1 - np.unique(slot[::-1], return_index=True)[1]
        row, position, slot = row[last], position[last], slot[last]
        held = self._cache.tensors()
        if not self._tensors:
            self._tensors = [tensor.new_empty(0, tensor.shape[1], tensor.shape[3]) for tensor in held]
        self._grow(int(slot[-1]) + 1)
        from_row, from_position, to_slot = self._on_device(row, position, slot)
        is_one_range = slot[-1] - slot[0] + 1 == len(slot)  # if nothing was evicted
        for own, tensor in zip(self._tensors, held, strict=True):
            if is_one_range:
                _gather(tensor, from_row, from_position, own[slot[0] : slot[-1] + 1])
            else:
                own[to_slot] = tensor[from_row, :, from_position]
        if self._routes is not None:
            self._kept_routes[slot] = self._routes.array[row, position]

    def _on_device(self, *indices: np.ndarray) -> list[torch.Tensor]:
        device = self._cache.tensors()[0].device
        return [torch.from_numpy(index).to(device) for index in indices]

    def _grow(self, num_tokens: int) -> None:
        size = len(self._tensors[0])
        if num_tokens > size:
            size = min(self.tree.max_tokens, max(_FIRST_TOKENS, 1 << (num_tokens - 1).bit_length()))
            for index, tensor in enumerate(self._tensors):  # one at a time, to bound the temporary memory
                self._tensors[index] = tensor.new_empty(size, *tensor.shape[1:])
                self._tensors[index][: len(tensor)] = tensor
        if self._routes is not None and len(self._kept_routes) < size:
            grown = np.empty((size, *self._routes.array.shape[2:]), self._routes.array.dtype)
            if len(self._kept_routes):
                grown[: len(self._kept_routes)] = self._kept_routes
            self._kept_routes = grown


def _gather(held: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, target: torch.Tensor) -> None:
    """Copy tokens from rows of the cache [rows, heads, length, width] to `target` [tokens, heads, width], in one pass
    over full vectors (indexing would make an intermediate copy).
    """
    _, num_heads, length, width = held.shape
    heads = torch.arange(num_heads, device=held.device)
    places = (rows[:, None] * num_heads + heads) * length + positions[:, None]
    torch.index_select(held.view(-1, width), 0, places.flatten(), out=target.view(-1, width))


def _flatten_positions(
    rows: Sequence[int], starts: Sequence[int], slots: Sequence[np.ndarray]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return row, position and slot of every token; row i has `slots[i]` from position `starts[i]` on."""
    lengths = [len(each) for each in slots]
    positions = [np.arange(start, start + length) for start, length in zip(starts, lengths, strict=True)]
    return np.repeat(np.array(rows, np.int64), lengths), np.concatenate(positions), np.concatenate(slots)

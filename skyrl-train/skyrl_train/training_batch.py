"""Batch of tensors with the same first dimension, exchanged between the trainer and its workers.

Independent of the tensors' meaning, of Ray, and of devices except in `to`.
"""

import builtins
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from skyrl_train.utils.storage import Place, open_to_write

_NUMPY_KINDS = {torch.bfloat16: torch.int16}  # numpy has no bfloat16: its bytes are stored as int16


def shape_of(value: object) -> str:
    """Describe the result of a function, for error messages: `a tensor (4, 12)`, `(a tensor (4,), dict)`."""
    if isinstance(value, torch.Tensor):
        return f"a tensor {tuple(value.shape)}"
    if isinstance(value, tuple):
        return f"({', '.join(map(shape_of, value))})"
    return type(value).__name__


class TensorBatch(dict[str, torch.Tensor | None]):
    """Named tensors (or None) with the same first dimension, and `metadata` about the whole batch.

    Raises:
        ValueError: a value is not a tensor, or the first dimensions differ.
    """

    def __init__(self, *args: Any, metadata: dict[str, Any] | None = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.metadata: dict[str, Any] = {} if metadata is None else metadata
        self._check()

    def _check(self) -> None:
        sizes = {}
        for key, value in self.items():
            if value is None:
                continue
            if not isinstance(value, torch.Tensor):
                raise ValueError(f"'{key}' must be a tensor or None; got {type(value).__name__}")
            sizes[key] = value.shape[0]
        if len(set(sizes.values())) > 1:
            raise ValueError(f"Batch size mismatch: every tensor needs the same first dimension; got {sizes}")

    def __setitem__(self, key: str, value: torch.Tensor | None) -> None:
        super().__setitem__(key, value)
        self._check()

    @property
    def batch_size(self) -> int:
        return next((value.shape[0] for value in self.values() if value is not None), 0)

    def __len__(self) -> int:
        return self.batch_size

    @property
    def device(self) -> torch.device | None:
        return next((value.device for value in self.values() if value is not None), None)

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        """Return a batch of `function` of every tensor."""
        mapped = {key: None if value is None else function(value) for key, value in self.items()}
        return type(self)(mapped, metadata=dict(self.metadata))

    def tensor(self, key: str) -> torch.Tensor:
        """Return the tensor under `key`. Raises KeyError if it is missing or None."""
        value = self[key]
        if value is None:
            raise KeyError(f"'{key}' is None in this batch")
        return value

    def select(self, keys: Sequence[str], metadata_keys: Sequence[str] | None = None) -> Self:
        """Return a batch of some tensors, with some (None: all) of the metadata."""
        names = self.metadata if metadata_keys is None else metadata_keys
        return type(self)({key: self[key] for key in keys}, metadata={name: self.metadata[name] for name in names})

    def to(
        self,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        non_blocking: bool = False,
    ) -> Self:
        """Move or convert every tensor in place and return self."""
        for key, value in list(self.items()):
            if value is not None:
                super().__setitem__(key, value.to(device=device, dtype=dtype, non_blocking=non_blocking))
        return self

    def contiguous(self) -> Self:
        for key, value in list(self.items()):
            if value is not None:
                super().__setitem__(key, value.contiguous())
        return self

    def repeat(self, times: int) -> Self:
        """Repeat the whole batch `times` times: rows 0 1 0 1."""
        return self.map(lambda tensor: tensor.repeat(times, *[1] * (tensor.dim() - 1)))

    def repeat_interleave(self, times: int) -> Self:
        """Repeat every row `times` times: rows 0 0 1 1."""
        return self.map(lambda tensor: tensor.repeat_interleave(times, dim=0))

    def slice(self, start: int | None, end: int | None, step: int = 1) -> Self:
        return self.map(lambda tensor: tensor[start:end:step])

    def rows(self, indices: torch.Tensor) -> Self:
        """Return the rows at `indices` [N], in that order."""
        return self.map(lambda tensor: tensor[indices])

    def chunk(self, chunk_size: int) -> list[Self]:
        """Split into consecutive batches of `chunk_size` rows; the last may be smaller."""
        return list(self.chunks(chunk_size))

    def chunks(self, chunk_size: int) -> Iterator[Self]:
        for start in range(0, self.batch_size, chunk_size):
            yield self.slice(start, start + chunk_size)

    @classmethod
    def cat(cls, shards: Sequence[Self]) -> Self:
        """Concatenate the rows of all shards in order. Metadata and None values are from the first shard.

        Raises:
            ValueError: no shards, or shards with different tensors.
        """
        if not shards:
            raise ValueError("cannot concatenate an empty list of batches")
        joined: dict[str, torch.Tensor | None] = {}
        for key, first in shards[0].items():
            joined[key] = None if first is None else torch.cat([shard.tensor(key) for shard in shards])
        return cls(joined, metadata=dict(shards[0].metadata))

    def __getitem__(self, index: str | int | builtins.slice) -> Any:
        """Return the tensor for a name, or a batch of rows for a position or slice."""
        if isinstance(index, str):
            return super().__getitem__(index)
        if isinstance(index, slice):
            return self.slice(index.start, index.stop, index.step or 1)
        return self.slice(index, index + 1 if index != -1 else None)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TensorBatch) or self.keys() != other.keys() or self.metadata != other.metadata:
            return False
        for key, mine in self.items():
            theirs = other[key]
            if mine is None or theirs is None:
                if mine is not theirs:
                    return False
            elif mine.dtype != theirs.dtype or not torch.equal(mine, theirs):
                return False
        return True

    def __ne__(self, other: object) -> bool:  # dict defines it, and would compare tensors with `==`
        return not self == other

    __hash__ = None  # type: ignore[assignment]  # mutable

    def save(self, path: str | Place) -> None:
        with open_to_write(path) as file:
            pickle.dump(self, file, protocol=5)

    @staticmethod
    def load(path: str | Path) -> "TensorBatch":
        """Load a batch written by `save`. Only for trusted files, since unpickling runs code."""
        with open(path, "rb") as file:
            return pickle.load(file)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle tensors as numpy arrays, which Ray keeps in shared memory without a further copy."""
        arrays = {key: None if value is None else _to_array(value) for key, value in self.items()}
        return _load_pickled, (type(self), arrays, self.metadata)


def _to_array(tensor: torch.Tensor) -> tuple[np.ndarray, torch.dtype]:
    tensor = tensor.detach().cpu().contiguous()
    as_dtype = _NUMPY_KINDS.get(tensor.dtype)
    return (tensor if as_dtype is None else tensor.view(as_dtype)).numpy(), tensor.dtype


def _load_pickled(
    cls: type[TensorBatch], arrays: dict[str, tuple[np.ndarray, torch.dtype] | None], metadata: dict[str, Any]
) -> TensorBatch:
    tensors: dict[str, torch.Tensor | None] = {}
    for key, value in arrays.items():
        # Arrays from Ray's store are read-only: a batch is small compared with a model, so it is copied.
        tensors[key] = None if value is None else torch.from_numpy(np.array(value[0])).view(value[1])
    return cls(tensors, metadata=metadata)


class TrainingInputBatch(TensorBatch):
    """Batch of a training step. B trajectories, T prompt + response tokens, R response tokens.

    `sequences`, `attention_mask` [B, T]: prompts padded on the left, responses on the right.
    `response_mask` [B, R]: 1 on tokens of model and environment. `loss_mask` [B, R]: 1 on trained tokens. `rewards` [B,
    R]; `rollout_logprobs` [B, R] or None; `weight_versions` [B, R] int32, the weight version that generated each token,
    -1 on others; later `action_log_probs`, `base_action_log_probs`, `advantages`, `returns`, `loss_weights` [B, R].
    With routing replay `expert_routes` [B, T, L, k], the experts of each token in the L layers with a router
    (`expert_routes.py`). With sampling mask replay `kept_counts` [B, R] and `kept_ids` [B, M], int32, the tokens from
    which each response token was sampled (`kept_tokens.py`).

    Examples:
        Responses with three and two tokens to prompts with two and three:

        >>> batch = TrainingInputBatch(
        ...     sequences=torch.tensor([[0, 5, 6, 8, 9, 2], [5, 6, 7, 4, 2, 0]]),
        ...     attention_mask=torch.tensor([[0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]]),
        ...     response_mask=torch.tensor([[1, 1, 1], [1, 1, 0]]),
        ...     loss_mask=torch.tensor([[1, 1, 1], [1, 1, 0]]),
        ...     rewards=torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]]),
        ... )
        >>> len(batch), batch["sequences"].shape[1] - batch["response_mask"].shape[1]
        (2, 3)
        >>> batch[1:]["rewards"].sum().item()
        0.0
    """


class TrainingOutputBatch(TensorBatch):
    """Result of a forward pass: `output` [B, R]."""


@dataclass(frozen=True)
class MicroBatch:
    """Rows that are computed in one forward."""

    rows: tuple[int, ...]
    """Positions among the rows that the shard was given."""

    is_dummy: bool = False
    """Computed only so that all ranks take the same number of forwards. Counts nothing."""

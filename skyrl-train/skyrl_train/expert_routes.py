"""Routes: the experts selected by the routers of a mixture of experts for each token, passed from the rollout engine
(or the trainer's first forward) to the training forward that replays them. Independent of models.

Shapes: P positions of a sequence, L layers with a router, k experts per token; B rows, T columns of a batch.
"""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

_TORCH_TYPES = {np.dtype(np.uint8): torch.uint8, np.dtype(np.int16): torch.int16}


def route_dtype(num_experts: int) -> torch.dtype:
    """Return the smallest dtype for the indices of this many experts and one extra value for "no route"."""
    return torch.uint8 if num_experts < torch.iinfo(torch.uint8).max else torch.int16


def no_route(dtype: torch.dtype) -> int:
    """Return the value of positions without a route, for which the router selects experts."""
    return torch.iinfo(dtype).max


@dataclass(frozen=True, eq=False)
class ExpertRoutes:
    """Routes of the first positions of a sequence; later positions have none."""

    experts: np.ndarray
    """[P, L, k], uint8 or int16."""

    def __len__(self) -> int:
        return len(self.experts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ExpertRoutes) and np.array_equal(self.experts, other.experts)

    __hash__ = None  # type: ignore[assignment]  # holds an array

    def first(self, length: int) -> "ExpertRoutes":
        """Return the routes of the first positions."""
        return self if length >= len(self) else ExpertRoutes(self.experts[:length])

    @classmethod
    def from_json(cls, value: Any) -> "ExpertRoutes":
        """Restore routes from `to_json`. Raises ValueError for any other value."""
        if isinstance(value, cls):
            return value
        if not isinstance(value, dict) or set(value) != {"shape", "dtype", "data"}:
            raise ValueError("expert routes must be an object of shape, dtype and data")
        data = np.frombuffer(base64.b64decode(value["data"]), np.dtype(value["dtype"]))
        return cls(data.reshape(value["shape"]))

    def to_json(self) -> dict[str, object]:
        """Return the routes as JSON values."""
        data = base64.b64encode(np.ascontiguousarray(self.experts).tobytes()).decode()
        return {"shape": list(self.experts.shape), "dtype": str(self.experts.dtype), "data": data}

    @classmethod
    def __get_pydantic_core_schema__(cls, _source: object, _handler: object) -> Any:
        """Serialize with `to_json` and `from_json` in pydantic, which writes the journal of rollouts."""
        from pydantic_core import core_schema

        write = core_schema.plain_serializer_function_ser_schema(cls.to_json, when_used="json")
        return core_schema.no_info_plain_validator_function(cls.from_json, serialization=write)


def join_routes(parts: Sequence[ExpertRoutes | None]) -> ExpertRoutes | None:
    """Join the routes of a growing sequence, each computed for the whole sequence so far: a position keeps its first
    route, as a token keeps its log-prob, even if later parts recomputed it."""
    known: list[np.ndarray] = []
    length = 0
    for part in parts:
        if part is not None and len(part) > length:
            known.append(part.experts[length:])
            length = len(part)
    if not known:
        return None
    return ExpertRoutes(known[0] if len(known) == 1 else np.concatenate(known))


def pad_routes(routes: Sequence[ExpertRoutes | None], mask: torch.Tensor) -> torch.Tensor | None:
    """Return the routes of a batch [B, T, L, k]; "no route" on padding and at positions without a route.

    Args:
        mask: [B, T], 1 on the tokens of each row, in order.

    Returns:
        None if no row has any.

    Raises:
        ValueError: a row has more routes than tokens, or rows have routes of different models.
    """
    shapes = {(each.experts.shape[1:], each.experts.dtype) for each in routes if each is not None}
    if not shapes:
        return None
    if len(shapes) > 1:
        raise ValueError(f"expert routes of a batch must come from one model; got layers, experts and dtypes {shapes}")
    [(shape, dtype)] = shapes
    kind = _TORCH_TYPES[dtype]
    padded = torch.full((*mask.shape, *shape), no_route(kind), dtype=kind)
    for row, each in enumerate(routes):
        if each is None:
            continue
        columns = mask[row].nonzero()[:, 0]
        if len(each) > len(columns):
            raise ValueError(f"row {row} has expert routes of {len(each)} positions, but only {len(columns)} tokens")
        padded[row, columns[: len(each)]] = torch.from_numpy(each.experts.copy())
    return padded

"""Expert routes of the tokens of running requests, in the same rows as the cache.

Shapes: n rows of a pass, T tokens of each, L layers with a router, k experts per token.
"""

from collections.abc import Sequence

import numpy as np
import torch

from skyrl_train.expert_routes import ExpertRoutes, route_dtype
from skyrl_train.models.routing_replay import RoutingReplay


class RouteTable:
    """Routes by row and position. A row has the routes of all its tokens but the last, which is not computed yet.

    Args:
        shape: L and k.
        dtype: uint8 or int16.
    """

    def __init__(self, shape: tuple[int, int], dtype: np.dtype):
        self._shape = shape
        self._routes = np.zeros((0, 0, *shape), dtype)

    def reserve(self, num_rows: int, length: int) -> None:
        """Grow the table if needed, in powers of two, so that it is rarely copied."""
        rows, columns = self._routes.shape[:2]
        if num_rows <= rows and length <= columns:
            return
        size = (
            (_round_up_to_power_of_two(num_rows) if num_rows > rows else rows),
            (_round_up_to_power_of_two(length) if length > columns else columns),
        )
        grown = np.zeros((*size, *self._shape), self._routes.dtype)
        grown[:rows, :columns] = self._routes
        self._routes = grown

    def put_prompts(self, rows: Sequence[int], starts: Sequence[int], ends: Sequence[int], routes: np.ndarray) -> None:
        """Store the routes of positions `starts[i]` to `ends[i]` of `rows[i]`.

        Args:
            routes: [n T, L, k] of a pass over rows of equal length, possibly padded at the end.
        """
        by_row = routes.reshape(len(rows), -1, *self._shape)
        for row, start, end, own in zip(rows, starts, ends, by_row, strict=True):
            self._routes[row, start:end] = own[: end - start]

    def put_tokens(self, positions: np.ndarray, routes: np.ndarray) -> None:
        """Store the routes of tokens of the first rows.

        Args:
            positions: [n, T]
            routes: [n T or more, L, k]
        """
        by_row = routes[: positions.size].reshape(*positions.shape, *self._shape)
        self._routes[np.arange(len(positions))[:, None], positions] = by_row

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the routes of the first positions of a row to another row."""
        self._routes[target, :length] = self._routes[source, :length]

    @property
    def array(self) -> np.ndarray:
        """[rows, length, L, k], as allocated by `reserve`."""
        return self._routes

    def get_row(self, row: int, length: int) -> ExpertRoutes:
        """Return the routes of the first positions of a row."""
        return ExpertRoutes(self._routes[row, :length].copy())

    def release(self) -> None:
        """Free the memory. Only while nothing runs."""
        self._routes = np.zeros((0, 0, *self._shape), self._routes.dtype)


def build_route_table(routing: RoutingReplay) -> RouteTable:
    """Build an empty table for a mixture's routes."""
    dtype = torch.empty(0, dtype=route_dtype(routing.shape.num_experts)).numpy().dtype
    return RouteTable((routing.shape.num_layers, routing.shape.num_chosen), dtype)


def _round_up_to_power_of_two(count: int) -> int:
    return 1 << max(0, count - 1).bit_length()

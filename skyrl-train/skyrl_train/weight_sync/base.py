"""The vocabulary of weight sync: what the trainer sends and what an engine receives. Knows neither of them."""

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np


@dataclass(frozen=True, kw_only=True)
class WeightSyncInitInfo:
    """How an engine meets the trainer.

    `shared_memory`: nothing to set up, chunks arrive with the request. `broadcast`: the engine joins a process group of
    `world_size` (trainer rank 0 first) at `master_address:master_port` as rank `rank`.
    """

    strategy: Literal["shared_memory", "broadcast"]
    backend: str = "gloo"
    master_address: str = ""
    master_port: int = 0
    rank: int = 0
    world_size: int = 1
    timeout_seconds: float = 600.0


@dataclass(frozen=True, kw_only=True)
class WeightUpdateRequest:
    """One chunk of parameters, in order. `dtypes` are torch names such as `bfloat16`.

    With the shared-memory strategy `buffer` holds the parameters' bytes one after the other (uint8, read-only);
    with broadcast it is None and the bytes come over the group as one flat uint8 tensor.
    """

    names: list[str]
    dtypes: list[str]
    shapes: list[tuple[int, ...]]
    buffer: np.ndarray[Any, np.dtype[np.uint8]] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not len(self.names) == len(self.dtypes) == len(self.shapes):
            raise ValueError(
                f"a weight chunk needs as many dtypes and shapes as names; got {len(self.names)} names, "
                f"{len(self.dtypes)} dtypes, {len(self.shapes)} shapes"
            )

    def __len__(self) -> int:
        return len(self.names)

"""The processes that hold one frozen model together: which of them computes what, and what they tell each other.

Its transformer blocks are sharded over them (FSDP2): every one must take part in each forward and backward, be it with
nothing. Adapters, gradients and optimizers are small, and everybody has all of them.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from skyrl_train.config import FSDPConfig
from skyrl_train.errors import ConfigError
from skyrl_train.training_backends.fsdp2.sharding import load_whole_state, transformer_blocks
from tx.tinker.backends.torch.layout import cut
from tx.tinker.types import Datum

T = TypeVar("T")


@dataclass(frozen=True)
class Peers:
    """
    Args:
        mesh: of all ranks; None: there is one process, and nothing here is a collective.
    """

    rank: int = 0
    size: int = 1
    mesh: DeviceMesh | None = None

    def owners(self, data: Sequence[Datum]) -> list[int]:
        """The rank that computes each datum: consecutive ones together, as evenly as can be. It follows from the data
        alone, so that company changes nothing; where it begins does too, so that small requests spread."""
        if self.size == 1:
            return [0] * len(data)
        lengths = [len(datum.tokens) for datum in data]
        room = bisect_left(
            range(sum(lengths)), True, lo=max(lengths), key=lambda most: len(cut(data, most)) <= self.size
        )
        first = sum(int(datum.tokens.sum()) for datum in data)
        return [(first + i) % self.size for i, part in enumerate(cut(data, room)) for _ in part]

    def exchange(self, mine: T) -> list[T]:
        """What every rank says, in rank order. A collective."""
        everyone: list[Any] = [None] * self.size
        dist.all_gather_object(everyone, mine)
        return everyone

    def sum_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Over all ranks, in float32, to the same bits on each. A collective."""
        if self.size == 1:
            return tensor
        total = tensor.float()
        dist.all_reduce(total)
        return total

    def shard(self, model: Any, folder: Path, device: torch.device) -> None:
        """Divides the model's blocks, in place, and gives everyone the rest whole (the output layer is called apart
        from the decoder, and may be one with the embeddings). A collective.

        Args:
            model: on rank 0 whole and on the CPU; elsewhere on the meta device, for its shapes.

        Raises:
            ConfigError: nobody knows what its blocks are.
        """
        for name, dtype in self.exchange({name: each.dtype for name, each in model.named_parameters()})[0].items():
            parameter = model.get_parameter(name)  # some stay float32 when they are loaded
            parameter.data = parameter.data.to(dtype)
        whole = model.state_dict() if self.rank == 0 else {}
        blocks = transformer_blocks(model)
        if not blocks:
            raise ConfigError(
                f"{folder} cannot be divided over processes: its class does not name its blocks (_no_split_modules). "
                f"Set backend_config.num_processes=1"
            )
        inside = {parameter for block in blocks for parameter in block.parameters()}
        outside = set(model.parameters()) - inside
        for block in blocks:
            fully_shard(block, mesh=self.mesh)
        fully_shard(model.get_decoder(), mesh=self.mesh, ignored_params=outside)
        if self.rank == 0:
            model.to(device)
        load_whole_state(model, whole, FSDPConfig(), device)
        model.tie_weights()


ALONE = Peers()

"""Group of processes that share one frozen model: assignment of data, and collectives.

Transformer blocks are sharded over the ranks (FSDP2): every rank must take part in each forward and backward, if need
be with dummy data. A vector of an adapter (weights, gradient, moments) is sharded over ranks: weights are gathered for
a pass, and gradients reduce-scattered at its end.

Shapes: P numbers of a vector, p = P / ranks, rounded up, of a part; the last part is padded with zeros.
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
from skyrl_train.models.weight_files import WeightFiles, get_transformer_blocks
from skyrl_train.training_backends.fsdp2.sharding import get_non_file_values, load_from_files, load_full_state
from tx.tinker.backends.torch.layout import split_by_tokens
from tx.tinker.types import Datum

T = TypeVar("T")


@dataclass(frozen=True)
class RankGroup:
    """
    Args:
        mesh: of all ranks; None: there is one process, and nothing here is a collective.
    """

    rank: int = 0
    size: int = 1
    mesh: DeviceMesh | None = None

    def assign_owners(self, data: Sequence[Datum]) -> list[int]:
        """Assign each datum to a rank: consecutive data together, as evenly as possible. The result depends on the data
        alone, so co-batched requests change nothing; so does the first rank, which spreads small requests."""
        if self.size == 1:
            return [0] * len(data)
        lengths = [len(datum.tokens) for datum in data]
        room = bisect_left(
            range(sum(lengths)), True, lo=max(lengths), key=lambda most: len(split_by_tokens(data, most)) <= self.size
        )
        first = sum(int(datum.tokens.sum()) for datum in data)
        return [(first + i) % self.size for i, part in enumerate(split_by_tokens(data, room)) for _ in part]

    def gather_values(self, mine: T) -> list[T]:
        """Gather a value from every rank, in rank order. A collective."""
        everyone: list[Any] = [None] * self.size
        dist.all_gather_object(everyone, mine)
        return everyone

    def get_part_size(self, count: int) -> int:
        """Return p of a vector of `count` numbers."""
        return -(-count // self.size)

    def extract_part(self, vector: torch.Tensor) -> torch.Tensor:
        """Return this rank's part [p] of a vector [P] that every rank has."""
        size = self.get_part_size(len(vector))
        part = vector[self.rank * size : (self.rank + 1) * size]
        return part if len(part) == size else torch.cat([part, part.new_zeros(size - len(part))])

    def gather_vector(self, part: torch.Tensor, count: int) -> torch.Tensor:
        """Gather a vector [`count`] from its parts. A collective."""
        if self.size == 1:
            return part
        padded = part.new_empty(self.size * len(part))
        dist.all_gather_into_tensor(padded, part)
        return padded[:count]

    def gather_vector_on_first(self, part: torch.Tensor, count: int) -> torch.Tensor:
        """Gather a vector [`count`] on the CPU of rank 0; on other ranks the result is empty. A collective."""
        if self.size == 1:
            return part.cpu()
        parts = [torch.empty_like(part) for _ in range(self.size)] if self.rank == 0 else None
        dist.gather(part, parts, dst=0)
        return torch.cat([each.cpu() for each in parts])[:count] if parts is not None else torch.empty(0)

    def reduce_scatter(self, vector: torch.Tensor) -> torch.Tensor:
        """Sum a vector over all ranks in float32. A collective.

        Args:
            vector: [size p], its P numbers padded with zeros.

        Returns: this rank's part, [p]
        """
        if self.size == 1:
            return vector
        # bfloat16 has 8 bits of precision, and each addition of the reduction would round to them.
        part = torch.empty(len(vector) // self.size, device=vector.device)
        dist.reduce_scatter_tensor(part, vector.float())
        return part

    def compute_norm(self, part: torch.Tensor) -> float:
        """Compute the Euclidean norm of a vector from its parts, the same on each rank. It is summed in float64: finite
        where every number is. A collective."""
        of_part = torch.linalg.vector_norm(part, dtype=torch.float64)
        if self.size == 1:
            return float(of_part)
        of_parts = of_part.new_empty(self.size)
        dist.all_gather_into_tensor(of_parts, of_part.reshape(1))
        return float(torch.linalg.vector_norm(of_parts))

    def shard(self, model: Any, files: WeightFiles | None, folder: Path, device: torch.device) -> None:
        """Shard the model's blocks in place, and replicate the rest (the output layer is called separately from the
        decoder, and may be tied to the embeddings). A collective.

        Args:
            model: on the meta device for its shapes; without files whole and on the CPU of rank 0.
            files: from which each rank reads its shard; None: broadcast from rank 0.

        Raises:
            ConfigError: the model's blocks cannot be determined.
        """
        for name, dtype in self.gather_values({name: each.dtype for name, each in model.named_parameters()})[0].items():
            parameter = model.get_parameter(name)  # some stay float32 when they are loaded
            parameter.data = parameter.data.to(dtype)
        # Taken before sharding, which replaces the parameters by shards.
        values = get_non_file_values(model) if files is not None else model.state_dict() if self.rank == 0 else {}
        blocks = get_transformer_blocks(model)
        if not blocks:
            raise ConfigError(
                f"{folder} cannot be sharded over processes: its class does not declare its blocks "
                "(_no_split_modules). Set backend_config.num_processes=1"
            )
        inside = {parameter for block in blocks for parameter in block.parameters()}
        outside = set(model.parameters()) - inside
        # Every rank must shard and load in the same order, because each step is a collective: ranks that disagree wait
        # for each other until the timeout.
        for block in blocks:
            fully_shard(block, mesh=self.mesh)
        fully_shard(model.get_decoder(), mesh=self.mesh, ignored_params=outside)
        if files is not None:
            load_from_files(model, model, files, values, FSDPConfig(), device)
        else:
            if self.rank == 0:
                model.to(device)
            load_full_state(model, values, FSDPConfig(), device)
        model.tie_weights()


ALONE = RankGroup()

"""Gathering and distribution of the weights of a sharded model under the names of transformers.

Both iterate over the entries of the weight map in the same order on every rank. Each entry takes a few collectives, of
the ranks that shard the weight and then of the stages: a rank that stopped early or skipped an entry would deadlock the
others.
"""

from collections.abc import Callable, Iterator, Mapping

import torch
import torch.distributed as dist
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from skyrl_train.training_backends.megatron.groups import get_expert_group, get_stage_group, get_tensor_group
from skyrl_train.training_backends.megatron.model import HiddenStatesModel, get_stage_layers
from skyrl_train.training_backends.megatron.weight_map import Entry, MapSizes, get_local_name, iter_entries

Gather = Callable[[nn.Parameter], torch.Tensor]
"""Returns a tensor for a weight of this rank, shaped like it; may be a collective of its data-parallel ranks."""

Write = Callable[[Entry, nn.Parameter, torch.Tensor], None]
"""Replaces a tensor of one of this rank's weights, which belongs to an entry of the map."""


class StageWeights:
    """Weights of this rank's stage. Stores no tensors or plans: both are computed in each iteration, because old plans
    would refer to old parameters.

    Args:
        shapes: shapes of the weights of the transformers model, by name.
        has_frozen_routers: routers are not trained.
    """

    def __init__(
        self,
        stage: HiddenStatesModel,
        config: TransformerConfig,
        sizes: MapSizes,
        shapes: Mapping[str, torch.Size],
        *,
        has_frozen_routers: bool = False,
    ):
        self.stage, self.config, self.sizes, self.shapes = stage, config, sizes, shapes
        self.has_frozen_routers = has_frozen_routers

    def gather(
        self, of: Gather, *, dtype: torch.dtype = torch.float32, trained_only: bool = False
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield a gathered tensor of every weight on every rank, in the order of the model. A collective.

        Args:
            dtype: dtype of the tensors from `of`: stages that lack a weight receive it in this dtype.
        """
        parameters = dict(self.stage.named_parameters())
        for entry in self._iter_entries(trained_only):
            owner = self._get_owner(entry)
            whole: list[torch.Tensor] | None = None
            # All ranks of a stage take this branch together: their collectives are among themselves. `of` is first, on
            # every rank of the stage, as it may be a collective of data-parallel ranks.
            if owner == get_stage_group().rank():
                own = [of(parameters[name]) for name in self._get_local_names(entry)]
                shard = torch.stack(own) if entry.stacked else own[0]
                whole = entry.merge(_gather_all(shard, _group(entry)))
            # Every rank of the owner's stage holds the whole now, so each broadcasts to its counterparts in other
            # stages, and no weight is sent twice to a rank. A caller that reads only on rank 0 still iterates on every
            # rank.
            yield from zip(entry.names, self._from_stage(owner, whole, entry, dtype), strict=True)

    def scatter(self, read: Callable[[str], torch.Tensor], write: Write, *, trained_only: bool = False) -> None:
        """Distribute whole tensors to the weights of this rank.

        Args:
            read: called for every name in turn, on every rank, in the same order: it may be a collective.
        """
        parameters = dict(self.stage.named_parameters())
        rank = get_stage_group().rank()
        for entry in self._iter_entries(trained_only):
            # Before the branch: `read` may be a broadcast to all ranks, including other stages.
            whole = [read(name) for name in entry.names]
            if rank in self._get_holders(entry):
                # The order of ranks in the group equals the order of shards: megatron-core numbers tensor-parallel
                # ranks innermost, and expert-tensor ranks inside expert ranks.
                group = _group(entry)
                place, size = (0, 1) if group is None else (group.rank(), group.size())
                shard = entry.split(whole, place, size)
                names = self._get_local_names(entry, of_head=rank != self._get_owner(entry))
                for name, part in zip(names, shard.unbind() if entry.stacked else [shard], strict=True):
                    write(entry, parameters[name], part)

    def _iter_entries(self, trained_only: bool) -> Iterator[Entry]:
        for entry in iter_entries(self.sizes):
            if not (trained_only and self.has_frozen_routers and entry.is_router):
                yield entry

    def _get_local_names(self, entry: Entry, of_head: bool = False) -> list[str]:
        first_layer, _ = get_stage_layers(self.config)
        return ["output_layer.weight"] if of_head else [get_local_name(name, first_layer) for name in entry.tensors]

    def _get_owner(self, entry: Entry) -> int:
        """Return the stage that provides a weight."""
        if entry.layer is None:
            return self.config.pipeline_model_parallel_size - 1 if entry.is_output else 0
        for stage in range(self.config.pipeline_model_parallel_size):
            first_layer, num_layers = get_stage_layers(self.config, stage)
            if first_layer <= entry.layer < first_layer + num_layers:
                return stage
        raise AssertionError(f"no stage has layer {entry.layer}")

    def _get_holders(self, entry: Entry) -> set[int]:
        """Return the stages with a copy of a weight: the last one has a second copy of tied embeddings."""
        is_tied = self.sizes.tied_head and entry.layer is None and not entry.is_output
        return {self._get_owner(entry)} | ({self.config.pipeline_model_parallel_size - 1} if is_tied else set())

    def _from_stage(
        self, owner: int, whole: list[torch.Tensor] | None, entry: Entry, dtype: torch.dtype
    ) -> Iterator[torch.Tensor]:
        """Broadcast tensors of a stage to the ranks of all stages, and yield them."""
        # The group has one rank of each stage, those with the same position within their stages.
        group = get_stage_group()
        source = dist.get_global_rank(group, owner)
        for number, name in enumerate(entry.names):
            if whole is not None:
                tensor = whole[number].contiguous()
            else:
                # Of the sender's shape and dtype: a broadcast checks neither.
                tensor = torch.empty(self.shapes[name], dtype=dtype, device=self.device)
            if group.size() > 1:
                dist.broadcast(tensor, source, group)
            yield tensor

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return next(self.stage.parameters()).device


def _group(entry: Entry) -> dist.ProcessGroup | None:
    if entry.division == "none":
        return None
    if entry.division == "expert":
        return get_expert_group()
    return get_tensor_group()


def _gather_all(shard: torch.Tensor, group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    """Return the shards of all ranks of a group, in order."""
    if group is None or group.size() == 1:
        return [shard]
    # Shards of a group have one shape: vocabulary padding belongs to them, and is removed by the merge.
    shards = [torch.empty_like(shard) for _ in range(group.size())]
    dist.all_gather(shards, shard.contiguous(), group=group)
    return shards

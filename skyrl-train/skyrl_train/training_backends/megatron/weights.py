"""Whole weights of a divided model under the names of transformers: gathered from its ranks, and dealt to them.

Both walk over the entries of the map in the same order on every rank. Each entry is a few collectives, of the ranks
that divide the weight and then of the stages: a rank that left a walk early, or skipped an entry, would leave the
others waiting in the collective of another weight.
"""

from collections.abc import Callable, Iterator, Mapping

import torch
import torch.distributed as dist
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from skyrl_train.training_backends.megatron.groups import expert_group, stage_group, tensor_group
from skyrl_train.training_backends.megatron.model import HiddenStatesModel, stage_layers
from skyrl_train.training_backends.megatron.weight_map import Entry, MapSizes, entries, local_name

Gather = Callable[[nn.Parameter], torch.Tensor]
"""Tensor of a weight of this rank, shaped like it; maybe a collective of its data-parallel ranks."""

Write = Callable[[Entry, nn.Parameter, torch.Tensor], None]
"""Function that replaces a tensor of one of this rank's weights, which belongs to an entry of the map."""


class StageWeights:
    """Weights of this rank's stage. Holds no tensor and no plan: both are looked up anew in each walk, as plans of
    another walk would yield what the model was then.

    Args:
        shapes: of the weights of the transformers model, by name.
        has_frozen_routers: the choice among experts is not trained.
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
        """Yield a tensor of every weight, whole on every rank, in the order of the model. A collective.

        Args:
            dtype: of the tensors that `of` gives: stages that lack a weight receive it in this dtype.
        """
        parameters = dict(self.stage.named_parameters())
        for entry in self._entries(trained_only):
            owner = self._owner(entry)
            whole: list[torch.Tensor] | None = None
            # The ranks of one stage take this branch together: their collectives are among themselves. `of` comes
            # first, on every rank of the stage, as it may be a collective of data-parallel ranks.
            if owner == stage_group().rank():
                own = [of(parameters[name]) for name in self._local_names(entry)]
                shard = torch.stack(own) if entry.stacked else own[0]
                whole = entry.merge(_all_gather(shard, _group(entry)))
            # Every rank of the owner's stage holds the whole now, so each broadcasts along its own line of stages, and
            # no weight travels twice to a rank. A caller that reads only on rank 0 still walks on every rank.
            yield from zip(entry.names, self._from_stage(owner, whole, entry, dtype), strict=True)

    def deal(self, read: Callable[[str], torch.Tensor], write: Write, *, trained_only: bool = False) -> None:
        """Give every weight of this rank its part of whole tensors.

        Args:
            read: of every name in turn, on every rank, in the same order: it may be a collective.
        """
        parameters = dict(self.stage.named_parameters())
        rank = stage_group().rank()
        for entry in self._entries(trained_only):
            # Before the branch: `read` may be a broadcast to all ranks, also to those of other stages.
            whole = [read(name) for name in entry.names]
            if rank in self._holders(entry):
                # The order of ranks in the group is that of the shards: megatron-core numbers tensor-parallel ranks
                # innermost, and ranks of an expert's parts inside of those of the experts.
                group = _group(entry)
                place, size = (0, 1) if group is None else (group.rank(), group.size())
                shard = entry.split(whole, place, size)
                names = self._local_names(entry, of_head=rank != self._owner(entry))
                for name, part in zip(names, shard.unbind() if entry.stacked else [shard], strict=True):
                    write(entry, parameters[name], part)

    def _entries(self, trained_only: bool) -> Iterator[Entry]:
        for entry in entries(self.sizes):
            if not (trained_only and self.has_frozen_routers and entry.is_router):
                yield entry

    def _local_names(self, entry: Entry, of_head: bool = False) -> list[str]:
        first_layer, _ = stage_layers(self.config)
        return ["output_layer.weight"] if of_head else [local_name(name, first_layer) for name in entry.tensors]

    def _owner(self, entry: Entry) -> int:
        """Return the stage whose tensors stand for a weight."""
        if entry.layer is None:
            return self.config.pipeline_model_parallel_size - 1 if entry.is_output else 0
        for stage in range(self.config.pipeline_model_parallel_size):
            first_layer, num_layers = stage_layers(self.config, stage)
            if first_layer <= entry.layer < first_layer + num_layers:
                return stage
        raise AssertionError(f"no stage has layer {entry.layer}")

    def _holders(self, entry: Entry) -> set[int]:
        """Return the stages with a copy of a weight: of tied embeddings the last one has another."""
        is_tied = self.sizes.tied_head and entry.layer is None and not entry.is_output
        return {self._owner(entry)} | ({self.config.pipeline_model_parallel_size - 1} if is_tied else set())

    def _from_stage(
        self, owner: int, whole: list[torch.Tensor] | None, entry: Entry, dtype: torch.dtype
    ) -> Iterator[torch.Tensor]:
        """Yield tensors of a stage on the ranks of all stages."""
        # The group has one rank of each stage, those with the same place within their stages.
        group = stage_group()
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
        """The model's."""
        return next(self.stage.parameters()).device


def _group(entry: Entry) -> dist.ProcessGroup | None:
    if entry.division == "none":
        return None
    if entry.division == "expert":
        return expert_group()
    return tensor_group()


def _all_gather(shard: torch.Tensor, group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    """Return the shards of all ranks of a group, in order."""
    if group is None or group.size() == 1:
        return [shard]
    # Shards of a group have one shape: padding of the vocabulary belongs to them, and is cut off by the merge.
    shards = [torch.empty_like(shard) for _ in range(group.size())]
    dist.all_gather(shards, shard.contiguous(), group=group)
    return shards

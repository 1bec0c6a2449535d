"""One rank of a sharded training group, as a plain class."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from loguru import logger
from torch.distributed.tensor import DTensor

from skyrl_train.distributed.process_group import build_mesh, find_free_port
from skyrl_train.training_backends.base import ParallelInfo, RankInfo, join_process_group
from skyrl_train.utils.nodes import get_node_address
from tx.tinker.backends.base import Failure
from tx.tinker.backends.torch.rank_group import RankGroup
from tx.tinker.backends.torch.training import TorchTraining
from tx.tinker.types import PassOutput, TrainingPass


class RankTraining(TorchTraining):
    """Training of one rank: all ranks compute, rank 0 reports and writes."""

    def __init__(self, base_model_folder: str | Path, rank_group: RankGroup, **settings: Any):
        super().__init__(base_model_folder, rank_group=rank_group, **settings)
        parameters = [(get_local_part(each).numel(), each.numel()) for each in self.base_model.parameters()]
        held, whole = map(sum, zip(*parameters, strict=True))
        logger.info(
            "process {} of {} holds {:,} of {:,} model parameters", rank_group.rank, rank_group.size, held, whole
        )
        self._kept: dict[str, torch.Tensor | None] = {}

    def run(self, passes: Sequence[TrainingPass]) -> list[PassOutput | Failure]:
        outputs = super().run(passes)
        return outputs if self._rank_group.rank == 0 else []

    def copy_gradient(self, model_id: str) -> None:
        """Copy this rank's shard of the gradient, replacing any earlier copy."""
        self._kept[model_id] = super().copy_gradient(model_id)

    def put_gradient(self, model_id: str, gradient: None) -> None:
        super().put_gradient(model_id, self._kept.pop(model_id))

    def forget(self, model_id: str) -> None:
        self._kept.pop(model_id, None)
        super().forget(model_id)


def get_local_part(parameter: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a parameter."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


class TrainingRank:
    """One training rank, before and after it has joined its group.

    Args:
        settings: fields of `TrainingSettings`; the device comes with the rank.
        timeout_seconds: of every collective.
    """

    def __init__(self, base_model_folder: str, settings: dict[str, Any], timeout_seconds: float):
        self._folder, self._settings, self._timeout_seconds = base_model_folder, settings, timeout_seconds
        self._training: RankTraining | None = None

    def rendezvous_point(self) -> tuple[str, int]:
        """Return an address and free port of this machine for the process group's rendezvous."""
        return get_node_address(), find_free_port()

    def init_model(self, info: RankInfo) -> ParallelInfo:
        """Join the process group and load the model. A collective.

        Raises:
            ConfigError: a wrong setting, a model that cannot be trained here.
        """
        join_process_group(info, self._timeout_seconds)
        rank_group = RankGroup(info.rank, info.world_size, build_mesh(info.torch_device))
        self._training = RankTraining(self._folder, rank_group, **{**self._settings, "device": info.device})
        return ParallelInfo(rank=info.rank, world_size=info.world_size)

    def answer(self, method: str, args: Sequence[Any], options: dict[str, Any]) -> Any:
        """Call a method of the training. Returns: its result or its exception."""
        try:
            return getattr(self._training, method)(*args, **options)
        except Exception as error:  # returned to the driver, which compares the ranks'
            return error.with_traceback(None)

"""Training ranks as Ray actors, on the machines of a cluster."""

import asyncio
from pathlib import Path
from typing import Any

from skyrl_train.errors import WorkerError
from skyrl_train.orchestration.actor_group import ActorGroup
from skyrl_train.orchestration.ray_launcher import RayRanks
from tx.tinker.backends.base import BackendLost
from tx.tinker.backends.torch.group import TrainingRanks
from tx.tinker.backends.torch.training_rank import TrainingRank


class RayTrainingRanks(TrainingRanks):
    """Started and joined; Ray must be connected. Each process has a CPU, and on CUDA a GPU of its own.

    Args:
        base_model_folder: every machine sees it, as it does the folders of `save`, `load` and `restore`.
        device: `cpu` or `cuda`.
        log_folder: rank R writes `training_R.log` there, on its machine.
        timeout_seconds: the deadline of every call and collective.
        training_settings: of `TrainingSettings`.

    Raises:
        ConfigError: a wrong setting, a model that cannot be trained here.
        BackendLost: they did not start.
    """

    def __init__(
        self,
        base_model_folder: str | Path,
        *,
        num_processes: int,
        device: str,
        log_folder: Path,
        timeout_seconds: float,
        **training_settings: Any,
    ):
        self._runner = asyncio.Runner()
        self._group = ActorGroup(
            "training",
            RayRanks(
                "training",
                TrainingRank,
                (str(base_model_folder), training_settings, timeout_seconds),
                num_ranks=num_processes,
                device=device,
                log_folder=log_folder,
            ),
            device=device,
            timeout_seconds=timeout_seconds,
            timeout_setting="backend_config.process_timeout_seconds",
        )
        try:
            self._run(self._group.init_model())
        except BaseException:
            self.close()
            raise

    def call(self, method: str, *args: object, **options: object) -> list[Any]:
        return self._run(self._group.call_all("answer", method, args, options))

    def close(self) -> None:
        self._group.kill()
        self._runner.close()

    def _run(self, calls: Any) -> Any:
        try:
            return self._runner.run(calls)
        except WorkerError as error:
            raise BackendLost(str(error)) from error

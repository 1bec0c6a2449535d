"""Training over several processes: every call runs on all ranks, and rank 0's result is returned."""

import asyncio
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

from skyrl_train.errors import WorkerError
from skyrl_train.orchestration.actor_group import ActorGroup
from skyrl_train.orchestration.launcher import Ranks
from tx.tinker.backends.base import BackendInfo, BackendLost, Failure, TrainingBackend
from tx.tinker.backends.torch.layout import micro_batches
from tx.tinker.backends.torch.training_rank import TrainingRank
from tx.tinker.types import AdamParams, Datum, LoraSpec, PassOutput, TrainingPass


class TrainingRanks:
    """Group of training ranks, each a `TrainingRank` in a separate process.

    Args:
        ranks: already started, and called only by this object.
        device: `cpu` or `cuda`.
        timeout_seconds: of every call.

    Raises:
        ConfigError: a wrong setting, a model that cannot be trained here.
        BackendLost: they did not start.
    """

    def __init__(self, ranks: Ranks, *, device: str, timeout_seconds: float):
        self._runner = asyncio.Runner()
        self._group = ActorGroup(
            "training",
            ranks,
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
        """Call `training.method(*args, **options)` on all ranks. Returns: results or exceptions, in rank order.

        Raises:
            BackendLost: a rank exited or timed out. No later call can succeed.
        """
        return self._run(self._group.call_all(TrainingRank.answer, method, args, options))

    def close(self) -> None:
        """End the processes."""
        self._group.kill()
        self._runner.close()

    def _run(self, calls: Coroutine[Any, Any, Any]) -> Any:
        try:
            return self._runner.run(calls)
        except WorkerError as error:
            raise BackendLost(str(error)) from error


class GroupTraining(TrainingBackend):
    """Training backend over several ranks."""

    def __init__(self, ranks: TrainingRanks):
        self._ranks = ranks
        self._num_ranks = len(ranks.call("info"))
        self._info: BackendInfo = self._call_all("info")

    def info(self) -> BackendInfo:
        return self._info

    def create(self, model_id: str, lora: LoraSpec) -> None:
        self._call_all("create", model_id, lora)

    def forget(self, model_id: str) -> None:
        self._call_all("forget", model_id)

    def micro_batches(self, data: Sequence[Datum]) -> list[list[Datum]]:
        return micro_batches(data, self._info.pass_tokens // self._num_ranks, self._num_ranks)

    def run(self, passes: Sequence[TrainingPass]) -> list[PassOutput | Failure]:
        return self._call_all("run", list(passes))

    def copy_gradient(self, model_id: str) -> None:
        """Keep the copies in the ranks, one per model."""
        self._call_all("copy_gradient", model_id)

    def put_gradient(self, model_id: str, gradient: None) -> None:
        self._call_all("put_gradient", model_id, gradient)

    def optim_step(self, model_id: str, adam: AdamParams) -> dict[str, float]:
        return self._call_all("optim_step", model_id, adam)

    def save(self, model_id: str, folder: Path, *, state: bool) -> None:
        answer = self._ranks.call("save", model_id, folder, state=state)[0]  # only rank 0 writes
        if isinstance(answer, Exception):
            raise answer

    def load(self, model_id: str, folder: Path, *, optimizer: bool) -> None:
        self._call_all("load", model_id, folder, optimizer=optimizer)

    def restore(self, model_id: str, lora: LoraSpec, folder: Path) -> None:
        self._call_all("restore", model_id, lora, folder)

    def close(self) -> None:
        self._ranks.close()

    def _call_all(self, method: str, *args: object, **options: object) -> Any:
        """Return rank 0's result, if all ranks succeeded, or all failed with the same kind of error."""
        answers = self._ranks.call(method, *args, **options)
        failed = {rank: answer for rank, answer in enumerate(answers) if isinstance(answer, Exception)}
        if failed and len(failed) < len(answers):
            rank, error = next(iter(failed.items()))
            raise BackendLost(f"training process {rank} failed to {method} while others succeeded: {error!r}")
        if len({type(error) for error in failed.values()}) > 1:
            raise BackendLost(f"training processes failed to {method} for different reasons: {failed!r}")
        if failed:
            raise failed[0]
        return answers[0]

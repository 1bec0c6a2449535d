"""Interface of the two launchers, which start the workers and engines of a run.

`ray_launcher` starts a process for each, `inline_launcher` creates objects in this process. Both start the same
classes, called by method name.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from skyrl_train.config import SkyRLConfig
from skyrl_train.inference_engines.engine_handle import EngineHandle, MakeEngine

Calls = Sequence[tuple[str, tuple[Any, ...]]]
"""Methods of a worker with their arguments, called one after the other."""

MakeWorker = Callable[..., Any]
"""A worker class, or another callable that makes the worker where it will live."""


class Ranks(Protocol):
    """Interface of the started workers of a group, one per rank."""

    @property
    def num_ranks(self) -> int: ...

    async def call(self, calls: Sequence[Calls], timeout_seconds: float, timeout_setting: str) -> list[list[Any]]:
        """Run each rank's calls in sequence; the first failure ends it.

        Args:
            calls: one sequence for each rank.
            timeout_setting: setting of the deadline, for error messages.

        Returns:
            the results of each rank.

        Raises:
            WorkerError: a rank failed or timed out; the message names it.
        """
        ...

    async def shutdown(self) -> None:
        """Stop the workers, gracefully if they respond."""
        ...

    def kill(self) -> None:
        """Terminate the workers immediately."""
        ...


class Launcher(Protocol):
    """Interface that starts the workers and engines of a run."""

    def start_ranks(
        self,
        name: str,
        make_worker: MakeWorker,
        args: tuple[object, ...],
        *,
        num_ranks: int,
        device: str,
        log_folder: Path,
    ) -> Ranks:
        """Start the workers of a group; their first calls wait until they have started.

        Args:
            name: name of the group: `policy`, `critic` or `ref`.
            make_worker, args: builder of each worker and its arguments, called in the worker's process.
            device: `cpu` or `cuda`.
            log_folder: log folder of the run.
        """
        ...

    def start_engine(self, index: int, make_engine: MakeEngine) -> EngineHandle:
        """Start or restart engine `index`. Returns immediately; calls wait until it has started."""
        ...

    async def check_files(self, cfg: SkyRLConfig, data: Sequence[str], log_folder: Path) -> None:
        """Raise ConfigError unless all machines of the run see the same files.

        Args:
            data: names of datasets.
        """
        ...

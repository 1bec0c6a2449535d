"""Interface of the two launchers, which start the workers and engines of a run.

`ray_launcher` starts a process for each, `inline_launcher` makes objects of this process. What they start is the same
classes, called by the names of their methods.
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
    """The started workers of one group, one a rank."""

    @property
    def num_ranks(self) -> int: ...

    async def call(self, calls: Sequence[Calls], timeout_seconds: float, timeout_setting: str) -> list[list[Any]]:
        """Run each rank's calls in sequence; the first that fails ends it.

        Args:
            calls: one sequence for each rank.
            timeout_setting: setting that the deadline comes from, for the text of an error.

        Returns:
            the answers of each rank.

        Raises:
            WorkerError: a rank failed or did not answer in time; the text names it.
        """
        ...

    async def shutdown(self) -> None:
        """End the workers, by request where they answer."""
        ...

    def kill(self) -> None:
        """End the workers at once."""
        ...


class Launcher(Protocol):
    """Starter of the workers and engines of one run."""

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
            name: of the group: `policy`, `critic`, `ref`.
            make_worker, args: builder of each worker, called where it will live.
            device: `cpu` or `cuda`.
            log_folder: of the run.
        """
        ...

    def start_engine(self, index: int, make_engine: MakeEngine) -> EngineHandle:
        """Start engine `index`, for the first time or again. Returns at once; calls wait until it has started."""
        ...

    async def check_files(self, cfg: SkyRLConfig, data: Sequence[str], log_folder: Path) -> None:
        """Raise ConfigError unless all machines of the run see the same files.

        Args:
            data: names of data sets.
        """
        ...

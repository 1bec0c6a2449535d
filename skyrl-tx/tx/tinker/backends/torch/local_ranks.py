"""Training ranks as processes of this machine."""

import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

from skyrl_train.distributed.process_group import free_port
from skyrl_train.training_backends.base import RankInfo
from skyrl_train.utils.process_log import log_tail
from tx.tinker.backends.base import BackendLost
from tx.tinker.backends.torch.group import TrainingRanks
from tx.tinker.backends.torch.settings import TrainingSettings

GRACE_SECONDS = 1.0
"""A process that lost its peer may end before it: so long is waited for the one that it was about."""
END_SECONDS = 5.0


@dataclass(frozen=True)
class _Process:
    name: str
    process: subprocess.Popen[bytes]
    connection: Connection
    log: Path

    @property
    def is_gone(self) -> bool:
        return self.process.poll() is not None


class LocalTrainingRanks(TrainingRanks):
    """Started and joined. They end with this process, however it ends.

    Args:
        base_model_folder: of a transformers causal LM.
        device: `cpu`, or `cuda`: rank R takes `cuda:R`.
        log_folder: rank R writes `training_R.log` there.
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
        log_folder.mkdir(parents=True, exist_ok=True)
        self._timeout_seconds = timeout_seconds
        self._processes: list[_Process] = []
        port = free_port()
        try:
            for rank in range(num_processes):
                self._processes.append(_start(f"training process {rank}", log_folder / f"training_{rank}.log"))
            for rank, each in enumerate(self._processes):
                info = RankInfo(
                    rank=rank,
                    world_size=num_processes,
                    master_port=port,
                    device=f"cuda:{rank}" if device == "cuda" else device,
                )
                self._send(
                    each, ForkingPickler.dumps((info, str(base_model_folder), training_settings, timeout_seconds))
                )
            for _, answer in self._arriving("start"):
                if isinstance(answer, Exception):  # the others may wait for this one
                    raise answer
        except BaseException:
            self.close()
            raise

    @classmethod
    def of(cls, base_model_folder: str | Path, settings: TrainingSettings, log_folder: Path) -> "LocalTrainingRanks":
        """Start the ranks of the `torch` backend's settings."""
        others = asdict(settings)
        return cls(
            base_model_folder,
            num_processes=others.pop("num_processes"),
            device=others.pop("device"),
            log_folder=log_folder,
            timeout_seconds=others.pop("process_timeout_seconds"),
            **others,
        )

    def call(self, method: str, *args: object, **options: object) -> list[Any]:
        call = ForkingPickler.dumps((method, args, options))
        for each in self._processes:
            self._send(each, call)
        answers = dict(self._arriving(method))
        return [answers[each.name] for each in self._processes]

    def close(self) -> None:
        for each in self._processes:
            each.connection.close()
        deadline = time.monotonic() + END_SECONDS
        for each in self._processes:
            try:
                each.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                each.process.kill()
                each.process.wait()

    def _send(self, each: _Process, call: Any) -> None:
        try:
            each.connection.send_bytes(call)
        except OSError:
            raise self._lost() from None

    def _arriving(self, method: str) -> Iterator[tuple[str, Any]]:
        """Yield the name and result of each rank, in order of arrival."""
        deadline = time.monotonic() + self._timeout_seconds
        pending = {each.connection: each for each in self._processes}
        while pending:
            ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
            if not ready:
                silent = list(pending.values())
                raise BackendLost(
                    f"{_logs(silent)}\n{', '.join(each.name for each in silent)} did not {method} within "
                    f"{self._timeout_seconds:g} s (backend_config.process_timeout_seconds)"
                )
            for connection in ready:
                assert isinstance(connection, Connection)
                try:
                    answer = connection.recv()
                except (EOFError, OSError):
                    raise self._lost() from None
                yield pending.pop(connection).name, answer

    def _lost(self) -> BackendLost:
        """Says which ended, and first how those did that a signal ended: they did not choose to."""
        deadline = time.monotonic() + GRACE_SECONDS
        while not all(each.is_gone for each in self._processes) and time.monotonic() < deadline:
            time.sleep(0.02)
        gone = sorted((each for each in self._processes if each.is_gone), key=lambda each: each.process.returncode)
        if not gone:
            return BackendLost("the connection to a training process was closed")
        how = "; ".join(f"{each.name} {_end(each.process.returncode)}" for each in gone)
        return BackendLost(f"{_logs(gone)}\n{how}")


def _start(name: str, log: Path) -> _Process:
    ours, theirs = Pipe()
    command = [sys.executable, "-m", "tx.tinker.backends.torch.training_rank", str(theirs.fileno())]
    with theirs, log.open("ab") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, pass_fds=[theirs.fileno()]
        )
    return _Process(name, process, ours, log)


def _logs(processes: list[_Process]) -> str:
    return "\n".join(f"--- end of {each.log}:\n{log_tail(each.log)}" for each in processes)


def _end(status: int) -> str:
    return f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"

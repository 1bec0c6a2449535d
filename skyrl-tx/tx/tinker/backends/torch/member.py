"""One of the processes that train together: a plain class, and `python -m tx.tinker.backends.torch.member DESCRIPTOR`,
which obeys what comes through a connection and ends with it."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any

os.environ["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS") or "1"  # before torch

import torch
from loguru import logger
from torch.distributed.tensor import DTensor

from skyrl_train.distributed.process_group import free_port, make_mesh
from skyrl_train.training_backends.base import ParallelInfo, RankInfo, join_process_group
from skyrl_train.utils.nodes import node_address
from skyrl_train.utils.process_log import configure_logging
from tx.tinker.backends.base import Failure
from tx.tinker.backends.torch.peers import Peers
from tx.tinker.backends.torch.training import TorchTraining
from tx.tinker.types import PassOutput, TrainingPass

ORPHANED = 3


class MemberTraining(TorchTraining):
    """What rank 0 of the group says and writes, all of them compute."""

    def __init__(self, base_model_folder: str | Path, peers: Peers, **settings: Any):
        super().__init__(base_model_folder, peers=peers, **settings)
        parameters = [(local_part(each).numel(), each.numel()) for each in self.base_model.parameters()]
        held, whole = map(sum, zip(*parameters, strict=True))
        logger.info("process {} of {} holds {:,} of {:,} numbers of the model", peers.rank, peers.size, held, whole)
        self._kept: dict[str, torch.Tensor | None] = {}

    def run(self, passes: Sequence[TrainingPass]) -> list[PassOutput | Failure]:
        outputs = super().run(passes)
        return outputs if self._peers.rank == 0 else []

    def save(self, model_id: str, folder: Path, *, state: bool) -> None:
        if self._peers.rank == 0:
            super().save(model_id, folder, state=state)

    def copy_gradient(self, model_id: str) -> None:
        """Keeps the copy here, instead of an earlier one."""
        self._kept[model_id] = super().copy_gradient(model_id)

    def put_gradient(self, model_id: str, gradient: None) -> None:
        super().put_gradient(model_id, self._kept.pop(model_id))

    def forget(self, model_id: str) -> None:
        self._kept.pop(model_id, None)
        super().forget(model_id)


def local_part(parameter: torch.Tensor) -> torch.Tensor:
    """What this process holds of it."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


class Member:
    """A rank to be, and then its training.

    Args:
        settings: fields of `TrainingSettings`; the device comes with the rank.
        timeout_seconds: of every collective.
    """

    def __init__(self, base_model_folder: str, settings: dict[str, Any], timeout_seconds: float):
        self._folder, self._settings, self._timeout_seconds = base_model_folder, settings, timeout_seconds
        self._training: MemberTraining | None = None

    def rendezvous_point(self) -> tuple[str, int]:
        """An address and free port of this process's machine where its group can meet."""
        return node_address(), free_port()

    def init_model(self, info: RankInfo) -> ParallelInfo:
        """Joins the group and loads the model. A collective.

        Raises:
            ConfigError: a wrong setting, a model that cannot be trained here.
        """
        join_process_group(info, self._timeout_seconds)
        peers = Peers(info.rank, info.world_size, make_mesh(torch.device(info.device)))
        self._training = MemberTraining(self._folder, peers, **{**self._settings, "device": info.device})
        return ParallelInfo(rank=info.rank, world_size=info.world_size)

    def answer(self, method: str, args: Sequence[Any], options: dict[str, Any]) -> Any:
        """What the training's method returns or raises."""
        return _outcome(partial(getattr(self._training, method), *args, **options))


def _outcome(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:
        return error.with_traceback(None)


def main() -> None:
    for each in (signal.SIGINT, signal.SIGTERM):  # to the whole process group: who started this decides
        signal.signal(each, signal.SIG_IGN)
    connection, orders = Connection(int(sys.argv[1])), SimpleQueue[Any]()
    threading.Thread(target=_read, args=(connection, orders), daemon=True).start()
    configure_logging()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    info, *args = orders.get()
    member = Member(*args)
    connection.send(_outcome(partial(member.init_model, info)))
    while True:
        connection.send(member.answer(*orders.get()))


def _read(connection: Connection, orders: "SimpleQueue[Any]") -> None:
    try:
        while True:
            orders.put(connection.recv())
    except (EOFError, OSError):
        os._exit(ORPHANED)  # even in the middle of a pass


if __name__ == "__main__":
    try:
        main()
    except BaseException:
        import traceback

        traceback.print_exc()
    os._exit(1)  # at once, whatever threads of collectives are still at work

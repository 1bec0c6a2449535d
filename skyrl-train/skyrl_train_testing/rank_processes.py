"""Ranks of a worker in processes that start in a fraction of a second: `Ranks` of an actor group for tests.

    group = ActorGroup("policy", ForkedRanks("policy", MyWorker, (cfg,), num_ranks=2, log_folder=folder), ...)

A server process imports torch, transformers and the workers once; each rank is a fork of it. The ranks are real: they
have an interpreter each and meet in a process group, without Ray.
"""

import functools
import multiprocessing
import os
from multiprocessing.connection import Connection
from typing import Any

import transformers.models.qwen3.modeling_qwen3  # noqa: F401  the tiny models of tests; a server imports it once
from ray import cloudpickle

from skyrl_gym.waits import FOLDER
from skyrl_train.orchestration.process_ranks import ProcessRanks, RankProcess, serve
from skyrl_train.training_backends.fsdp2 import backend  # noqa: F401  for the server, too
from skyrl_train.utils.process_log import capture_output
from skyrl_train.workers import policy_worker  # noqa: F401


@functools.cache
def _start_server() -> Any:
    """The fork server of this process, which ends with it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


class ForkedRanks(ProcessRanks):
    """Ranks on a CPU. A worker class that a process cannot import is sent by value if its module was registered with
    `ray.cloudpickle.register_pickle_by_value`."""

    dumps = staticmethod(cloudpickle.dumps)  # pyright: ignore[reportPrivateImportUsage]

    def _start(self, name: str, log_file: str, environment: dict[str, str]) -> tuple[RankProcess, Connection]:
        ours, theirs = _start_server().Pipe()
        with theirs:
            process = _start_server().Process(
                target=_serve, args=(theirs, name, log_file, os.environ.get(FOLDER)), daemon=True
            )
            process.start()
        return _Forked(process), ours


class _Forked:
    """A process of the fork server with the methods of one of `subprocess`."""

    def __init__(self, process: Any):
        self._process, self.pid, self.kill = process, process.pid, process.kill

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self) -> int:
        self._process.join()
        return self._process.exitcode


def _serve(pipe: Connection, name: str, log_file: str, waits_folder: str | None) -> None:
    capture_output(log_file)
    if waits_folder is not None:  # the server keeps the environment of its start
        os.environ[FOLDER] = waits_folder
    serve(pipe, name, log_file, ForkedRanks.dumps)

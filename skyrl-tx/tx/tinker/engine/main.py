"""The engine process: `python -m tx.tinker.engine.main --config JSON --channel ADDRESS --parent PID`.

With `--channel -` it imports at low priority, reports, and becomes an engine once stdin provides an address.

Three threads that matter: the event loop reads the channel and samples, one thread trains, one belongs to the native
engine. If one of them ends, the process exits, and the API starts a new one: the database is authoritative.
"""

import argparse
import asyncio
import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

os.environ["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS") or "1"  # before torch: exact numbers rest on it

from loguru import logger

from skyrl_gym.waits import report_as
from tx.errors import ConfigError
from tx.tinker.backends.base import Backend, BackendInfo, BackendLost
from tx.tinker.backends.build import build_backend, import_backend
from tx.tinker.base_model import read_base_model
from tx.tinker.commands import Sample
from tx.tinker.config import EngineConfig
from tx.tinker.engine.channel import EngineChannel
from tx.tinker.engine.messages import Cancel, EngineStats, Ready
from tx.tinker.engine.models import Models
from tx.tinker.engine.process import (
    FROM_STDIN,
    ORPHANED,
    STANDING_BY,
    WRONG_SETTINGS,
    call_when_parent_exits,
    run_at_low_priority,
    set_process_name,
)
from tx.tinker.engine.sampling import Sampling
from tx.tinker.engine.trainer import Trainer
from tx.tinker.storage.folders import Folders
from tx.tinker.types import ENGINE

STATS_SECONDS = 1.0
FINISH_SECONDS = 4.0
"""Time that the running pass has when the engine is asked to stop."""
SNAPSHOT_SECONDS = 2.0
"""Time for writing snapshots of models at that point."""
CLOSE_SECONDS = 3.0
"""Time for closing the sampling backend at that point; the rest ends with this process."""


class Engine:
    """
    Args:
        config: settings
        address: of the channel to the API process
    """

    def __init__(self, config: EngineConfig, address: str):
        self._config, self._address = config, address
        # The event loop waits for `_stop`; the training thread cannot await, so it has an event of its own.
        self._stop = asyncio.Event()
        self._stopping = threading.Event()
        self._training_thread = ThreadPoolExecutor(1, thread_name_prefix="training")

    async def serve(self) -> int:
        """Serve until SIGTERM or the failure of a part. Returns: the exit status."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._stop.set)
        channel = EngineChannel(self._address)
        stopped = asyncio.create_task(self._stop.wait())
        building = loop.run_in_executor(self._training_thread, self._build)
        await asyncio.wait((building, stopped), return_when=asyncio.FIRST_COMPLETED)
        if stopped.done():
            return 0
        backend, info = building.result()
        loop.add_signal_handler(signal.SIGTERM, self._stop.set)  # again: Ray has put its own in the place of it
        await backend.sampling.start()
        checkpoints, snapshots = self._open_folders()
        models = Models(backend.training, snapshots, info.max_resident_models)
        trainer = Trainer(backend.training, models, checkpoints, channel.send, pass_tokens=info.pass_tokens)
        sampling = Sampling(backend.sampling, checkpoints, channel.send)
        channel.send(Ready(info=info))
        logger.info("ready: {}", info)
        training = loop.run_in_executor(self._training_thread, self._train, trainer)
        reading = asyncio.create_task(self._read(channel, trainer, sampling))
        stats = asyncio.create_task(_send_stats(channel, backend, models, trainer, sampling))
        watching = asyncio.create_task(sampling.watch())
        parts = (training, reading, stats, watching, sampling.lost, stopped)
        ended, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
        reading.cancel()  # later messages are for the next engine
        self._stopping.set()
        trainer.inbox.put(_wake_up)
        await asyncio.wait((training,), timeout=FINISH_SECONDS + SNAPSHOT_SECONDS)
        with suppress(TimeoutError):
            await asyncio.wait_for(sampling.close(), CLOSE_SECONDS)
        await channel.close()
        if stopped in ended:
            return 0
        error = next(iter(ended)).exception()
        traceback = None if isinstance(error, BackendLost) else error
        logger.opt(exception=traceback).critical("a task of the engine exited: {}", error)
        return 1

    def _build(self) -> tuple[Backend, BackendInfo]:
        backend = build_backend(self._config, read_base_model(self._config.base_model))
        return backend, backend.training.info()

    def _open_folders(self) -> tuple[Folders, Folders]:
        state = self._config.state_folder
        checkpoints = Folders(self._config.checkpoints_base, state / "cache")
        return checkpoints, Folders(str(state / "snapshots"), state / "cache")

    def _train(self, trainer: Trainer) -> None:
        while not self._stopping.is_set():
            trainer.step(STATS_SECONDS)
        trainer.close(SNAPSHOT_SECONDS)

    async def _read(self, channel: EngineChannel, trainer: Trainer, sampling: Sampling) -> None:
        async for message in channel:
            match message:
                case Sample():
                    sampling.begin(message)
                case Cancel():
                    sampling.cancel(message.request_ids)
                case _:
                    trainer.inbox.put(message)


async def _send_stats(
    channel: EngineChannel, backend: Backend, models: Models, trainer: Trainer, sampling: Sampling
) -> None:
    while True:
        channel.send(
            EngineStats(
                queued_commands=trainer.num_commands(),
                running_samples=backend.sampling.num_running(),
                resident_models=models.num_in_memory(),
                train_tokens=dict(trainer.train_tokens),
                sample_tokens=dict(sampling.tokens),
                busy_seconds=trainer.busy_seconds,
                turn_seconds=trainer.turn_seconds(),
                step_seconds=sampling.step_seconds(),
            )
        )
        await asyncio.sleep(STATS_SECONDS)


def _wake_up() -> None:
    """Do nothing: an item that wakes the training thread."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tx.tinker.engine.main")
    parser.add_argument("--config", required=True, help="EngineConfig as JSON")
    parser.add_argument("--channel", required=True, help="address of the API process's socket; - for stdin")
    parser.add_argument("--parent", type=int, default=os.getppid(), help="process whose exit stops this one")
    options = parser.parse_args(arguments)
    _log_to_stderr()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is for the API, which then sends SIGTERM
    call_when_parent_exits(options.parent, partial(os._exit, ORPHANED))
    config, address = EngineConfig.model_validate_json(options.config), options.channel
    if address == FROM_STDIN and not (address := _wait_for_address(config)):
        return ORPHANED
    set_process_name("tx-engine")
    report_as(ENGINE)
    try:
        return asyncio.run(Engine(config, address).serve())
    except ConfigError as error:
        logger.critical("ConfigError: {}", error)
        return WRONG_SETTINGS


def _wait_for_address(config: EngineConfig) -> str:
    """Wait for the channel's address on stdin. Returns: "" at its end."""
    set_process_name("tx-standby")
    run_at_low_priority(partial(import_backend, config))
    print(STANDING_BY, flush=True)
    return sys.stdin.readline().strip()


def _log_to_stderr() -> None:
    logger.remove()
    logger.add(sys.stderr, format="{time:HH:mm:ss} | {level: <8} | {message}", level="INFO", diagnose=False)
    logging.basicConfig(format="%(asctime)s | %(levelname)-8s | %(message)s", datefmt="%H:%M:%S", level=logging.WARNING)


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # whatever threads are still at work

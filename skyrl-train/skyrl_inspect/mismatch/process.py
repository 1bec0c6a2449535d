"""Queries of an engine in a separate process, so that all memory is free for the next one.

Independent of engines: the factory is an argument and must be picklable.
"""

import asyncio
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

from skyrl_gym.waits import report_as, waiting
from skyrl_inspect.mismatch.answers import EngineAnswers, Questions, send_questions
from skyrl_train.errors import SkyRLError, WorkerError
from skyrl_train.inference_engines.base import InferenceEngineInterface
from skyrl_train.utils.explanations import write_explanation
from skyrl_train.utils.process_log import capture_output, read_log_tail

MakeEngine = Callable[[], InferenceEngineInterface]

ENGINE = "engine"
"""Role of the process, in records of waits."""

_END_SECONDS = 30.0
"""Time in which a process that has answered must end by itself, before it is killed."""


def run_in_process(
    make_engine: MakeEngine, questions: Questions, log_path: str | Path, timeout_seconds: float
) -> EngineAnswers:
    """Start the engine in a process, send all requests, and end it with all processes that it started.

    Args:
        log_path: where the process writes.
        timeout_seconds: from the start of the process to its last answer.

    Raises:
        WorkerError: the engine did not start, died, or gave no answer in time. The text has the end of its log, or the
            engine's own error.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_run, args=(theirs, make_engine, questions, str(log_path)))
    process.start()
    assert process.pid is not None
    theirs.close()
    try:
        with waiting("an engine's completions", on=ENGINE, deadline=timeout_seconds):
            is_late = not ours.poll(timeout_seconds)
        if is_late:
            late = f"no response within {timeout_seconds:g} seconds"
            raise WorkerError(f"{late}{write_explanation(late)}; the end of its log:\n{read_log_tail(log_path)}")
        found: EngineAnswers | str = ours.recv()
        process.join(_END_SECONDS)
    except EOFError:
        process.join(_END_SECONDS)
        raise WorkerError(
            f"the process crashed (exit code {process.exitcode}); the end of its log:\n{read_log_tail(log_path)}"
        ) from None
    finally:
        _stop_group(process.pid)
        process.kill()
        process.join()
        ours.close()
    if isinstance(found, str):
        raise WorkerError(found)
    return found


def _run(connection: Connection, make_engine: MakeEngine, questions: Questions, log_path: str) -> None:
    os.setsid()  # a group of its own, so that what the engine starts can be ended with it
    capture_output(log_path)
    report_as(ENGINE, log=log_path)
    threading.Thread(target=_stop_with_parent, args=(connection,), daemon=True).start()
    try:
        with waiting("the engine's start"):
            engine = make_engine()
        with waiting("the engine's completions"):
            found: EngineAnswers | str = asyncio.run(_run_and_exit(engine, questions))
    except (SkyRLError, ValueError, ImportError, RuntimeError, OSError, NotImplementedError) as error:
        found = f"{type(error).__name__}: {error}"
    connection.send(found)


async def _run_and_exit(engine: InferenceEngineInterface, questions: Questions) -> EngineAnswers:
    try:
        return await send_questions(engine, questions)
    finally:
        await engine.teardown()


def _stop_with_parent(connection: Connection) -> None:
    """The parent never sends: what can be read is the end of it."""
    try:
        connection.recv_bytes()
    except (EOFError, OSError):
        _stop_group(os.getpid())


def _stop_group(leader: int) -> None:
    """Kill every process of the group that this process led, whether or not it is still there itself."""
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)

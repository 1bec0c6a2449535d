"""Waiting for Ray actors with deadlines. A crashed process becomes an error with its name and the end of its log."""

import asyncio
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray
import ray.cloudpickle as cloudpickle
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from skyrl_train.errors import SkyRLError, WorkerError, WorkerMemoryError
from skyrl_train.utils.call_errors import KILLED_HINT, build_failure, get_end_of_log, is_out_of_memory, timed_out
from skyrl_train.utils.tracebacks import attach_raise_location, described, format_raise_location, log_traceback

EXIT_SECONDS = 10.0
"""Timeout of processes that are asked to exit."""

PEER_GRACE_SECONDS = 3.0
"""Grace period after a rank's error: a rank whose peer crashes raises as well, often first, so peers may reveal the
actual cause.
"""

_POLL_SECONDS = 0.5


@dataclass(frozen=True)
class Call:
    """A pending call: its future result, the called process and its log."""

    reference: Any
    process: str
    log_file: str

    def failure(self, error: RayError, remark: str = "") -> Exception:
        """Convert `error` to one for the user. Framework errors are unchanged; process failures name the process.

        Args:
            remark: a line about the circumstances, for other errors.
        """
        if isinstance(error, RayTaskError):
            return build_failure(error.cause, self.process, self.log_file, remark)
        if isinstance(error, RayActorError):
            how = (
                f"could not start: {_get_last_line(error)}"
                if error.actor_init_failed
                else f"died: {_get_first_line(error)}"
            )
            if "SIGKILL" in str(error):  # Ray lists it among the causes of an unexplained death
                return WorkerMemoryError(f"{self.process} {how}; {KILLED_HINT}\n{self.log()}")
            return WorkerError(f"{self.process} {how}\n{self.log()}")
        kind = WorkerMemoryError if is_out_of_memory(error) else WorkerError
        return kind(f"{self.process} did not respond: {type(error).__name__}: {_get_first_line(error)}\n{self.log()}")

    def timed_out(self, timeout_seconds: float, what_to_set: str) -> WorkerError:
        """Build the error for a call that timed out."""
        return timed_out([(self.process, self.log_file)], timeout_seconds, what_to_set)

    def log(self) -> str:
        """Return the end of the process's log, with a heading."""
        return get_end_of_log(self.log_file)


def wait_for_all(
    calls: Sequence[Call],
    timeout_seconds: float,
    what_to_set: str = "trainer.worker_timeout_seconds",
    given_up: threading.Event | None = None,
) -> list[object]:
    """Return the results in order. The first failure ends the wait (almost) at once, even if other calls never return.

    Args:
        what_to_set: the setting of the timeout.
        given_up: set by a caller in another thread that no longer needs the results.

    Raises:
        WorkerError: a process crashed, raised an error outside of the framework, or timed out.
    """
    deadline = time.monotonic() + timeout_seconds
    by_reference = {call.reference: call for call in calls}
    answers: dict[Any, Any] = {}
    pending = list(by_reference)
    while pending:
        remaining = max(0.0, deadline - time.monotonic())
        done, pending = ray.wait(pending, num_returns=1, timeout=min(remaining, _POLL_SECONDS))
        if given_up is not None and given_up.is_set():
            raise WorkerError("the wait was abandoned")
        if not done and not remaining:
            silent = [by_reference[reference] for reference in pending]
            raise timed_out([(call.process, call.log_file) for call in silent], timeout_seconds, what_to_set)
        for reference in done:
            call = by_reference[reference]
            try:
                answers[reference] = ray.get(reference, timeout=max(1.0, remaining))
            except GetTimeoutError:
                raise call.timed_out(timeout_seconds, what_to_set) from None
            except RayError as error:
                raise _select_failure(call, error, [by_reference[other] for other in pending]) from error
    return [answers[call.reference] for call in calls]


async def gather_results(
    calls: Sequence[Call], timeout_seconds: float, what_to_set: str = "trainer.worker_timeout_seconds"
) -> list[Any]:
    """Await `wait_for_all` without blocking the event loop. On cancellation (such as Ctrl-C), its thread ends
    as well.
    """
    given_up = threading.Event()
    try:
        return await asyncio.to_thread(wait_for_all, calls, timeout_seconds, what_to_set, given_up)
    finally:
        given_up.set()


async def wait_for_result(call: Call, timeout_seconds: float, what_to_set: str) -> Any:
    """Await one result without a thread: for the many small calls to engines."""
    try:
        return await asyncio.wait_for(_to_coroutine(call.reference), timeout_seconds)
    except TimeoutError:
        raise call.timed_out(timeout_seconds, what_to_set) from None
    except RayError as error:
        raise call.failure(error) from error


async def _to_coroutine(reference: Any) -> object:
    return await reference


def stop_actors(actors: Sequence[Any], timeout_seconds: float = EXIT_SECONDS) -> None:
    """Ask actors to exit after their current calls, wait, and kill the ones that time out. (Ray reports a killed actor
    on the console as a crash.)"""
    exits = {actor.__ray_terminate__.remote(): actor for actor in actors}
    _, late = ray.wait(list(exits), num_returns=len(exits), timeout=timeout_seconds) if exits else ([], [])
    for reference in late:
        ray.kill(exits[reference])


@contextmanager
def prepare_errors_for_caller() -> Iterator[None]:
    """Prepare errors inside an actor for its caller: log the full traceback in this process, attach the user's frames
    to the exception, and replace an exception that cannot be pickled by text."""
    try:
        yield
    except Exception as error:  # user code may raise anything: the caller gets it
        log_traceback(error)
        attach_raise_location(error)
        if _is_picklable(error):
            raise
        substitute = ValueError if isinstance(error, ValueError) else WorkerError
        raise substitute(f"raised {described(error)}") from None


def _is_picklable(error: Exception) -> bool:
    try:
        arrived = cloudpickle.loads(cloudpickle.dumps(error))  # pyright: ignore[reportPrivateImportUsage]
    except Exception:  # a user's exception may fail in any way here
        return False
    return isinstance(arrived, type(error)) and format_raise_location(arrived) == format_raise_location(error)


def _select_failure(failed: Call, error: RayError, others: Sequence[Call]) -> Exception:
    """Select the failure to report: a crashed peer's, else the first one."""
    deliberate = isinstance(error, RayTaskError) and isinstance(error.cause, (SkyRLError, ValueError))
    if deliberate or isinstance(error, RayActorError):
        return failed.failure(error)
    deadline = time.monotonic() + PEER_GRACE_SECONDS
    pending = {call.reference: call for call in others}
    while pending and (remaining := deadline - time.monotonic()) > 0:
        done, _ = ray.wait(list(pending), num_returns=1, timeout=remaining)
        for reference in done:
            call = pending.pop(reference)
            try:
                ray.get(reference, timeout=max(1.0, remaining))
            except RayActorError as death:
                return call.failure(death)
            except RayError:
                continue  # another one that lost its peer: the first represents all
    silent = _format_names(pending.values())
    return failed.failure(error, f"(no response yet from {silent})\n" if silent else "")


def _format_names(calls: Iterable[Call]) -> str:
    return ", ".join(dict.fromkeys(call.process for call in calls))


def _get_lines(error: BaseException) -> list[str]:
    return [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]


def _get_first_line(error: BaseException) -> str:
    return _get_lines(error)[0]


def _get_last_line(error: BaseException) -> str:
    return _get_lines(error)[-1]

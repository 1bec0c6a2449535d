"""Waiting for Ray actors: always with a deadline, and a dead process becomes a named error with the end of its log."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from skyrl_train.errors import SkyRLError, WorkerError
from skyrl_train.utils.process_log import log_tail


@dataclass(frozen=True)
class Call:
    """A call under way: its answer to be, whose it is, and where that process logs."""

    reference: Any
    process: str
    log_file: str

    def failure(self, error: BaseException) -> Exception:
        """What `error` means to a person. Errors of ours come through as they are."""
        if isinstance(error, RayTaskError):
            cause = error.cause
            if isinstance(cause, (SkyRLError, ValueError)):
                return cause
            return WorkerError(f"{self.process} raised {type(cause).__name__}: {cause}\n{self._log()}")
        if isinstance(error, RayActorError):
            return WorkerError(f"{self.process} died: {_first_line(error)}\n{self._log()}")
        return WorkerError(
            f"{self.process} did not answer: {type(error).__name__}: {_first_line(error)}\n{self._log()}"
        )

    def timed_out(self, timeout_seconds: float, what_to_set: str) -> WorkerError:
        return WorkerError(
            f"{self.process} did not answer within {timeout_seconds:g} s ({what_to_set}); "
            f"is it stuck, or waiting for a peer that died?\n{self._log()}"
        )

    def _log(self) -> str:
        return f"--- end of {self.log_file}:\n{log_tail(self.log_file)}"


def wait_for_all(
    calls: Sequence[Call], timeout_seconds: float, what_to_set: str = "trainer.worker_timeout_seconds"
) -> list[Any]:
    """The answers, in order. The first failure ends the wait at once, though others may never answer.

    Raises:
        WorkerError: a process died, raised something that is not an error of ours, or the deadline passed.
    """
    deadline = time.monotonic() + timeout_seconds
    by_reference = {call.reference: call for call in calls}
    answers: dict[Any, Any] = {}
    pending = list(by_reference)
    while pending:
        remaining = deadline - time.monotonic()
        done, pending = ray.wait(pending, num_returns=1, timeout=max(0.0, remaining))
        if not done:
            raise by_reference[pending[0]].timed_out(timeout_seconds, what_to_set)
        for reference in done:
            try:
                answers[reference] = ray.get(reference, timeout=max(1.0, remaining))
            except GetTimeoutError:
                raise by_reference[reference].timed_out(timeout_seconds, what_to_set) from None
            except RayError as error:
                raise by_reference[reference].failure(error) from error
    return [answers[call.reference] for call in calls]


async def answers_of(calls: Sequence[Call], timeout_seconds: float, what_to_set: str = "") -> list[Any]:
    """`wait_for_all` that leaves the event loop free."""
    return await asyncio.to_thread(
        wait_for_all, calls, timeout_seconds, what_to_set or "trainer.worker_timeout_seconds"
    )


async def answer_of(call: Call, timeout_seconds: float, what_to_set: str) -> Any:
    """One answer, without a thread: for the many small calls to engines."""
    try:
        return await asyncio.wait_for(_as_coroutine(call.reference), timeout_seconds)
    except TimeoutError:
        raise call.timed_out(timeout_seconds, what_to_set) from None
    except RayError as error:
        raise call.failure(error) from error


async def _as_coroutine(reference: Any) -> Any:
    return await reference


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__

"""Mailbox of calls that one thread runs for others between its other work."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from skyrl_train.errors import WorkerError

T = TypeVar("T")


class Mailbox:
    """
    Args:
        owner: name of the thread's owner in errors.
    """

    def __init__(self, owner: str):
        self._owner = owner
        self._changed = threading.Condition()
        self._calls: list[tuple[Callable[[], Any], Future[Any]]] = []
        self._closing = False
        self._failure: WorkerError | None = None

    # From any thread.

    def post(self, call: Callable[[], T]) -> "Future[T]":
        """Queue `call` for the thread and return its future.

        Raises:
            WorkerError: the thread has stopped or is stopping.
        """
        done: Future[T] = Future()
        with self._changed:
            if self._failure is not None:
                raise WorkerError(str(self._failure)) from self._failure
            if self._closing:
                raise WorkerError(f"{self._owner} is closed")
            self._calls.append((call, done))
            self._changed.notify()
        return done

    def close(self) -> None:
        """Ask the thread to stop."""
        with self._changed:
            self._closing = True
            self._changed.notify()

    # From the thread.

    def run_calls(self, has_work: Callable[[], bool], timeout: float | None) -> bool:
        """Run queued calls, waiting for one if the thread has no other work. False if it should stop."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing or self._calls or has_work(), timeout)
            if self._closing:
                return False
            calls, self._calls = self._calls, []
        for call, done in calls:
            if done.set_running_or_notify_cancel():
                _run_call(call, done)
        return True

    def fail(self, failure: WorkerError) -> list[Future[Any]]:
        """Accept no more calls; return the pending ones, which will not run."""
        with self._changed:
            self._failure = failure
            calls, self._calls = self._calls, []
        return [done for _, done in calls if done.set_running_or_notify_cancel()]


def _run_call(call: Callable[[], object], done: Future[object]) -> None:
    """Run a call. Its error is raised in the caller and does not end the thread."""
    try:
        result = call()
    except Exception as error:  # any error must be reported to the caller
        done.set_exception(error)
    else:
        done.set_result(result)

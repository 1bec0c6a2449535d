"""Runs disk and network jobs in helper threads; the training thread collects the outcomes."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from skyrl_gym.waits import waiting
from tx.tinker.commands import Job


class Helpers:
    """
    Args:
        give_back: called in a helper's thread with what the training thread is to call
    """

    def __init__(self, give_back: Callable[[Callable[[], None]], None], threads: int = 4):
        self._give_back = give_back
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="helper")

    def start(self, job: Job, then: Callable[[Future[object]], None]) -> None:
        """Run `job` in a helper thread, then `then` with its outcome in the training thread."""
        self._pool.submit(_run_job, job).add_done_callback(lambda outcome: self._give_back(lambda: then(outcome)))

    def close(self) -> None:
        """Drop jobs that have not started, without waiting for running ones."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _run_job(job: Job) -> object:
    with waiting("to read or write a checkpoint or snapshot"):
        return job()

"""Errors of calls to workers or engines, raised in the caller: they name the called process."""

from collections.abc import Sequence
from contextlib import AbstractContextManager

from skyrl_gym.waits import waiting
from skyrl_train.errors import SkyRLError, WeightSyncError, WorkerError, WorkerMemoryError
from skyrl_train.utils.explanations import write_explanation
from skyrl_train.utils.process_log import read_log_tail
from skyrl_train.utils.tracebacks import format_raise_location

_MOST_LOGS_SHOWN = 3


def build_failure(cause: BaseException, process: str, log_file: str, remark: str = "") -> Exception:
    """Build the error to raise for `cause`, which a call to `process` raised. Framework errors are returned unchanged.

    Args:
        process: a worker or engine, such as `policy worker 0`.
        log_file: file with the full traceback.
        remark: a line about the circumstances, for other errors.
    """
    if isinstance(cause, (WorkerError, WeightSyncError)):
        return type(cause)(f"{process}: {cause}")
    if isinstance(cause, (SkyRLError, ValueError)):
        cause.add_note(f"raised in {process}; full traceback: {log_file}")
        return cause
    kind = WorkerMemoryError if is_out_of_memory(cause) else WorkerError
    raised = f"{process} raised {type(cause).__name__}: {cause}\n{remark}"
    if where := format_raise_location(cause):
        return kind(f"{raised}{where}\nfull traceback: {log_file}")
    return kind(raised + get_end_of_log(log_file))


KILLED_HINT = "the kernel kills processes this way when memory is exhausted (see dmesg)"


def is_out_of_memory(cause: BaseException) -> bool:
    """Return whether an exception means out of memory: Python's, torch's and Ray's, and torch's on a CPU."""
    # By name: torch need not be imported, and Ray's means that its monitor killed the process.
    is_named = isinstance(cause, MemoryError) or type(cause).__name__ == "OutOfMemoryError"
    return is_named or (isinstance(cause, RuntimeError) and "DefaultCPUAllocator" in str(cause))


def timed_out(processes: list[tuple[str, str]], timeout_seconds: float, setting: str) -> WorkerError:
    """Build the error for calls that timed out, and write an explanation of the hang to a file.

    Args:
        processes: names and log files of the processes that did not respond.
        setting: setting of the timeout.
    """
    silent = dict(processes)
    logs = "\n".join(get_end_of_log(log_file) for log_file in list(silent.values())[:_MOST_LOGS_SHOWN])
    late = f"{', '.join(silent)} did not answer within {timeout_seconds:g} s ({setting})"
    why = write_explanation(late) or "; they may be stuck, or waiting for a stuck peer"
    return WorkerError(f"{late}{why}\n{logs}")


def record_rank_wait(
    name: str, calls: Sequence[Sequence[tuple[str, object]]], timeout_seconds: float
) -> AbstractContextManager[None]:
    """Record a wait for the ranks of a group.

    Args:
        calls: methods of each rank, with their arguments.
    """
    methods = ", ".join(dict.fromkeys(method for method, _ in calls[0]))
    ranks = ", ".join(f"{name} worker {rank}" for rank in range(len(calls)))
    return waiting(methods, on=ranks, deadline=timeout_seconds)


def get_end_of_log(log_file: str) -> str:
    """Return the last lines of a process's log, with a heading."""
    return f"--- end of {log_file}:\n{read_log_tail(log_file)}"

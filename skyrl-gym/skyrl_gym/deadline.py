"""Calls of code that is not ours, which may raise anything or never come back. Knows no environments."""

import contextvars
import threading
from collections.abc import Callable
from typing import TypeVar

from skyrl_gym.error import InfraError

T = TypeVar("T")


class DeadlineExceeded(TimeoutError):
    """A call did not come back in time. It may still be running, in a thread that nobody waits for."""


def outcome_of(function: Callable[..., T], /, *args: object, **kwargs: object) -> T | Exception:
    """Call a user's, a model's or a library's code. Returns its result, or the exception that it raised.

    Raises:
        InfraError: a service that the code needs does not work.
    """
    try:
        return function(*args, **kwargs)
    except InfraError:
        raise
    except Exception as error:  # such code may raise anything, and each caller reports it in its own words
        return error


def call_before_deadline(seconds: float | None, function: Callable[..., T], *args: object) -> T:
    """Return the result of `function(*args)`, called in a thread of its own; what it raises is raised here.

    The thread is a daemon: one that never returns does not keep the process from ending.

    Args:
        seconds: how long to wait; None waits for ever.

    Raises:
        DeadlineExceeded: it took longer.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    context = contextvars.copy_context()

    def work() -> None:
        try:
            results.append(context.run(function, *args))
        except BaseException as error:  # carried to the caller, whatever it is
            errors.append(error)

    thread = threading.Thread(target=work, name="skyrl-gym-call", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise DeadlineExceeded(f"did not return within {seconds:g} s")
    return results[0]

"""Calls of code that is not ours, which may raise anything or never come back. Independent of environments."""

import contextvars
import threading
from collections.abc import Callable
from typing import TypeVar

from skyrl_gym.error import InfraError

T = TypeVar("T")


class DeadlineExceeded(TimeoutError):
    """A call did not return in time. It may still be running in a daemon thread."""


def outcome_of(function: Callable[..., T], /, *args: object, **kwargs: object) -> T | Exception:
    """Call untrusted code (of a user, a model or a library). Returns its result, or the exception that it raised.

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
    """Call `function(*args)` in a separate thread. Returns its result, or raises its exception.

    The thread is a daemon, so a call that never returns does not block process exit.

    Args:
        seconds: timeout; None waits indefinitely.

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

"""Exceptions as text: frames of user code for messages, the full traceback for the process log."""

import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from loguru import logger

LOG_FILE_ONLY = "log_file_only"
"""Key in the `extra` of a log record that is written to the process's log file only, not the console."""

_OUR_PACKAGES = frozenset({"skyrl_train", "skyrl_gym", "skyrl_agent", "tx"})
_STANDARD_LIBRARY = sysconfig.get_path("stdlib")
_MOST_FRAMES = 4
_KEPT = "_where_raised"

_logged_places: set[str] = set()


def format_raise_location(error: BaseException, at_most: int = _MOST_FRAMES) -> str:
    """Format the frames of `error` in user code, outermost first, one per line: `FILE:LINE in FUNCTION: CODE`. Without
    user frames, the frame that raised it.

    An exception from another process has no frames: uses the ones attached by `attach_raise_location`.
    """
    if kept := error.__dict__.get(_KEPT):
        return kept
    chain = list(_iter_causes(error))
    frames = next((frames for link in chain if (frames := [f for f in _get_frames(link) if _is_users(f[0])])), None)
    if frames is None:
        frames = next((frames[-1:] for link in chain if (frames := _get_frames(link))), [])
    return "\n".join(_format_frame(frame, line_number) for frame, line_number in frames[-at_most:])


def attach_raise_location(error: BaseException) -> None:
    """Attach its formatted location to an exception, which loses its frames when sent to another process."""
    error.__dict__[_KEPT] = format_raise_location(error)


def format_last_location(error: BaseException) -> str:
    """Return the innermost line of `format_raise_location` in brackets, for single-line messages; empty without a
    traceback.
    """
    place = format_raise_location(error, at_most=1)
    return f" ({place})" if place else ""


def described(error: BaseException) -> str:
    """Describe an exception for the user: type, message, raise location and notes."""
    lines = [f"{type(error).__name__}: {error}", format_raise_location(error), *getattr(error, "__notes__", [])]
    return "\n".join(filter(None, lines))


def log_traceback(error: BaseException) -> None:
    """Write the full traceback to this process's log file; only once for exceptions of one type from the same lines,
    since a thousand rollouts may fail for one reason."""
    place = f"{type(error).__name__} {format_raise_location(error)}"
    if place in _logged_places:
        return
    _logged_places.add(place)
    text = "".join(traceback.format_exception(error))
    logger.bind(**{LOG_FILE_ONLY: True}).error("{}", text.rstrip())


def _iter_causes(error: BaseException) -> Iterator[BaseException]:
    """Yield `error` and its causes; for a group, its first member."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        if isinstance(link, BaseExceptionGroup):
            link = link.exceptions[0]
        else:
            link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def _get_frames(error: BaseException) -> list[tuple[FrameType, int]]:
    return list(traceback.walk_tb(error.__traceback__))


def _is_users(frame: FrameType) -> bool:
    """Return whether the code is user code: outside of this project, installed packages and Python."""
    module = frame.f_globals.get("__name__", "")
    if module.partition(".")[0] in _OUR_PACKAGES:
        return False
    file = frame.f_code.co_filename
    if file.startswith("<"):  # a notebook cell or `python -c`; else generated or frozen code
        return module == "__main__"
    return not file.startswith(_STANDARD_LIBRARY) and not {"site-packages", "dist-packages"} & set(Path(file).parts)


def _format_frame(frame: FrameType, line_number: int) -> str:
    code = frame.f_code
    [summary] = traceback.StackSummary.extract([(frame, line_number)])
    place = f"{code.co_filename}:{line_number} in {code.co_name}"
    return f"{place}: {summary.line}" if summary.line else place

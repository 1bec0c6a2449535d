"""Output of a process: its destination and format. Knows no Ray."""

import logging
import os
import sys
import time
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from loguru import logger
from tqdm import tqdm

from skyrl_train.errors import ConfigError
from skyrl_train.utils.tracebacks import LOG_FILE_ONLY

if TYPE_CHECKING:
    from loguru import Record

_LEVELS = ("TRACE", "DEBUG", "INFO", "SUCCESS", "WARNING", "ERROR", "CRITICAL")
_FORMAT = "<dim>{time:HH:mm:ss}</dim> <level>{level: <7}</level> {message}"
_CHATTY_LIBRARIES = ("httpx", "httpcore", "urllib3", "filelock", "fsspec", "matplotlib")
"""Libraries that log every request or file at INFO: shown from WARNING on, unless the level is below INFO."""
_TAIL_BYTES = 256 * 1024

_own_log = "its standard error"


def capture_output(path: str | Path) -> None:
    """Redirect this process's standard output and error to a file from here on, line by line, appended to its content.

    The descriptors themselves are redirected, so what C++ libraries and child processes print arrives as well. A header
    line tells one start from the next. For processes that nobody watches; there is no way back.
    """
    path = Path(path)
    path.parent.resolve().mkdir(parents=True, exist_ok=True)  # it may be a link to a folder that this node lacks
    sys.stdout.flush()
    sys.stderr.flush()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    started = time.strftime("%Y-%m-%d %H:%M:%S")
    os.write(descriptor, f"=== process {os.getpid()} started {started} ===\n".encode())
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    # New text layers: the old ones may be buffered by blocks, or (under Ray) be no file at all.
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115


def log_tail(path: str | Path, num_lines: int = 30) -> str:
    """The last lines of a log, for the text of an error. Says so if there is none."""
    path = Path(path)
    if not path.exists():
        return f"(no log at {path})"
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        text = file.read(_TAIL_BYTES).decode("utf-8", "replace")
    return "\n".join(text.splitlines()[-num_lines:]) or f"(the log at {path} is empty)"


def log_level() -> str:
    """The level asked for by `LOG_LEVEL`, INFO if it is not set.

    Raises:
        ConfigError: it is set to something else than a level.
    """
    level = os.environ.get("LOG_LEVEL", "").upper() or "INFO"
    if level not in _LEVELS:
        raise ConfigError(f"LOG_LEVEL must be one of {', '.join(_LEVELS)}; got {os.environ['LOG_LEVEL']!r}")
    return level


def configure_logging(log_path: str | Path | None = None) -> None:
    """Set up loguru for this process at the level of `LOG_LEVEL`, and forward logs of libraries to it.

    Args:
        log_path: also write every line there, without colours (appended): for the process that a person watches.
    """
    global _own_log
    level = log_level()
    if log_path is not None:
        _own_log = str(log_path)
    is_shown = None if log_path is None else _is_for_the_console  # without a file everything is
    logger.remove()
    # Without `diagnose`: it would write the values of variables, secrets among them.
    is_terminal = sys.stderr is not None and sys.stderr.isatty()
    sink: Any = _above_bars if is_terminal else sys.stderr  # loguru's overloads are of one kind of sink each
    colorize = True if is_terminal else None  # None: loguru looks at the stream
    logger.add(sink, level=level, format=_FORMAT, filter=is_shown, backtrace=False, diagnose=False, colorize=colorize)
    if log_path is not None:
        form = "{time:YYYY-MM-DD HH:mm:ss} {level: <7} {message}"
        logger.add(log_path, level=level, format=form, encoding="utf-8", backtrace=False, diagnose=False)
    logging.basicConfig(handlers=[_ToLoguru()], level=logger.level(level).no, force=True)
    for name in _CHATTY_LIBRARIES:
        logging.getLogger(name).setLevel(logging.WARNING if level == "INFO" else logging.NOTSET)


def _above_bars(text: str) -> None:
    """Write to the terminal, above the progress bars that it shows."""
    tqdm.write(text, file=sys.stderr, end="")


def own_log() -> str:
    """Return where this process logs, for the text of an error."""
    return _own_log


def _is_for_the_console(record: "Record") -> bool:
    return LOG_FILE_ONLY not in record["extra"]


class _ToLoguru(logging.Handler):
    """Handler that forwards log records of the standard library to loguru, with their original location."""

    def emit(self, record: logging.LogRecord) -> None:
        level = record.levelname if record.levelname in _LEVELS else record.levelno
        logger.opt(depth=_depth_of_caller(), exception=record.exc_info).log(level, "{}", record.getMessage())


def _depth_of_caller() -> int:
    """Return the number of frames between `_ToLoguru.emit` and the code that called the standard library's logging."""
    frame: FrameType | None = sys._getframe(1)
    depth = 0
    while frame is not None and (depth == 0 or frame.f_code.co_filename == logging.__file__):
        frame = frame.f_back
        depth += 1
    return depth

"""Output of a process: its destination and format. Independent of Ray."""

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
    """Redirect this process's standard output and error to a file, line-buffered and in append mode.

    The file descriptors are redirected, so output of C++ libraries and child processes is included. A header line
    separates starts. For background processes; it cannot be undone.
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
    # New text layers: the old ones may be block-buffered, or (under Ray) not be files.
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115


def read_log_tail(path: str | Path, num_lines: int = 30) -> str:
    """Return the last lines of a log, or a note that it is missing or empty, for the text of an error."""
    path = Path(path)
    if not path.exists():
        return f"(no log at {path})"
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        text = file.read(_TAIL_BYTES).decode("utf-8", "replace")
    return "\n".join(text.splitlines()[-num_lines:]) or f"(the log at {path} is empty)"


def log_level() -> str:
    """Return the level in `LOG_LEVEL`, INFO if it is not set.

    Raises:
        ConfigError: it is not a valid level.
    """
    level = os.environ.get("LOG_LEVEL", "").upper() or "INFO"
    if level not in _LEVELS:
        raise ConfigError(f"LOG_LEVEL must be one of {', '.join(_LEVELS)}; got {os.environ['LOG_LEVEL']!r}")
    return level


def configure_logging(log_path: str | Path | None = None) -> None:
    """Configure loguru for this process at the level of `LOG_LEVEL`, and forward library logs to it.

    Args:
        log_path: also append every line there, without colours: for the process on the console.
    """
    global _own_log
    level = log_level()
    if log_path is not None:
        _own_log = str(log_path)
    is_shown = None if log_path is None else _is_for_the_console  # without a log file everything is shown
    logger.remove()
    # Without `diagnose`: it would write the values of variables, including secrets.
    is_terminal = sys.stderr is not None and sys.stderr.isatty()
    sink: Any = _write_above_bars if is_terminal else sys.stderr  # loguru's overloads accept one kind of sink each
    colorize = True if is_terminal else None  # None: loguru checks the stream
    logger.add(sink, level=level, format=_FORMAT, filter=is_shown, backtrace=False, diagnose=False, colorize=colorize)
    if log_path is not None:
        form = "{time:YYYY-MM-DD HH:mm:ss} {level: <7} {message}"
        file: Any = _LogFile(Path(log_path))
        logger.add(file, level=level, format=form, backtrace=False, diagnose=False)
    logging.basicConfig(handlers=[_ToLoguru()], level=logger.level(level).no, force=True)
    for name in _CHATTY_LIBRARIES:
        logging.getLogger(name).setLevel(logging.WARNING if level == "INFO" else logging.NOTSET)


class _LogFile:
    """Log file that tolerates a full disk: lines that do not fit are dropped, with one message on standard error."""

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115  as long as the process logs
        self._has_warned = False

    def write(self, text: str) -> None:
        try:
            self._file.write(text.encode("utf-8", "backslashreplace"))
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                print(f"{self._file.name}: {error}; lines are dropped until there is disk space", file=sys.stderr)

    def stop(self) -> None:
        """Close the file; called by loguru when it removes the sink."""
        self._file.close()


def _write_above_bars(text: str) -> None:
    """Write to the terminal, above its progress bars."""
    tqdm.write(text, file=sys.stderr, end="")


def get_own_log() -> str:
    """Return the location of this process's log, for the text of an error."""
    return _own_log


def _is_for_the_console(record: "Record") -> bool:
    return LOG_FILE_ONLY not in record["extra"]


class _ToLoguru(logging.Handler):
    """Handler that forwards log records of the standard library to loguru, with their original location."""

    def emit(self, record: logging.LogRecord) -> None:
        level = record.levelname if record.levelname in _LEVELS else record.levelno
        logger.opt(depth=_compute_caller_depth(), exception=record.exc_info).log(level, "{}", record.getMessage())


def _compute_caller_depth() -> int:
    """Return the number of frames between `_ToLoguru.emit` and the code that called the standard library's logging."""
    frame: FrameType | None = sys._getframe(1)
    depth = 0
    while frame is not None and (depth == 0 or frame.f_code.co_filename == logging.__file__):
        frame = frame.f_back
        depth += 1
    return depth

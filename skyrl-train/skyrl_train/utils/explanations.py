"""Explanations of a hang, asked for when a deadline of the run expires. Knows where they lie, not how they are made.

They are made by a process of its own (`python -m skyrl_train.explain`), which reads files and `/proc`: one that hangs
as well cannot harm the run, and is ended after `_SECONDS`.
"""

import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from loguru import logger

from skyrl_gym.waits import FOLDER, begin_run

TRAINER = "trainer"
"""Role of the driver's process, as records of waits name it."""

SCHEDULER = "Ray's scheduler"
"""Name of who places processes on machines, in records of waits."""

_SECONDS = 20.0
_INTERVAL_SECONDS = 60.0
"""An explanation stands for all deadlines that expire so shortly after it."""

_MOST = 20
"""Explanations that one process asks for: environments that are late each minute need no more."""


def waits_folder(run_dir: Path) -> Path:
    """Return the folder of records of waits."""
    return run_dir / "waits"


def explanations_folder(run_dir: Path) -> Path:
    """Return the folder of explanations."""
    return run_dir / "explanations"


def record_waits(run_dir: Path) -> None:
    """Record the waits of this process as those of the run's driver, and those of processes that it starts."""
    log = str(run_dir / "logs" / "trainer.log")
    begin_run(waits_folder(run_dir), TRAINER, explainer=explain_expiry, log=log)


@dataclass
class _State:
    """Last explanation of this process, and the number of those before."""

    line: str = ""
    made: float = float("-inf")
    count: int = 0


_lock = threading.Lock()
_state = _State()


def explain_expiry(reason: str) -> str:
    """Explain who waits for whom, since a deadline has expired. Blocks for a second or two, and never raises.

    Args:
        reason: what did not happen in time, in a sentence.

    Returns:
        The end of an error's first line: the likeliest cause and the file. Empty where no waits are recorded.
    """
    folder = os.environ.get(FOLDER)
    if not folder:
        return ""
    with _lock:
        if time.monotonic() - _state.made > _INTERVAL_SECONDS and _state.count < _MOST:
            _state.count += 1
            _state.line = _explained(Path(folder).parent, reason)
            _state.made = time.monotonic()
        return _state.line


def _explained(run_dir: Path, reason: str) -> str:
    command = [sys.executable, "-m", "skyrl_train.explain", str(run_dir), "--because", reason, "--brief"]
    said = ""
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_SECONDS)
        said = done.stderr.strip().rpartition("\n")[2]
        answer = json.loads(done.stdout)
        return f": {answer['cause']} (who waits for whom: {answer['path']})"
    except (OSError, subprocess.SubprocessError, ValueError, KeyError) as error:
        logger.warning("who waits for whom could not be explained: {}", said or repr(error))
        return ""

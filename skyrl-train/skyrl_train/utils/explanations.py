"""Explanations of hangs, requested when a deadline of the run expires. Resolves their location; does not write them.

They are written by a separate process (`python -m skyrl_train.explain`), which reads files and `/proc`: if it hangs as
well it cannot harm the run, and is killed after `_SECONDS`.
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
"""Role of the driver's process in records of waits."""

SCHEDULER = "Ray's scheduler"
"""Name of the process scheduler in records of waits."""

_SECONDS = 20.0
_INTERVAL_SECONDS = 60.0
"""An explanation covers all deadlines that expire within this time after it."""

_MOST = 20
"""Maximum number of explanations per process, in case environments time out every minute."""


def waits_folder(run_dir: Path) -> Path:
    """Return the folder of records of waits."""
    return run_dir / "waits"


def get_explanations_folder(run_dir: Path) -> Path:
    """Return the folder of explanations."""
    return run_dir / "explanations"


def start_recording_waits(run_dir: Path) -> None:
    """Record the waits of this process, as the run's driver, and of processes that it starts."""
    log = str(run_dir / "logs" / "trainer.log")
    begin_run(waits_folder(run_dir), TRAINER, explainer=write_explanation, log=log)


@dataclass
class _State:
    """Last explanation of this process, and the number of earlier ones."""

    line: str = ""
    made: float = float("-inf")
    count: int = 0


_lock = threading.Lock()
_state = _State()


def write_explanation(reason: str) -> str:
    """Write an explanation of the hang after a deadline has expired. Blocks for a second or two, and never raises.

    Args:
        reason: what did not happen in time, in a sentence.

    Returns:
        The end of an error's first line: the most likely cause and the file. Empty if no waits are recorded.
    """
    folder = os.environ.get(FOLDER)
    if not folder:
        return ""
    with _lock:
        if time.monotonic() - _state.made > _INTERVAL_SECONDS and _state.count < _MOST:
            _state.count += 1
            _state.line = _run_explanation(Path(folder).parent, reason)
            _state.made = time.monotonic()
        return _state.line


def _run_explanation(run_dir: Path, reason: str) -> str:
    command = [sys.executable, "-m", "skyrl_train.explain", str(run_dir), "--because", reason, "--brief"]
    said = ""
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_SECONDS)
        said = done.stderr.strip().rpartition("\n")[2]
        answer = json.loads(done.stdout)
        return f": {answer['cause']} (wait report: {answer['path']})"
    except (OSError, subprocess.SubprocessError, ValueError, KeyError) as error:
        logger.warning("no wait report could be written: {}", said or repr(error))
        return ""

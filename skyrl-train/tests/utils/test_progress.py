"""Progress on the console: lines without a terminal, bars on one, nothing unless it was asked for."""

import asyncio
import fcntl
import io
import os
import pty
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator

import pytest
from loguru import logger

from skyrl_train.utils.progress import ConsolePhase, ConsoleProgress, duration


class Clock:
    """Clock that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def lines() -> Iterator[list[str]]:
    found: list[str] = []
    number = logger.add(lambda text: found.append(str(text).rstrip()), format="{message}")
    yield found
    logger.remove(number)


def pass_seconds(number: int, clock: Clock, progress: ConsoleProgress, phase: ConsolePhase) -> None:
    """Let one unit of a phase be done each second."""
    for second in range(1, number + 1):
        clock.now = float(second)
        phase.advance()
        progress.tick()


def test_long_phase_without_terminal_logs_each_ten_seconds_and_tenth(lines: list[str]):
    progress = ConsoleProgress(clock := Clock())
    with progress.showing(True, io.StringIO()), progress.phase("generate", 100, "answers") as phase:
        pass_seconds(100, clock, progress, phase)
    assert lines[0] == "generate: 10 of 100 answers (10%), 10 s, about 1 min 30 s left"
    assert [line.split()[1] for line in lines] == ["10", "20", "30", "40", "50", "60", "70", "80", "90"]


def test_slow_phase_logs_each_minute_or_ten_seconds_without_count(lines: list[str]):
    progress = ConsoleProgress(clock := Clock())
    with progress.showing(True, io.StringIO()), progress.phase("generate", 100_000, "answers") as phase:
        pass_seconds(120, clock, progress, phase)
    assert len(lines) == 2
    clock.now = 0.0
    with progress.showing(True, io.StringIO()), progress.phase("load the models"):
        for second in range(1, 26):
            clock.now = float(second)
            progress.tick()
    assert lines[2:] == ["load the models: 10 s so far", "load the models: 20 s so far"]


def test_quick_phases_and_silent_processes_log_nothing(lines: list[str]):
    progress = ConsoleProgress(clock := Clock())
    with progress.showing(True, io.StringIO()):
        for _ in range(100):
            with progress.phase("generate", 4, "answers") as phase:
                clock.now += 2.0
                phase.advance(4)
                progress.tick()
    with progress.showing(False), progress.phase("generate", 4, "answers") as phase:
        clock.now += 100.0
        phase.advance(1)
        progress.tick()
        progress.at_step(1, 3)
    assert lines == []


def test_resumed_run_times_steps_from_resume(lines: list[str]):
    progress = ConsoleProgress(clock := Clock())
    with progress.showing(True, io.StringIO()):
        progress.at_step(50, 100)
        clock.now = 20.0
        progress.at_step(60, 100)
        progress.tick()
        progress.at_step(100, 100)
        clock.now = 200.0
        progress.tick()
    assert lines == ["train: 60 of 100 steps (60%), 20 s, about 1 min 20 s left"]


async def test_completions_count_toward_phase_of_same_task():
    """Trajectories of asynchronous training go on while the trainer evaluates."""
    progress = ConsoleProgress()
    go = asyncio.Event()

    async def answer() -> None:
        await go.wait()
        progress.advance("answers")

    with progress.showing(True, io.StringIO()):
        other = asyncio.create_task(answer())
        with progress.phase("evaluate", 2, "answers") as phase:
            own = [asyncio.create_task(answer()) for _ in range(2)]
            with progress.phase("sync the weights"):
                go.set()
                await asyncio.gather(other, *own)
        assert phase.done == 2


@pytest.mark.parametrize(
    "seconds, text", [(0.4, "0 s"), (59.4, "59 s"), (61, "1 min 1 s"), (3700, "1 h 1 min"), (90_000, "1 d 1 h")]
)
def test_durations_have_two_units(seconds: float, text: str):
    assert duration(seconds) == text


PROGRAM = """
import time
from loguru import logger
from skyrl_train.utils.process_log import configure_logging
from skyrl_train.utils.progress import progress
configure_logging()
with progress.showing(True), progress.phase("generate", 20, "answers") as phase:
    for number in range(20):
        phase.advance()
        time.sleep(0.03)
        if number % 5 == 0:
            logger.info("line {}", number)
logger.info("the end")
"""


@pytest.mark.process
def test_terminal_log_lines_are_printed_above_progress_bar():
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    environment = os.environ | {"TERM": "xterm"}
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stderr=theirs, env=environment) as process:
        os.close(theirs)
        parts = []
        while True:
            try:
                part = os.read(ours, 65536)
            except OSError:  # the other end is closed
                break
            if not part:
                break
            parts.append(part)
    os.close(ours)
    assert process.returncode == 0
    text = b"".join(parts).decode()
    assert "generate:" in text and "of 20 answers" in text
    # What stands on each line at last: text after the last carriage return.
    final = [line.rstrip("\r").rsplit("\r", 1)[-1] for line in text.split("\n")]
    said = [line for line in final if "line " in line or "the end" in line]
    assert [line.split()[-1] for line in said] == ["0", "5", "10", "15", "end"]
    assert not any("generate" in line for line in said)

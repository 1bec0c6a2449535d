"""Progress of a run's phases on its console: bars on a terminal, occasional log lines elsewhere.

Disabled in every process except the run's driver, which calls `progress.showing`. Other code opens or advances phases,
which is free while progress is disabled. Log lines are printed above the bars (`process_log`).
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TextIO

from loguru import logger
from tqdm import tqdm

LINE_SECONDS = 10.0
"""Seconds between two lines of a phase, without a terminal; shorter phases log no line."""

LINE_SHARE = 0.1
"""Fraction of a phase between two lines, unless `SLOW_LINE_SECONDS` have passed."""

SLOW_LINE_SECONDS = 60.0
ANSWERS = "answers"
"""Unit of generation and evaluation, advanced by generators."""

_TICK_SECONDS = 1.0
_BAR = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt} of {total_fmt} {unit} [{elapsed}, {remaining} left]"
_BAR_WITHOUT_TOTAL = "{desc} [{elapsed}]"


_counting: ContextVar["ConsolePhase | None"] = ContextVar("counting", default=None)


class ConsolePhase:
    """A long phase of a run.

    Args:
        name: a verb and its object, such as `load the models`.
        total: units of work; None if unknown.
        done: units done before it started.
        unit: name of a unit, in the plural.
        bar: its bar; None without a terminal.
    """

    def __init__(self, name: str, total: int | None, done: int, unit: str, now: float, bar: "tqdm[Any] | None" = None):
        self.name, self.total, self.done, self.unit = name, total, done, unit
        self._begun = self._last_line = now
        self._before = self._done_at_line = done
        self._bar = bar

    def advance(self, count: int = 1) -> None:
        """Count completed units."""
        self.done += count
        if self._bar is not None:
            self._bar.update(count)

    def extend(self, count: int) -> None:
        """Add units to the total."""
        self.total = (self.total or 0) + count
        if self._bar is not None:
            self._bar.total = self.total

    def line(self, now: float) -> str:
        """Format the state: progress, elapsed and remaining time."""
        seconds = now - self._begun
        own = self.done - self._before  # the speed of this process
        if self.total is None or own <= 0:  # nothing is done yet, or is not counted (a custom generator)
            return f"{self.name}: {duration(seconds)} so far"
        text = f"{self.name}: {self.done} of {self.total} {self.unit} ({self.done / self.total:.0%})"
        return f"{text}, {duration(seconds)}, about {duration(seconds / own * (self.total - self.done))} left"

    def is_line_due(self, now: float) -> bool:
        """Return True if a line is due, and record it as logged."""
        waited, is_done = now - self._last_line, self.total is not None and self.done >= self.total
        far = self.total is not None and self.done - self._done_at_line >= LINE_SHARE * self.total
        if waited < LINE_SECONDS or is_done or not (far or waited >= SLOW_LINE_SECONDS or self.total is None):
            return False
        self._last_line, self._done_at_line = now, self.done
        return True

    def refresh(self) -> None:
        """Draw the bar with the current time."""
        if self._bar is not None:
            self._bar.refresh()

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.close()


class ConsoleProgress:
    """The phases of a process.

    Args:
        clock: returns the current time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._stream: TextIO | None = None
        self._phases: list[ConsolePhase] = []
        self._steps: ConsolePhase | None = None
        self._lock = threading.RLock()

    @property
    def is_on(self) -> bool:
        return self._stream is not None

    @contextmanager
    def showing(self, is_on: bool, stream: TextIO | None = None) -> Iterator[None]:
        """Show the phases of the block. Args: `stream`, possibly a terminal; None: standard error."""
        if not is_on or self.is_on:
            yield
            return
        self._stream = sys.stderr if stream is None else stream
        ended = threading.Event()

        def run_ticks() -> None:
            while not ended.wait(_TICK_SECONDS):
                self.tick()

        threading.Thread(target=run_ticks, name="progress", daemon=True).start()
        try:
            yield
        finally:
            ended.set()
            with self._lock:
                self._stream = None
                for phase in self._phases:
                    phase.close()
                self._phases, self._steps = [], None

    @contextmanager
    def phase(
        self, name: str | None, total: int | None = None, unit: str = "", done: int = 0
    ) -> Iterator[ConsolePhase]:
        """Show a phase during the block; yields None if it is not shown."""
        phase = ConsolePhase(name or "", total, done, unit, self._clock())
        if name is not None and self.is_on:
            phase = self._open(name, total, unit, done)
        # Of this task and tasks that it starts: training rollouts may run during an evaluation.
        token = _counting.set(phase if unit else _counting.get())
        try:
            yield phase
        finally:
            _counting.reset(token)
            with self._lock:
                if phase in self._phases:
                    self._phases.remove(phase)
                    phase.close()

    def advance(self, unit: str) -> None:
        """Count a unit of work of this task's phase, if the phase counts this unit."""
        phase = _counting.get()
        if phase is not None and phase.unit == unit:
            phase.advance()

    def at_step(self, step: int, total: int) -> None:
        """Set the number of completed training steps. Shown from the first call until the last step."""
        with self._lock:
            if not self.is_on:
                return
            if self._steps is None:
                self._steps = self._open("train", total, "steps", step)
            self._steps.advance(step - self._steps.done)
            if step >= total:
                self._phases.remove(self._steps)
                self._steps.close()
                self._steps = None

    def tick(self) -> None:
        """Draw the bars, or log the lines that are due."""
        with self._lock:
            if self._stream is None:
                return
            if self._stream.isatty():
                for phase in self._phases:
                    phase.refresh()
                return
            now = self._clock()
            lines = [phase.line(now) for phase in self._phases if phase.is_line_due(now)]
        for line in lines:
            logger.info("{}", line)

    def _open(self, name: str, total: int | None, unit: str, done: int) -> ConsolePhase:
        with self._lock:
            stream = self._stream
            bar = None
            if stream is not None and stream.isatty():
                form = _BAR_WITHOUT_TOTAL if total is None else _BAR
                bar = tqdm(
                    total=total, desc=name, unit=unit, initial=done, file=stream, leave=False,
                    dynamic_ncols=True, mininterval=0.2, bar_format=form,
                )  # fmt: skip
            phase = ConsolePhase(name, total, done, unit, self._clock(), bar)
            self._phases.append(phase)
            return phase


def duration(seconds: float) -> str:
    """Format a time in its two largest units."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


progress = ConsoleProgress()
"""Progress of this process."""

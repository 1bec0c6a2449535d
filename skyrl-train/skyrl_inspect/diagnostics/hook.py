"""Hook that names failures of training as they happen: in the log, the run folder and the metrics."""

import dataclasses
import json
import math
import subprocess
import threading
from collections.abc import Mapping

from loguru import logger

from skyrl_inspect.defaults import get_default_settings
from skyrl_inspect.diagnostics.history import History
from skyrl_inspect.diagnostics.rules import Diagnostic, RunSettings, find_diagnostics
from skyrl_train.config import SkyRLConfig
from skyrl_train.config.fingerprint import flatten_settings
from skyrl_train.errors import ConfigError, DiagnosticError
from skyrl_train.hooks import ObservedRun, TrainerHook

WARN, STOP = "warn", "stop"
REPEAT_AFTER = 10
"""Steps without a failure after which it is reported again."""

COMMAND_SECONDS = 60.0
"""Time that the command of `trainer.on_diagnostic` has."""


class Diagnostics(TrainerHook):
    """Evaluates the rules after each step. A failure is reported when it begins, and counts as the metric
    `diagnostics/NAME` in each step in which it holds."""

    def __init__(self, run: ObservedRun):
        super().__init__(run)
        self._reaction = run.cfg.trainer.on_diagnostic
        self._settings = RunSettings(flatten_settings(run.cfg), get_default_settings())
        self._history = History()
        self._last_seen: dict[str, int] = {}

    @classmethod
    def check_settings(cls, cfg: SkyRLConfig) -> None:
        """Check `trainer.on_diagnostic`. Raises ConfigError."""
        if not cfg.trainer.on_diagnostic.strip():
            raise ConfigError("trainer.on_diagnostic must not be empty: use warn, stop, or a shell command")

    def on_resume(self) -> None:
        """Read the metrics of earlier steps. What still holds was reported before."""
        for row in self.run.run_folder.read_metrics():
            self._history.append(row["step"], row)
        self._last_seen = {found.name: found.step for found in find_diagnostics(self._history)}

    def on_log(self) -> None:
        """Evaluate the rules with the metrics of this step, report what is new, and react to it."""
        step = self.run.global_step
        self._history.append(step, self.run.all_metrics)
        new: list[Diagnostic] = []
        for found in find_diagnostics(self._history, self._settings):
            self.run.all_metrics[f"diagnostics/{found.name}"] = 1.0
            if step - self._last_seen.get(found.name, -math.inf) > REPEAT_AFTER:
                new.append(found)
            self._last_seen[found.name] = step
        for diagnostic in new:
            logger.warning("diagnostic: {}", diagnostic)
            self.run.run_folder.append_diagnostic(step, dataclasses.asdict(diagnostic))
        if new:
            self._react(new)

    def _react(self, new: list[Diagnostic]) -> None:
        if self._reaction == STOP:
            self.run.request_stop(DiagnosticError(f"trainer.on_diagnostic=stop: {'; '.join(map(str, new))}"))
        elif self._reaction != WARN:
            found = [dataclasses.asdict(each) for each in new]
            record = {"run_dir": str(self.run.run_folder.path), "diagnostics": found}
            threading.Thread(target=_run_command, args=(self._reaction, record), daemon=True).start()


def _run_command(command: str, record: Mapping[str, object]) -> None:
    """Run a user's command with a record as JSON in its standard input. Failures are logged and do not end the run."""
    try:
        ended = subprocess.run(
            ["/bin/sh", "-c", command],
            input=json.dumps(record),
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=COMMAND_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        logger.warning("trainer.on_diagnostic={!r} failed: {!r}", command, error)
        return
    if ended.returncode != 0:
        logger.warning("trainer.on_diagnostic={!r} ended with {}: {}", command, ended.returncode, ended.stdout[-1000:])

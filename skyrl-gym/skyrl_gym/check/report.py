"""Results of a check."""

from dataclasses import dataclass
from typing import Literal

from skyrl_gym.error import Error


@dataclass(frozen=True)
class Finding:
    """One broken promise."""

    severity: Literal["error", "warning"]
    """An error breaks training or grading; a warning is a habit that will."""
    check: str
    text: str

    def __str__(self) -> str:
        return f"{self.severity}: {self.check}: {self.text}"


@dataclass(frozen=True)
class CheckReport:
    """Results of `check_env`."""

    env: str
    findings: list[Finding]
    num_tasks: int
    slowest_call: str
    """Slowest call, with its duration."""

    @property
    def errors(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.severity == "error"]

    @property
    def ok(self) -> bool:
        """No errors; there may be warnings."""
        return not self.errors

    def __str__(self) -> str:
        lines = [f"{self.env}: {len(self.errors)} errors in {self.num_tasks} tasks; slowest call: {self.slowest_call}"]
        return "\n".join(lines + [f"  {finding}" for finding in self.findings])


class CheckError(Error):
    """An environment breaks its promises; the text lists all of them, `report` holds them."""

    def __init__(self, report: CheckReport) -> None:
        super().__init__(str(report))
        self.report = report

"""Results of an audit, and their table."""

import statistics
from dataclasses import dataclass

ORACLE_AT_LEAST = 0.98
"""Smallest accepted mean outcome reward of the oracle; the highest possible is 1."""

CHEATER_AT_MOST = 0.05
"""Largest accepted mean outcome reward of a cheating policy, as a fraction of the oracle's."""


@dataclass(frozen=True)
class PolicyOutcome:
    """Rewards of one policy, on each example that it applies to."""

    name: str
    outcomes: list[float]
    """Outcome reward of each example: success alone."""
    totals: list[float]
    """Total reward of each example, including shaping (a format bonus, a penalty)."""

    @property
    def outcome(self) -> float:
        """Mean over the examples."""
        return statistics.fmean(self.outcomes)

    @property
    def shaping(self) -> float:
        """Mean reward in addition to the outcome reward."""
        return statistics.fmean(total - outcome for total, outcome in zip(self.totals, self.outcomes, strict=True))


@dataclass(frozen=True)
class AuditReport:
    """The oracle and the cheaters on one environment."""

    env: str
    num_examples: int
    oracle: PolicyOutcome
    cheaters: list[PolicyOutcome]

    @property
    def best_cheater(self) -> PolicyOutcome:
        return max(self.cheaters, key=lambda cheater: cheater.outcome)

    @property
    def best_shaped(self) -> PolicyOutcome:
        """The cheat with the highest reward in addition to the outcome."""
        return max(self.cheaters, key=lambda cheater: cheater.shaping)

    @property
    def gap(self) -> float:
        return self.oracle.outcome - self.best_cheater.outcome

    @property
    def complaints(self) -> list[str]:
        """Problems found; empty if the environment passes."""
        found = []
        if self.oracle.outcome < ORACLE_AT_LEAST:
            found.append(f"the oracle earns {self.oracle.outcome:.3f}; it must earn at least {ORACLE_AT_LEAST:g}")
        allowed = CHEATER_AT_MOST * max(self.oracle.outcome, 0.0)
        found += [
            f"{cheater.name!r} earns {cheater.outcome:.3f}; reward-hacking policies may earn at most {allowed:.3f}"
            for cheater in sorted(self.cheaters, key=lambda cheater: -cheater.outcome)
            if cheater.outcome > allowed
        ]
        return found

    @property
    def ok(self) -> bool:
        return not self.complaints

    def as_json(self) -> dict[str, object]:
        return {
            "env": self.env,
            "ok": self.ok,
            "complaints": self.complaints,
            "num_examples": self.num_examples,
            "oracle": _to_json(self.oracle),
            "best_cheater": self.best_cheater.name,
            "gap": self.gap,
            "cheaters": [_to_json(cheater) for cheater in self.cheaters],
        }


def _to_json(policy: PolicyOutcome) -> dict[str, object]:
    return {
        "name": policy.name,
        "outcome": policy.outcome,
        "shaping": policy.shaping,
        "outcomes": policy.outcomes,
        "totals": policy.totals,
    }


HEADINGS = ("environment", "oracle", "cheater", "gap", "best cheater", "shaping: oracle", "cheater", "verdict")


def table(reports: list[AuditReport]) -> str:
    """Format one line per environment: outcome rewards first, then the rewards in addition to them."""
    rows = [
        (
            report.env,
            f"{report.oracle.outcome:.3f}",
            f"{report.best_cheater.outcome:.3f}",
            f"{report.gap:.3f}",
            report.best_cheater.name if report.best_cheater.outcome > 0 else "-",
            f"{report.oracle.shaping:.3f}",
            f"{report.best_shaped.shaping:.3f}",
            "ok" if report.ok else "FAIL",
        )
        for report in reports
    ]
    widths = [max(len(row[column]) for row in [HEADINGS, *rows]) for column in range(len(HEADINGS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in [HEADINGS, *rows]]
    complaints = [f"{report.env}: {complaint}" for report in reports for complaint in report.complaints]
    return "\n".join(line.rstrip() for line in [*lines, *complaints])

"""Metrics of a stage."""

import math
from dataclasses import dataclass, field


@dataclass
class StageMeter:
    """Meter of one stage, in seconds of the dispatcher's clock. Lists have an entry for each slot taken."""

    queue: list[float] = field(default_factory=list)
    """Time between the end of the previous stage (or the start of the run) and a slot."""
    service: list[float] = field(default_factory=list)
    """Time at work in a slot, retries included."""
    blocked: float = 0.0
    """Total time in which finished work kept its slot, until the next stage admitted it or it was closed."""
    failures: int = 0
    """Trajectories that ended here."""
    retries: int = 0
    timeouts: int = 0
    """Attempts that reached the stage's deadline."""

    def numbers(self, slots: int, span: float) -> dict[str, float]:
        """Compute the metrics.

        Args:
            slots: number of slots of the stage.
            span: seconds of the whole run.
        """
        capacity = slots * span
        return {
            **{f"queue_seconds_{name}": value for name, value in _compute_summary(self.queue).items()},
            **{f"seconds_{name}": value for name, value in _compute_summary(self.service).items()},
            "utilisation": sum(self.service) / capacity if capacity else 0.0,
            "blocked": self.blocked / capacity if capacity else 0.0,
            "slots": slots,
            "failures": self.failures,
            "retries": self.retries,
            "timeouts": self.timeouts,
        }


def _compute_summary(values: list[float]) -> dict[str, float]:
    if not values:
        return {}
    ordered = sorted(values)
    quantile = {name: ordered[math.ceil(share * len(ordered)) - 1] for name, share in (("p50", 0.5), ("p95", 0.95))}
    return {"mean": math.fsum(ordered) / len(ordered), **quantile, "max": ordered[-1]}

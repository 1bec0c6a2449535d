"""What passed through a stage, in numbers."""

import math
from dataclasses import dataclass, field


@dataclass
class StageMeter:
    """Seconds are those of the dispatcher's clock; lists have an entry for each time that a trajectory took a slot."""

    queue: list[float] = field(default_factory=list)
    """From the end of the stage before (or the start of the run) to a slot."""
    service: list[float] = field(default_factory=list)
    """At work in a slot, retries included."""
    blocked: float = 0.0
    """In all: work done, slot kept, until there was room in the next stage or the trajectory was closed."""
    failures: int = 0
    """Trajectories that ended here."""
    retries: int = 0
    timeouts: int = 0
    """Attempts that reached the stage's deadline."""

    def numbers(self, slots: int, span: float) -> dict[str, float]:
        """
        Args:
            slots: of the stage.
            span: seconds of the whole run.
        """
        capacity = slots * span
        return {
            **{f"queue_seconds_{name}": value for name, value in _summary(self.queue).items()},
            **{f"seconds_{name}": value for name, value in _summary(self.service).items()},
            "utilisation": sum(self.service) / capacity if capacity else 0.0,
            "blocked": self.blocked / capacity if capacity else 0.0,
            "slots": slots,
            "failures": self.failures,
            "retries": self.retries,
            "timeouts": self.timeouts,
        }


def _summary(values: list[float]) -> dict[str, float]:
    if not values:
        return {}
    ordered = sorted(values)
    quantile = {name: ordered[math.ceil(share * len(ordered)) - 1] for name, share in (("p50", 0.5), ("p95", 0.95))}
    return {"mean": math.fsum(ordered) / len(ordered), **quantile, "max": ordered[-1]}

"""What the dispatcher asks of a trajectory, and what it remembers of one under way."""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, Protocol

from skyrl_agent.dispatcher.slots import Gate
from skyrl_agent.types import Stage, TrajectoryResult


class Trajectory(Protocol):
    """As `agents.trajectory.BaseTrajectory` has it; the methods of the stages are called by their names."""

    trajectory_id: int
    environment: Any
    result: TrajectoryResult

    @property
    def wants_evaluation(self) -> bool: ...
    def fail(self, stage: Stage, error: BaseException, attempts: int = 1) -> None: ...
    async def restart(self) -> None: ...
    async def close(self) -> None: ...


@dataclass
class Life:
    trajectory: Trajectory
    turn: int
    """Its position in the order of the run."""
    asked: float
    """Since when it waits for the next stage."""
    stage: Stage = "initialize"
    attempts: int = 1
    """At the stage it is in."""
    admitted: bool = False
    """To the whole-life limit."""
    open: bool = False
    """Between the begin of `initialize` and the end of `close`."""
    gate: Gate | None = None
    """Of the stage whose slot it holds."""
    held: Stage | None = None
    place: int | None = None
    """Of its environment."""
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """`TrajectoryResult.stage_seconds`"""

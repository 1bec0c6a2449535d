"""The dispatcher's view of a trajectory: the methods it calls, and its own record of one under way."""

from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Protocol

from skyrl_agent.dispatcher.limits import QueueLimit
from skyrl_agent.types import Stage, TrajectoryResult


class Trajectory(Protocol):
    """Interface of `agents.trajectory.BaseTrajectory`; the methods of the stages are called by their names."""

    trajectory_id: int
    environment: object
    result: TrajectoryResult

    @property
    def wants_evaluation(self) -> bool: ...
    def fail(self, stage: Stage, error: BaseException, attempts: int = 1) -> None: ...
    async def restart(self) -> None: ...
    async def close(self) -> None: ...


@dataclass
class TrajectoryState:
    """Scheduling state of one trajectory."""

    trajectory: Trajectory
    batch: int
    """Number of the batch among those that share the slots."""
    position: int
    """Position of the trajectory in the order of the run."""
    instance: Hashable
    """Key of the durations of its instance."""
    waiting_since: float
    """Time at which it began to wait for the next stage."""
    stage: Stage = "initialize"
    attempts: int = 1
    """Attempts at the current stage."""
    admitted: bool = False
    """Counted in the limit of `alive` trajectories."""
    is_done: bool = False
    """Closed for good."""
    is_open: bool = False
    """Between the begin of `initialize` and the end of `close`."""
    limit: QueueLimit | None = None
    """Limit of the stage whose slot it holds."""
    held_stage: Stage | None = None
    """Stage whose slot it holds."""
    environment_index: int | None = None
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """`TrajectoryResult.stage_seconds`"""
    seconds_alone: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds of each stage as if no other trajectory had run concurrently, as far as that is known."""

"""Base class of environments, independent of what they observe. Knows no text, no registry and no trainer."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Generic, Self, TypedDict, TypeVar

if TYPE_CHECKING:
    from skyrl_gym.envs.registration import EnvSpec

ObsType = TypeVar("ObsType")
ActType = TypeVar("ActType")


class EnvStepOutput(TypedDict, Generic[ObsType]):
    """Output of one step; a plain dict at run time."""

    observations: ObsType
    reward: float
    done: bool
    metadata: Mapping[str, object]


class Env(Generic[ObsType, ActType]):
    """One episode at a time: `init`, then `step` until done, then `close`.

    A trainer drives many environments from many threads, each of them by one thread at a time: instances share no
    mutable state, and none uses signals.
    """

    spec: "EnvSpec | None" = None
    """Registration that this instance was made from; set by `skyrl_gym.make`."""

    def init(self, *args: Any, **kwargs: Any) -> tuple[ObsType, dict[str, object]]:
        """Start an episode. Returns the first observation and a dict of information."""
        raise NotImplementedError(f"{type(self).__name__} must define init")

    def step(self, action: ActType) -> EnvStepOutput[ObsType]:
        """Take one action."""
        raise NotImplementedError(f"{type(self).__name__} must define step")

    def close(self) -> None:
        """Give resources back. May be called more than once."""

    def __str__(self) -> str:
        return f"Env({type(self).__name__})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

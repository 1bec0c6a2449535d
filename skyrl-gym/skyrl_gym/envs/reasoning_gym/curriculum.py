"""How hard a generator's tasks are: levels by reasoning-gym's curricula, and moving through them by success.

curriculum = Curriculum(["chain_sum", "maze"])
rows = reasoning_gym_rows(curriculum.sources(), size=1000, seed=round_number)
...                                       # train on them
curriculum.record("chain_sum", solved=1.0)     # once per episode: the metric solved/chain_sum
curriculum.update()                       # between rounds: levels go up or down
"""

import functools
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from skyrl_gym.envs.reasoning_gym.library import check_config, check_name, library
from skyrl_gym.error import TaskError

KEPT_EPISODES = 1024


@dataclass(frozen=True)
class Source:
    """One generator in a mixture."""

    dataset: str
    weight: float = 1.0
    """Share of the rows, relative to the other sources."""
    level: int | Mapping[str, int] | None = None
    """Difficulty by the generator's curriculum; None for the generator's defaults. See `config_at`."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the generator; they win over those of the level."""


def has_curriculum(name: str) -> bool:
    """Whether a generator has levels."""
    return check_name(name) in library().factory.CURRICULA


def attribute_levels(name: str) -> dict[str, list[Any]]:
    """The values of each attribute of difficulty, by level from 0 on. Raises TaskError if there is no curriculum."""
    return {attribute.name: list(attribute.levels) for attribute in _curriculum(name).attributes.values()}


def config_at(name: str, level: int | Mapping[str, int]) -> dict[str, Any]:
    """A generator's settings at a level.

    Args:
        name: the generator
        level: one level for all attributes (those with fewer stay at their last), or a level for each by name, the
            others at 0. Ranges run from the easiest value to that of the level, or only over the level's own if the
            generator refuses the easiest.

    Raises:
        TaskError: no curriculum, attribute or level of that kind, or a level whose settings the generator refuses.
    """
    curriculum = _curriculum(name)
    if isinstance(level, Mapping):
        for attribute, attribute_level in level.items():
            if attribute not in curriculum.attributes:
                known = ", ".join(curriculum.attributes)
                raise TaskError(f"level of {name} has no attribute {attribute!r}; there are {known}")
            last = len(curriculum.attributes[attribute].levels) - 1
            if attribute_level not in range(last + 1):
                raise TaskError(f"level of {name}.{attribute} must be 0 to {last}; got {attribute_level!r}")
            curriculum.set_attr_level(attribute, attribute_level)
    else:
        last = max(len(attribute.levels) for attribute in curriculum.attributes.values()) - 1
        if level not in range(last + 1):
            raise TaskError(f"level of {name} must be 0 to {last}; got {level!r}")
        curriculum.set_global_level(level)
    try:
        return _settings(name, curriculum, "inclusive")
    except TaskError:
        return _settings(name, curriculum, "upper_bound")


def _settings(name: str, curriculum: Any, ranges: str) -> dict[str, Any]:
    """What a level sets: the settings that differ from the generator's defaults."""
    from reasoning_gym.coaching.base_curriculum import DefaultCurriculumContext, RangeAttributeMode

    context = DefaultCurriculumContext(mode=RangeAttributeMode(ranges))
    settings = vars(curriculum.generate_configuration(context=context))
    defaults = vars(library().factory.DATASETS[name][1]())
    return check_config(name, {key: value for key, value in settings.items() if value != defaults[key]})


@functools.lru_cache(maxsize=256)
def valid_levels(name: str) -> tuple[int, ...]:
    """The levels for all attributes at once that the generator accepts and that differ from the level before."""
    count = max((len(values) for values in attribute_levels(name).values()), default=0)
    levels: list[int] = []
    before = None
    for level in range(count):
        try:
            config = config_at(name, level)
        except TaskError:
            continue
        if config != before:
            levels.append(level)
            before = config
    return tuple(levels)


def _curriculum(name: str) -> Any:
    if not has_curriculum(name):
        raise TaskError(f"{name} has no curriculum; set its difficulty by dataset_config")
    return library().factory.create_curriculum(name)


class Curriculum:
    """A level for each generator, moved by how often its tasks are solved.

    When a generator has `window` new episodes since its level last changed, `update` moves it one level up if the last
    `window` were solved at a rate of at least `up`, and one level down at a rate of at most `down`. The defaults keep a
    policy where groups of samples both succeed and fail, which is where a group's advantage says something.
    """

    def __init__(
        self, datasets: Sequence[str], *, level: int = 0, up: float = 0.75, down: float = 0.2, window: int = 64
    ) -> None:
        """`level` counts the valid levels of each generator from 0.

        Raises:
            TaskError: a generator without a curriculum.
            ValueError: thresholds or a window that make no sense.
        """
        if not 0 <= down < up <= 1:
            raise ValueError(f"down and up must fulfil 0 <= down < up <= 1; got down={down}, up={up}")
        if not 0 < window <= KEPT_EPISODES:
            raise ValueError(f"window must be 1 to {KEPT_EPISODES} episodes; got {window}")
        self.up, self.down, self.window = up, down, window
        self.levels = {name: min(max(level, 0), len(valid_levels(name)) - 1) for name in datasets}
        self._solved: dict[str, deque[float]] = {name: deque(maxlen=window) for name in datasets}

    def record(self, dataset: str, solved: float) -> None:
        """Notes one episode: 1 solved, 0 not. Raises KeyError for a generator that is not in the curriculum."""
        self._solved[dataset].append(float(solved))

    def success_rate(self, dataset: str) -> float | None:
        """Of the episodes at this level, at most `window` of them; None if there are none."""
        solved = self._solved[dataset]
        return sum(solved) / len(solved) if solved else None

    def update(self) -> dict[str, int]:
        """Moves the levels. Returns the change (+1 or -1) of those generators that moved."""
        changes = {}
        for name, solved in self._solved.items():
            rate = self.success_rate(name)
            if rate is None or len(solved) < self.window:
                continue
            step = 1 if rate >= self.up else -1 if rate <= self.down else 0
            level = min(max(self.levels[name] + step, 0), len(valid_levels(name)) - 1)
            if level != self.levels[name]:
                changes[name] = level - self.levels[name]
                self.levels[name] = level
                solved.clear()
        return changes

    def sources(self, weights: Mapping[str, float] | None = None) -> list[Source]:
        """The mixture at the present levels, for `reasoning_gym_rows`."""
        weights = weights or {}
        return [
            Source(name, weight=weights.get(name, 1.0), level=valid_levels(name)[level])
            for name, level in self.levels.items()
        ]

    def state_dict(self) -> dict[str, Any]:
        """All that changes, as plain values: for checkpoints."""
        return {"levels": dict(self.levels), "solved": {name: list(solved) for name, solved in self._solved.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where `state_dict` was taken. Raises ValueError if that was of other generators."""
        if set(state["levels"]) != set(self.levels):
            raise ValueError(f"the state is of {sorted(state['levels'])}, the curriculum of {sorted(self.levels)}")
        self.levels = dict(state["levels"])
        self._solved = {name: deque(solved, maxlen=self.window) for name, solved in state["solved"].items()}

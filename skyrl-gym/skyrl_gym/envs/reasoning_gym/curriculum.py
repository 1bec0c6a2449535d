"""Difficulty of a generator's tasks: levels from reasoning-gym's curricula."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from skyrl_gym.envs.reasoning_gym.library import check_config, check_name, library
from skyrl_gym.error import TaskError


@dataclass(frozen=True)
class Source:
    """One generator in a mixture."""

    dataset: str
    weight: float = 1.0
    """Share of the rows, relative to the other sources."""
    level: int | Mapping[str, int] | None = None
    """Difficulty by the generator's curriculum; None for the generator's defaults. See `build_config`."""
    config: Mapping[str, object] = field(default_factory=dict)
    """Settings of the generator; they override the settings of the level."""


def has_curriculum(name: str) -> bool:
    """Return whether a generator has levels."""
    return check_name(name) in library().factory.CURRICULA


def get_attribute_levels(name: str) -> dict[str, list[object]]:
    """Return the values of each difficulty attribute, by level from 0. Raises TaskError without a curriculum."""
    return {attribute.name: list(attribute.levels) for attribute in _load_curriculum(name).attributes.values()}


def build_config(name: str, level: int | Mapping[str, int]) -> dict[str, object]:
    """Return a generator's settings at a level.

    Args:
        name: the generator
        level: one level for all attributes (attributes with fewer levels stay at their last), or a level by attribute
            name, default 0. Ranges span from the easiest value to the level's value, or only the level's value
            if the generator rejects the easiest.

    Raises:
        TaskError: no curriculum, attribute or level of that kind, or a level whose settings the generator refuses.
    """
    curriculum = _load_curriculum(name)
    if isinstance(level, Mapping):
        for attribute, attribute_level in level.items():
            if attribute not in curriculum.attributes:
                known = ", ".join(curriculum.attributes)
                raise TaskError(f"level of {name} has no attribute {attribute!r}; attributes: {known}")
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
        return _get_settings(name, curriculum, "inclusive")
    except TaskError:
        return _get_settings(name, curriculum, "upper_bound")


def _get_settings(name: str, curriculum: Any, ranges: str) -> dict[str, object]:
    """Return the settings of a level that differ from the generator's defaults."""
    from reasoning_gym.coaching.base_curriculum import DefaultCurriculumContext, RangeAttributeMode

    context = DefaultCurriculumContext(mode=RangeAttributeMode(ranges))
    settings = vars(curriculum.generate_configuration(context=context))
    defaults = vars(library().factory.DATASETS[name][1]())
    return check_config(name, {key: value for key, value in settings.items() if value != defaults[key]})


def _load_curriculum(name: str) -> Any:
    if not has_curriculum(name):
        raise TaskError(f"{name} has no curriculum; set its difficulty by dataset_config")
    return library().factory.create_curriculum(name)

"""A Gymnasium environment played through text: actions read, observations written, returns counted. Independent of
turns.
"""

import copy
import importlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np

from skyrl_gym.envs.gymnasium import description
from skyrl_gym.envs.gymnasium.spaces import IllegalAction, describe, is_readable, read, to_json
from skyrl_gym.error import Error, TaskError

MAX_EXAMPLE_CHARS = 300

_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")
_COLOURED = re.compile(r"\x1b\[([34])([0-7])(?:;\d+)*m(.+?)\x1b\[0m", re.DOTALL)
_COLOURS = ("gray", "red", "green", "yellow", "blue", "magenta", "cyan", "white")


def make_environment(env_id: str, env_kwargs: Mapping[str, object], ansi: bool) -> gymnasium.Env:
    """Make a registered environment; `env_id` may name the module that registers it: "module:id".

    Raises:
        TaskError: unknown id, arguments it does not take, or no text rendering although one is asked for.
        Error: it needs a package that is not installed.
    """
    kwargs: dict[str, Any] = dict(env_kwargs) | ({"render_mode": "ansi"} if ansi else {})
    try:
        module, _, name = env_id.rpartition(":")
        if module:  # "minigrid:MiniGrid-Empty-5x5-v0": importing the package registers its environments
            importlib.import_module(module)
        spec = gymnasium.spec(name)
        env = gymnasium.make(spec, disable_env_checker=True, **kwargs)
    except (gymnasium.error.DependencyNotInstalled, ImportError) as missing:
        raise Error(f"env_id {env_id} needs a package that is not installed: {missing}") from missing
    except gymnasium.error.Error as unknown:
        raise TaskError(f"env_id must be registered with Gymnasium; got {env_id!r}: {unknown}") from unknown
    except (TypeError, ValueError, KeyError, AssertionError) as refusal:
        raise TaskError(f"env_kwargs of {env_id} are invalid: {refusal}; got {kwargs}") from refusal
    if not is_readable(env.action_space):
        env.close()
        raise TaskError(
            f"env_id: actions of {env_id} cannot be written as text; its action space is {env.action_space}"
        )
    if ansi and "ansi" not in env.metadata.get("render_modes", []):
        env.close()
        raise TaskError(f"ansi: {env_id} does not render as text; it has {env.metadata.get('render_modes')}")
    return env


@dataclass
class Played:
    """Outcome of a sequence of actions."""

    reward: float = 0.0
    """Sum over the steps."""
    steps: int = 0
    """Steps of the environment taken."""
    terminated: bool = False
    truncated: bool = False
    success: bool | None = None
    """Success as reported by the environment; None if it reports none."""


class Player:
    """One episode."""

    def __init__(self, env: gymnasium.Env, digits: int, max_numbers: int) -> None:
        """`digits`: significant ones of numbers in observations; `max_numbers`: more of them are cut with a note."""
        self.env = env
        self.digits = digits
        self.max_numbers = max_numbers
        self.names = description.parse_action_names(env)
        self._numbers = {name.casefold(): number for number, name in self.names.items()}
        self._observation: object = None

    @property
    def threshold(self) -> float | None:
        """The return from which on the environment counts as solved, if it says."""
        return self.env.spec.reward_threshold if self.env.spec else None

    @property
    def time_limit(self) -> int | None:
        """Step after which the environment ends an episode, if it does."""
        return self.env.spec.max_episode_steps if self.env.spec else None

    @property
    def full_length(self) -> int | None:
        """The time limit that the environment is registered with: what its threshold is meant for."""
        return gymnasium.spec(self.env.spec.id).max_episode_steps if self.env.spec else None

    def reset(self, seed: int | None) -> None:
        self._observation, _ = self.env.reset(seed=seed)

    def play(self, actions: list[object], frame_skip: int) -> Played:
        """Take each action `frame_skip` times, until the episode ends."""
        played = Played()
        for action in (action for action in actions for _ in range(frame_skip)):
            self._observation, reward, terminated, truncated, info = self.env.step(action)
            played.reward += float(reward)
            played.steps += 1
            played.terminated, played.truncated = bool(terminated), bool(truncated)
            success = info.get("is_success", info.get("success"))
            played.success = played.success if success is None else bool(success)
            if terminated or truncated:
                break
        return played

    def read_actions(self, text: str, max_actions: int) -> list[object]:
        """Return the actions that a model wrote: one, or a list of them if more than one is allowed.

        Raises:
            IllegalAction: with the rule that is broken.
        """
        value = _parse_json(text)
        if max_actions == 1:
            return [self._read(value)]
        try:
            return [self._read(value)]
        except IllegalAction as not_one:
            takes_a_bare_value = self.env.action_space.shape in ((), (1,))
            if (
                not isinstance(value, list)
                or not value
                or not (takes_a_bare_value or isinstance(value[0], list | dict))
            ):
                raise not_one from None
        if len(value) > max_actions:
            raise IllegalAction(f"at most {max_actions} actions in one turn; got {len(value)}")
        return [self._read(part, f"action {number}: ") for number, part in enumerate(value, 1)]

    def _read(self, value: object, place: str = "") -> object:
        if isinstance(value, str) and value.casefold() in self._numbers:
            value = self._numbers[value.casefold()]
        try:
            return read(self.env.action_space, value)
        except IllegalAction as fault:
            raise IllegalAction(f"{place}{fault}") from None

    def task(self, documentation_chars: int) -> str:
        """Id, spaces, and what the environment says of itself, in words."""
        spec = self.env.spec
        lines = [f"Environment: {spec.id if spec else type(self.env.unwrapped).__name__}"]
        if documentation_chars:
            lines.append(description.documentation(self.env, documentation_chars))
        lines.append(f"An observation is {describe(self.env.observation_space)}.")
        lines.append(f"An action is {self.describe_action_rule()}.")
        return "\n\n".join(line for line in lines if line)

    def describe_action_rule(self) -> str:
        """Describe the action space, with the names of actions that have one."""
        names = ", ".join(f"{number} = {name}" for number, name in self.names.items())
        return describe(self.env.action_space) + (f" ({names})" if names else "")

    def sample_action(self) -> str | None:
        """Some action as JSON; None if it would be long. Leaves the environment's random state alone."""
        space = copy.deepcopy(self.env.action_space)
        space.seed(0)
        text = json.dumps(_round_numbers(to_json(space, space.sample()), self.digits))
        return text if len(text) <= MAX_EXAMPLE_CHARS else None

    def observation(self) -> str:
        """Return the present observation, rounded and cut."""
        return self._to_text(to_json(self.env.observation_space, self._observation))

    def picture(self) -> str:
        """Return the environment's own text rendering; coloured parts are put in brackets, the colours listed below."""
        drawn = str(self.env.render())
        colours = [f"[{text}] is {_COLOURS[int(number)]}" for _, number, text in _COLOURED.findall(drawn)]
        plain = _ESCAPE.sub("", _COLOURED.sub(r"[\3]", drawn)).strip("\n")
        return "\n".join([plain, ", ".join(colours)]) if colours else plain

    def _to_text(self, value: Any) -> str:
        if isinstance(value, dict):
            return "{" + ", ".join(f'"{key}": {self._to_text(part)}' for key, part in value.items()) + "}"
        count = _count(value)
        if count <= self.max_numbers:
            return json.dumps(_round_numbers(value, self.digits), ensure_ascii=False)
        flat = list(_iter_leaves(value))[: self.max_numbers]
        shape = " x ".join(map(str, np.shape(value))) if _is_regular(value) else f"{count} values"
        text = json.dumps(_round_numbers(flat, self.digits), ensure_ascii=False)
        return f"{text[:-1]}, ...] (the first {self.max_numbers} of {shape})"


def _is_regular(value: Any) -> bool:
    try:
        np.shape(value)
    except ValueError:
        return False
    return True


def _iter_leaves(value: object) -> Iterator[object]:
    if isinstance(value, list):
        for part in value:
            yield from _iter_leaves(part)
    else:
        yield value


def _count(value: object) -> int:
    return sum(1 for _ in _iter_leaves(value))


def _round_numbers(value: object, digits: int) -> object:
    if isinstance(value, list):
        return [_round_numbers(part, digits) for part in value]
    if isinstance(value, dict):
        return {key: _round_numbers(part, digits) for key, part in value.items()}
    if isinstance(value, float):
        if not math.isfinite(value):
            return str(value)
        rounded = float(f"{value:.{digits}g}")
        return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded
    return value


def _parse_json(text: str) -> object:
    """JSON, or else the text itself: names of actions and texts need no quotes."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text

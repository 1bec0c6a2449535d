"""Wrappers of environments: limits and transforms for any text environment.

    env = ToolBudget(TimeLimit(skyrl_gym.make("search", extras=row), turns=4), max_calls=3)

A wrapper forwards everything else to the wrapped environment: `env.turns`, `env.spec`, `env.aggregate_metrics`.
Wrapped methods may be `async def`; the wrapper's methods then return an awaitable too.
"""

import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from skyrl_gym.core import Env, EnvSpec
from skyrl_gym.envs.base_text_env import BaseTextEnvStepOutput, ConversationType
from skyrl_gym.episode import has_seed_argument

T = TypeVar("T")
R = TypeVar("R")


class Wrapper(Env[ConversationType, str]):
    """Wrapper that forwards everything. A subclass overrides `on_init`, `on_step` or `on_metrics`.

    Attributes are read from the wrapped environment, and set there if it has them and the wrapper does not.
    """

    def __init__(self, env: Env) -> None:
        object.__setattr__(self, "env", env)

    @property
    def unwrapped(self) -> Env:
        """The environment inside all wrappers."""
        return self.env.unwrapped if isinstance(self.env, Wrapper) else self.env

    @property
    def spec(self) -> EnvSpec | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.env.spec

    @spec.setter
    def spec(self, value: object) -> None:
        self.env.spec = value

    def init(self, prompt: ConversationType, seed: int | None = None) -> Any:
        """Start an episode; `seed` is passed to an environment that accepts one."""
        arguments = (prompt, seed) if has_seed_argument(self.env) else (prompt,)
        self.on_init()
        return self.env.init(*arguments)

    def step(self, action: str) -> Any:
        return _apply(self.env.step(action), self._check_step)

    def _check_step(self, output: BaseTextEnvStepOutput) -> BaseTextEnvStepOutput:
        return self.on_step(dict(output))  # pyright: ignore[reportArgumentType]

    def get_metrics(self) -> Any:
        get_metrics = getattr(self.env, "get_metrics", None)
        return _apply(get_metrics() if get_metrics is not None else {}, lambda found: self.on_metrics(dict(found)))

    def close(self) -> Any:
        return self.env.close()

    def on_init(self) -> None:
        """Reset state before an episode starts."""

    def on_step(self, output: BaseTextEnvStepOutput) -> BaseTextEnvStepOutput:
        """Make the step's output of the wrapped one's, which it may change: it is a copy."""
        return output

    def on_metrics(self, metrics: dict[str, object]) -> dict[str, object]:
        """Make the episode's metrics of the wrapped one's, which it may change: it is a copy."""
        return metrics

    def __getattr__(self, name: str) -> Any:
        # Called only for attributes that are not found otherwise. `env` itself is missing while a copy is being made.
        if name == "env" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.env, name)

    def __setattr__(self, name: str, value: object) -> None:
        is_own = name in self.__dict__ or hasattr(type(self), name)
        if not is_own and hasattr(self.env, name):
            setattr(self.env, name, value)
        else:
            object.__setattr__(self, name, value)

    def __str__(self) -> str:
        return f"{type(self).__name__}({self.env})"


def _apply(value: T | Awaitable[T], function: Callable[[T], R]) -> R | Awaitable[R]:
    """Apply `function` to a value, or return an awaitable of the result if the value is awaitable."""
    if not inspect.isawaitable(value):
        return function(value)

    async def wait() -> R:
        return function(await value)

    return wait()


class TimeLimit(Wrapper):
    """Wrapper that ends the episode (`done` and `truncated`) after a number of turns or seconds. The model's text so
    far is still graded; the last observation is dropped.

    Args:
        turns: steps of one episode.
        seconds: wall-clock time since `init`, including generation. Checked after each step; a step is not interrupted.

    Raises:
        ValueError: neither is given, or one is not positive.
    """

    def __init__(self, env: Env, *, turns: int | None = None, seconds: float | None = None) -> None:
        super().__init__(env)
        for name, value in (("turns", turns), ("seconds", seconds)):
            if value is not None and value <= 0:
                raise ValueError(f"TimeLimit({name}=...) must be positive; got {value!r}")
        if turns is None and seconds is None:
            raise ValueError("TimeLimit needs turns, seconds or both")
        self.turn_limit = turns
        self.second_limit = seconds
        self.on_init()

    def on_init(self) -> None:
        self._steps = 0
        self._started = time.monotonic()

    def on_step(self, output: BaseTextEnvStepOutput) -> BaseTextEnvStepOutput:
        self._steps += 1
        if output["done"] or not self._is_over():
            return output
        return output | {"done": True, "truncated": True, "observations": []}  # pyright: ignore[reportReturnType]

    def _is_over(self) -> bool:
        turns_over = self.turn_limit is not None and self._steps >= self.turn_limit
        return turns_over or (self.second_limit is not None and time.monotonic() - self._started >= self.second_limit)


class ToolBudget(Wrapper):
    """Wrapper that limits an episode to `max_calls` tool calls. Further calls return a text and do nothing.

    Counts all calls of the environment's tool groups, and reports them as `tool_calls` and
    `refused_tool_calls`.

    Raises:
        ValueError: the environment has no tools (`init_tool_groups`), or `max_calls` is negative.
    """

    def __init__(self, env: Env, max_calls: int) -> None:
        super().__init__(env)
        if max_calls < 0:
            raise ValueError(f"ToolBudget(max_calls=...) must not be negative; got {max_calls}")
        groups = getattr(env, "tool_groups", [])
        if not groups:
            raise ValueError(f"ToolBudget needs an environment with tools; {env} has none")
        self.max_calls = max_calls
        self.on_init()
        for group in groups:
            group.execute_tool = self._count_calls(group.execute_tool)

    def on_init(self) -> None:
        self._calls = 0
        self._refused = 0

    def _count_calls(self, execute_tool: Callable[..., object]) -> Callable[..., Any]:
        def execute_within_budget(*args: object, **kwargs: object) -> Any:
            if self._calls >= self.max_calls:
                self._refused += 1
                return f"No tool calls are left: all {self.max_calls} are used. Answer with what you have."
            self._calls += 1
            return execute_tool(*args, **kwargs)

        return execute_within_budget

    def on_metrics(self, metrics: dict[str, object]) -> dict[str, object]:
        return metrics | {"tool_calls": self._calls, "refused_tool_calls": self._refused}


class ObservationCut(Wrapper):
    """Wrapper that truncates the text of every observation to `max_characters`: the first and the last part stay, with
    a note between them (not counted) on how much is missing. The prompt is not changed.

    Raises:
        ValueError: `max_characters` is not positive.
    """

    def __init__(self, env: Env, max_characters: int) -> None:
        super().__init__(env)
        if max_characters <= 0:
            raise ValueError(f"ObservationCut(max_characters=...) must be positive; got {max_characters}")
        self.max_characters = max_characters

    def on_step(self, output: BaseTextEnvStepOutput) -> BaseTextEnvStepOutput:
        output["observations"] = [self._cut_message(message) for message in output["observations"]]
        return output

    def _cut_message(self, message: dict[str, object]) -> dict[str, object]:
        content = message.get("content")
        if isinstance(content, str):
            return message | {"content": self._truncate(content)}
        if isinstance(content, list):
            return message | {"content": [self._truncate_part(piece) for piece in content]}
        return message

    def _truncate_part(self, piece: object) -> object:
        """Truncate typed parts: text is truncated, pictures are not."""
        if isinstance(piece, dict) and isinstance(piece.get("text"), str):
            return piece | {"text": self._truncate(piece["text"])}
        return piece

    def _truncate(self, text: str) -> str:
        missing = len(text) - self.max_characters
        if missing <= 0:
            return text
        head = (self.max_characters + 1) // 2
        tail = self.max_characters - head
        return f"{text[:head]}\n[{missing} characters left out]\n{text[len(text) - tail :]}"


class RewardTransform(Wrapper):
    """Wrapper that replaces every step's reward by `function(reward)`. The original reward is in `metadata` as
    `original_reward`, and `outcome_reward` is unchanged.
    """

    def __init__(self, env: Env, function: Callable[[float], float]) -> None:
        super().__init__(env)
        self.function = function
        self.on_init()

    def on_init(self) -> None:
        self._original_total = 0.0

    def on_step(self, output: BaseTextEnvStepOutput) -> BaseTextEnvStepOutput:
        original = output["reward"]
        self._original_total += original
        output["metadata"] = {**(output.get("metadata") or {}), "original_reward": original}
        output["reward"] = float(self.function(original))
        return output

    def on_metrics(self, metrics: dict[str, object]) -> dict[str, object]:
        return {"outcome_reward": self._original_total} | metrics

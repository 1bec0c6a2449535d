"""Text-only driver for episodes of one environment, used by `eval`, `audit` and `check_env`.

The trainer has a separate driver with tokens and deadlines.
"""

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, TypeVar

from skyrl_gym.core import Env
from skyrl_gym.envs.base_text_env import BaseTextEnvStepOutput, ConversationType
from skyrl_gym.finite_numbers import describe, to_finite

T = TypeVar("T")

Policy = Callable[[ConversationType], str]
"""Function from the conversation so far to the text of one turn."""


class ContractError(Exception):
    """An environment gave something that a text environment must not. The text says what, and what the rule is."""


@dataclass
class EpisodeResult:
    """Result of one episode."""

    messages: ConversationType
    """Prompt, turns and observations."""
    rewards: list[float] = field(default_factory=list)
    """Reward of each step."""
    done: bool = False
    truncated: bool = False
    metrics: dict[str, object] = field(default_factory=dict)
    wall_seconds: float = 0.0

    @property
    def total_reward(self) -> float:
        return sum(self.rewards)

    @property
    def outcome_reward(self) -> float:
        """The part that is for success: what the environment reports as such, else all of it."""
        reported = self.metrics.get("outcome_reward", self.total_reward)
        return float(reported) if isinstance(reported, Real) else self.total_reward


class Episode:
    """One episode of an environment with `def` or `async def` methods, whose return values are checked.

    Cannot be used on a running event loop: use a thread there.
    """

    def __init__(self, env: Env) -> None:
        self.env = env
        self._loop: asyncio.AbstractEventLoop | None = None

    def init(self, prompt: ConversationType, seed: int | None = None) -> ConversationType:
        """Start the episode; `seed` is handed on if the environment takes one. Returns the first messages."""
        arguments = (prompt, seed) if has_seed_argument(self.env) else (prompt,)
        answer = self._finish(self.env.init(*arguments))
        if not (isinstance(answer, tuple) and len(answer) == 2):
            raise ContractError(f"init must return (messages, info); got {answer!r:.200}")
        return check_messages("init", answer[0])

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """One turn, with what it gave checked."""
        return check_step_output(self._finish(self.env.step(action)))

    def metrics(self) -> dict[str, object]:
        get_metrics = getattr(self.env, "get_metrics", None)
        return dict(self._finish(get_metrics())) if get_metrics is not None else {}

    def close(self) -> None:
        """Close the environment. May be called more than once."""
        try:
            self._finish(self.env.close())
        finally:
            if self._loop is not None:
                self._loop.close()
                self._loop = None

    def __enter__(self) -> "Episode":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _finish(self, value: object) -> Any:
        """Await what an `async def` gave, on one event loop for the whole episode: clients are bound to theirs."""
        if not inspect.isawaitable(value):
            return value
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        return self._loop.run_until_complete(_to_coroutine(value))


async def _to_coroutine(awaitable: Awaitable[object]) -> object:
    return await awaitable


def has_seed_argument(env: Env) -> bool:
    """Check whether `init` accepts a seed."""
    return "seed" in inspect.signature(env.init).parameters


def check_messages(method: str, messages: object) -> ConversationType:
    """Chat messages as they should be. Raises ContractError."""
    if not isinstance(messages, list) or not all(isinstance(m, dict) and "role" in m for m in messages):
        raise ContractError(f"{method} must return a list of chat messages, each with a role; got {messages!r:.200}")
    return messages


def check_step_output(output: object) -> BaseTextEnvStepOutput:
    """Return a step's output as it should be. Raises ContractError."""
    if not isinstance(output, dict):
        raise ContractError(f"step must return a dict with observations, reward, done; got {output!r:.200}")
    missing = [key for key in ("observations", "reward", "done") if key not in output]
    if missing:
        raise ContractError(f"step must return {', '.join(missing)}; it returned {', '.join(map(str, output))}")
    if to_finite(output["reward"]) is None:
        raise ContractError(f"step must return a finite number as reward; got {describe(output['reward'])}")
    if not isinstance(output["done"], bool):
        raise ContractError(f"step must return done as a bool; got {output['done']!r:.200}")
    truncated = output.get("truncated", False)
    if not isinstance(truncated, bool) or (truncated and not output["done"]):
        raise ContractError(
            f"step must return truncated as a bool, and True only together with done; got truncated {truncated!r} and "
            f"done {output['done']}"
        )
    check_messages("step", output["observations"])
    return output  # pyright: ignore[reportReturnType]


def run_episode(
    env: Env, prompt: ConversationType, policy: Policy, *, seed: int | None = None, max_steps: int = 1000
) -> EpisodeResult:
    """Play an episode to its end, or for `max_steps` turns, and close the environment.

    Raises whatever the environment or the policy raises, and ContractError.
    """
    started = time.perf_counter()
    with Episode(env) as episode:
        result = EpisodeResult(messages=list(episode.init(prompt, seed)))
        while not result.done and len(result.rewards) < max_steps:
            action = policy(list(result.messages))
            output = episode.step(action)
            result.messages += [{"role": "assistant", "content": action}, *output["observations"]]
            result.rewards.append(float(output["reward"]))
            result.done = output["done"]
            result.truncated = output.get("truncated", False)
        result.metrics = episode.metrics()
    result.wall_seconds = time.perf_counter() - started
    return result

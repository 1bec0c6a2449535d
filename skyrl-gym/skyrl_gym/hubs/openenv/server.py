"""A text environment as an OpenEnv server: each session plays dataset rows, an action is the text of one turn."""

import random
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

from openenv.core.env_server.http_server import create_fastapi_app  # pyright: ignore[reportMissingImports]
from openenv.core.env_server.interfaces import Environment  # pyright: ignore[reportMissingImports]
from openenv.core.env_server.types import Action, Observation, State  # pyright: ignore[reportMissingImports]

import skyrl_gym
from skyrl_gym.envs.base_text_env import Example, MessageType
from skyrl_gym.episode import Episode


class TextAction(Action):
    """Text of one turn of the model."""

    text: str


class MessagesObservation(Observation):
    """Messages that answer the model; the prompt at first."""

    messages: list[MessageType] = []  # noqa: RUF012  # a pydantic field


class RowEnvironment(Environment):
    """Session of one environment.

    Args:
        env_id: id of the environment, or `module:Class`.
        rows: the tasks.
        env_config: settings of the environment; they override the settings of an example.
    """

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, env_id: str, rows: Sequence[Example], env_config: dict[str, object]) -> None:
        super().__init__()
        self.env_id, self.rows, self.env_config = env_id, rows, env_config
        self._episode: Episode | None = None
        self._state = State()

    def reset(
        self, seed: int | None = None, episode_id: str | None = None, index: int | None = None, **kwargs: object
    ) -> MessagesObservation:
        """Play the row of that index; without one, the row that the seed draws. Raises IndexError."""
        self.close()
        row = self.rows[random.Random(seed).randrange(len(self.rows)) if index is None else index]
        env = skyrl_gym.make(
            self.env_id, env_config={**row.env_config, **self.env_config} or None, extras=dict(row.extras)
        )
        self._episode = Episode(env)
        self._state = State(episode_id=episode_id or uuid4().hex, step_count=0)
        return MessagesObservation(messages=self._episode.init(list(row.prompt), seed))

    def step(self, action: TextAction, timeout_s: float | None = None, **kwargs: object) -> MessagesObservation:
        """Take one step. Raises RuntimeError without a started episode."""
        if self._episode is None:
            raise RuntimeError("step before reset, or after the end of the episode")
        output = self._episode.step(action.text)
        self._state.step_count += 1
        metadata: dict[str, object] = {}
        if output["done"]:
            metadata = {"truncated": output.get("truncated", False), "metrics": self._episode.metrics()}
            self.close()
        return MessagesObservation(
            messages=output["observations"], reward=float(output["reward"]), done=output["done"], metadata=metadata
        )

    @property
    def state(self) -> State:
        return self._state

    def close(self) -> None:
        if self._episode is not None:
            self._episode.close()
            self._episode = None


def make_app(env_id: str, rows: Sequence[Example], env_config: dict[str, object], max_sessions: int) -> Any:
    """Return the FastAPI application."""
    return create_fastapi_app(
        lambda: RowEnvironment(env_id, rows, env_config),
        TextAction,
        MessagesObservation,
        max_concurrent_envs=max_sessions,
        env_name=env_id,
    )

"""The text environments as Gymnasium environments: `reset`, spaces, `terminated` and `truncated`.

    import gymnasium, skyrl_gym.gymnasium_envs
    env = gymnasium.make("skyrl_gym/gsm8k", rows=rows)          # or, with the import in the id:
    env = gymnasium.make("skyrl_gym.gymnasium_envs:skyrl_gym/gsm8k", rows=rows)

An observation is the text of the newest messages, an action the text of one turn. Trainers do not use this view: they
need messages with their roles, which are in `info["messages"]`. The opposite direction, a Gymnasium environment as a
text environment, is the environment `gymnasium`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium

import skyrl_gym
from skyrl_gym.envs.base_text_env import BaseTextEnv, ConversationType, text_of
from skyrl_gym.envs.registration import env_class_of
from skyrl_gym.episode import Episode
from skyrl_gym.error import Error

NAMESPACE = "skyrl_gym"
MAX_SAMPLE_LENGTH = 100

Info = dict[str, Any]
"""Gymnasium's `info` and `options`: whatever an environment adds."""


class AnyText(gymnasium.spaces.Text):
    """Space of all strings. Samples are short and alphanumeric."""

    def __init__(self) -> None:
        super().__init__(max_length=MAX_SAMPLE_LENGTH, min_length=0)

    def contains(self, x: object) -> bool:
        return isinstance(x, str)


class GymnasiumView(gymnasium.Env[str, str]):
    """Gymnasium view of a registered text environment. Each episode plays one dataset row, drawn by the seed of
    `reset`.

    Args:
        env_id: id of the environment, as for `skyrl_gym.make`.
        rows: dataset rows: a `prompt` and the columns that the environment reads. The environment's examples if None.
        env_config: settings of the environment. They override the settings of an example.
        render_mode: "ansi", with which `render` returns the conversation as text, or None.
    """

    metadata: dict[str, Any] = {"render_modes": ["ansi"], "render_fps": 1}  # noqa: RUF012  # Gymnasium's attribute

    def __init__(
        self,
        env_id: str,
        rows: Sequence[Mapping[str, Any]] | None = None,
        env_config: Mapping[str, object] | None = None,
        render_mode: str | None = None,
    ) -> None:
        """Raises Error: no such environment, or there are neither rows nor examples."""
        self.env_id = env_id
        self.env_config = env_config
        self.rows = list(rows) if rows is not None else _examples(env_id, env_config or {})
        if not self.rows:
            raise Error(f"{env_id} has no examples: pass dataset rows, gymnasium.make({env_id!r}, rows=[...])")
        self.render_mode = render_mode
        self.observation_space = AnyText()
        self.action_space = AnyText()
        self._episode: Episode | None = None
        self._messages: ConversationType = []

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[str, Info]:
        """Start an episode. `options["row"]` is the index of the row to play, which is else drawn at random."""
        super().reset(seed=seed)
        self.close()
        index = (options or {}).get("row")
        index = int(self.np_random.integers(len(self.rows))) if index is None else index
        row = dict(self.rows[index])
        prompt = row.pop("prompt", None)
        if prompt is None:
            raise Error(f"row {index} has no column `prompt`")
        env = skyrl_gym.make(self.env_id, env_config=row.pop("env_config", self.env_config), extras=row)
        self._episode = Episode(env)
        self._messages = []
        return self._add(self._episode.init(list(prompt), seed), {"row": index})

    def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
        """Take one turn. Raises Error before the first `reset`."""
        if self._episode is None:
            raise Error("step before reset")
        output = self._episode.step(action)
        self._messages.append({"role": "assistant", "content": action})
        info = dict(output.get("metadata") or {})
        truncated = output.get("truncated", False)
        if output["done"]:
            info["metrics"] = self._episode.metrics()
        text, info = self._add(output["observations"], info)
        return text, float(output["reward"]), output["done"] and not truncated, truncated, info

    def render(self) -> str | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        if self.render_mode != "ansi":
            return None
        return "\n".join(f"{message['role']}: {text_of(message)}" for message in self._messages)

    def close(self) -> None:
        if self._episode is not None:
            self._episode.close()
            self._episode = None

    def _add(self, messages: ConversationType, info: Info) -> tuple[str, Info]:
        """Return the text of new messages, and `info` with the messages themselves."""
        self._messages += messages
        return "\n".join(text_of(message) for message in messages), info | {"messages": list(messages)}


def _examples(env_id: str, env_config: Mapping[str, object]) -> list[dict[str, Any]]:
    env_class = env_class_of(skyrl_gym.spec(env_id))
    if env_class is None or not issubclass(env_class, BaseTextEnv):
        return []
    return [
        {"prompt": example.prompt, "env_config": {**example.env_config, **env_config}, **example.extras}
        for example in env_class.examples()
    ]


def register_all() -> None:
    """Register every environment of skyrl_gym with Gymnasium, as `skyrl_gym/<id>`; those registered already stay."""
    for env_id in skyrl_gym.registry:
        name = f"{NAMESPACE}/{env_id}"
        if name not in gymnasium.registry:
            entry_point = f"{GymnasiumView.__module__}:{GymnasiumView.__name__}"
            gymnasium.register(name, entry_point=entry_point, kwargs={"env_id": env_id})


register_all()

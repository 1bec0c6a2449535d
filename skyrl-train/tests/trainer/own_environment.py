"""A user's file: an environment with settings of its own."""

from dataclasses import dataclass
from typing import Any

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput


@dataclass(kw_only=True)
class LetterConfig:
    """Settings of `LetterEnv`."""

    letter: str = "e"
    """The letter that is counted."""


class LetterEnv(BaseTextEnv):
    """The share of one letter in the answer."""

    config_class = LetterConfig

    def __init__(self, env_config: Any = None, extras: Any = None):
        super().__init__()
        self._letter = LetterConfig(**(env_config or {})).letter

    def step(self, action: str) -> BaseTextEnvStepOutput:
        reward = action.count(self._letter) / max(1, len(action))
        return BaseTextEnvStepOutput(observations=[], reward=reward, done=True, metadata={"letter": self._letter})

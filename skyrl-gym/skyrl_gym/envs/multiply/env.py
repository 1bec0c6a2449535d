r"""Multiplication over several turns; the answer stands in `\boxed{}`."""

import re
from typing import Any

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput, ground_truth_of

DEFAULT_MAX_TURNS = 5
_BOXED = re.compile(r"\\boxed\{([^{}]*)\}")


class MultiplyEnv(BaseTextEnv):
    """Ends at the right answer or after `max_turns`. Right: 1. A wrong boxed answer: 0.5 in the last turn, 0 before."""

    def __init__(self, env_config: Any = None, extras: dict[str, Any] | None = None):
        super().__init__()
        extras = extras or {}
        self.ground_truth = str(ground_truth_of(extras)).strip()
        self.max_turns: int = extras.get("max_turns", DEFAULT_MAX_TURNS)

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.turns += 1
        found = _BOXED.search(action)
        answer = found.group(1).strip() if found else None
        is_right = answer == self.ground_truth
        done = is_right or self.turns >= self.max_turns
        return BaseTextEnvStepOutput(
            observations=[] if done else [_reply(answer)],
            reward=_reward(answer, is_right, done),
            done=done,
            metadata={"parsed_answer": answer},
        )


def _reward(answer: str | None, is_right: bool, done: bool) -> float:
    if is_right:
        return 1.0
    return 0.5 if done and answer is not None else 0.0


def _reply(answer: str | None) -> dict[str, Any]:
    if answer is None:
        content = r"There is no answer in \boxed{}. Work it out step by step and put the product in \boxed{}."
    else:
        content = rf"{answer} is not right. Check your steps and put the product in \boxed{{}}."
    return {"role": "user", "content": content}

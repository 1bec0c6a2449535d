r"""Multiplication over several turns; the answer is in `\boxed{}`."""

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput, Example, ground_truth_of, max_turns_of
from skyrl_gym.graders import Score, reward_of
from skyrl_gym.graders.math import grade_first_box

DEFAULT_MAX_TURNS = 5
BOXED_WRONG_SCORE = 0.5
"""Reward of a wrong boxed answer in the last turn."""

_QUOTED_CHARACTERS = 100


class MultiplyEnv(BaseTextEnv):
    r"""Multiplication over several turns: the episode ends at the right answer or after `max_turns`. The first
    `\boxed{}` without braces inside counts.

    Right: 1. A wrong boxed answer: 0.5 in the last turn, 0 before. `outcome_reward` is 1 or 0.
    """

    def __init__(self, env_config: object = None, extras: dict[str, object] | None = None):
        super().__init__()
        extras = extras or {}
        self.ground_truth = str(ground_truth_of(extras)).strip()
        self.max_turns = max_turns_of(extras, DEFAULT_MAX_TURNS)
        self.solved = False

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.turns += 1
        grade = grade_first_box(action, self.ground_truth)
        answer = grade.prediction if isinstance(grade, Score) else None
        is_right = reward_of(grade) == 1.0
        self.solved |= is_right
        done = self.solved or self.turns >= self.max_turns
        shaping = BOXED_WRONG_SCORE if done and answer is not None else 0.0
        return BaseTextEnvStepOutput(
            observations=[] if done else [_make_reply(answer)],
            reward=1.0 if is_right else shaping,
            done=done,
            truncated=done and not self.solved,
            metadata={"parsed_answer": answer},
        )

    def get_metrics(self) -> dict[str, object]:
        return {"turns": self.turns, "outcome_reward": float(self.solved)}

    @classmethod
    def examples(cls) -> list[Example]:
        instruction = r"Work it out step by step and put the product in \boxed{}."
        return [
            Example.ruled(f"What is {a} * {b}? {instruction}", str(a * b), rf"{a} * {b} = \boxed{{{a * b}}}")
            for a, b in ((37, 48), (91, 26), (73, 59), (84, 67))
        ]


def _make_reply(answer: str | None) -> dict[str, str]:
    if answer is None:
        content = r"There is no answer in \boxed{}. Work it out step by step and put the product in \boxed{}."
    else:
        quoted = answer if len(answer) <= _QUOTED_CHARACTERS else answer[:_QUOTED_CHARACTERS] + "..."
        content = rf"{quoted} is not right. Check your steps and put the product in \boxed{{}}."
    return {"role": "user", "content": content}

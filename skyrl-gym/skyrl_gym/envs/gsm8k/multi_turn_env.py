"""GSM8K over several turns, with a reward in every turn: a small one for a well-formed answer, 1 for the right one."""

from typing import Any

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput, Example, ground_truth_of, max_turns_of
from skyrl_gym.envs.gsm8k import problems
from skyrl_gym.finite_numbers import default_aggregate_metrics
from skyrl_gym.graders import Score, reward_of
from skyrl_gym.graders.math import grade_number

DEFAULT_MAX_TURNS = 5
FORMAT_SCORE = 0.2
"""Total reward of an episode of wrong but well-formed answers."""

TRY_AGAIN = "That is not the answer yet. Check your reasoning, then give your tentative answer as `#### ANSWER`."
LAST_TURN = "This is your last turn. Give only the final number, as `#### ANSWER`."


class GSM8kMultiTurnEnv(BaseTextEnv):
    """GSM8K over several turns: the episode ends at the right answer or after `max_turns` (from the extras, else from
    their `extra_info`, else 5).

    What the right answer earns is also reported as `outcome_reward`, without the turns' format rewards.
    """

    def __init__(self, env_config: object = None, extras: dict[str, Any] | None = None):
        super().__init__()
        extras = extras or {}
        self.ground_truth = str(ground_truth_of(extras))
        self.max_turns = max_turns_of(extras, max_turns_of(extras.get("extra_info") or {}, DEFAULT_MAX_TURNS))
        self.format_score_per_turn = FORMAT_SCORE / self.max_turns
        self.solved = False

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.turns += 1
        grade = grade_number(action, self.ground_truth)
        is_right = reward_of(grade) == 1.0
        self.solved |= is_right
        done = self.solved or self.turns >= self.max_turns
        shaping = self.format_score_per_turn if isinstance(grade, Score) else 0.0
        return BaseTextEnvStepOutput(
            observations=[] if done else [self._make_reply()],
            reward=1.0 if is_right else shaping,
            done=done,
            truncated=done and not self.solved,
            metadata={},
        )

    def _make_reply(self) -> dict[str, object]:
        content = LAST_TURN if self.max_turns - self.turns == 1 else TRY_AGAIN
        return {"role": "user", "content": content}

    def get_metrics(self) -> dict[str, object]:
        return {"steps": self.turns, "outcome_reward": float(self.solved)}

    @classmethod
    def examples(cls) -> list[Example]:
        return problems.examples()

    @staticmethod
    def aggregate_metrics(metrics: list[dict[str, object]]) -> dict[str, object]:
        return {
            "avg_steps" if key == "steps" else key: mean for key, mean in default_aggregate_metrics(metrics).items()
        }

r"""Mathematics in one turn: 1 if what the last `\boxed{}` holds means the same as the expected answer, else 0."""

from dataclasses import dataclass

from skyrl_gym.envs.base_text_env import (
    BaseTextEnv,
    BaseTextEnvStepOutput,
    ConversationType,
    Example,
    ground_truth_of,
    last_user_text,
    typed_config,
)
from skyrl_gym.error import TaskError
from skyrl_gym.graders import Invalid, Score, Timeout, reward_of
from skyrl_gym.graders.math import grade_last_box

INSTRUCTION = r"Please reason step by step, and put your final answer within \boxed{}."
"""Instruction at the end of the prompts of datasets for this environment."""


@dataclass(frozen=True)
class MathEnvConfig:
    """Settings of the `math` environment."""

    format_score: float = 0.0
    """Reward of a wrong answer that is in a box. Not part of `outcome_reward`."""


class MathEnv(BaseTextEnv):
    r"""`extras["reward_spec"]["ground_truth"]` is the answer in LaTeX, without `\boxed{}`.

    Answers are compared by value (`skyrl_gym.graders.math.grade_equivalence`), where `\frac{1}{2}` is `0.5`, but an
    expression that has yet to be worked out is no answer. Only the last box counts. The prompt should ask for the box;
    see `INSTRUCTION`.
    """

    config_class = MathEnvConfig

    def __init__(self, env_config: object = None, extras: dict[str, object] | None = None):
        super().__init__()
        self.config = typed_config(MathEnvConfig, env_config)
        self.ground_truth = str(ground_truth_of(extras or {})).strip()
        if not self.ground_truth:
            raise TaskError("reward_spec.ground_truth is empty; it must be the expected answer")
        self.question = ""
        self.outcome_reward = 0.0
        self.answered = self.timed_out = False

    def init(self, prompt: ConversationType) -> tuple[ConversationType, dict[str, object]]:
        self.question = last_user_text(prompt)
        return prompt, {}

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.turns += 1
        grade = grade_last_box(action, self.ground_truth, question=self.question)
        self.outcome_reward = reward_of(grade)
        self.answered, self.timed_out = isinstance(grade, Score), isinstance(grade, Timeout)
        reward = self.config.format_score if self.answered and not self.outcome_reward else self.outcome_reward
        metadata = {
            "parsed_answer": grade.prediction if isinstance(grade, Score) else None,
            "reason": grade.reason if isinstance(grade, Invalid) else None,
        }
        return BaseTextEnvStepOutput(observations=[], reward=reward, done=True, metadata=metadata)

    def get_metrics(self) -> dict[str, object]:
        return {"outcome_reward": self.outcome_reward, "answered": self.answered, "timed_out": self.timed_out}

    @classmethod
    def examples(cls) -> list[Example]:
        return [Example.ruled(f"{problem} {INSTRUCTION}", answer, solution) for problem, answer, solution in _PROBLEMS]


_PROBLEMS = [
    (
        "What is the sum of the first 37 positive odd integers?",
        "1369",
        r"The sum of the first $n$ odd integers is $n^2$, so it is $37^2 = \boxed{1369}$.",
    ),
    (
        r"A fair die is rolled twice. How likely is a sum of at least 10, as a common fraction?",
        r"\frac{1}{6}",
        r"The sums 10, 11, 12 come from $3 + 2 + 1 = 6$ of 36 rolls: $\frac{6}{36}$, that is $\boxed{\dfrac16}$.",
    ),
    (
        r"Find the positive root of $x^2 - 6x - 11 = 0$.",
        r"3+2\sqrt{5}",
        r"$(x - 3)^2 = 20$, so $x = 3 + \sqrt{20} = \boxed{2\sqrt{5} + 3}$.",
    ),
    (
        r"For which real $x$ is $x^2 < 49$? Answer with an interval.",
        r"(-7,7)",
        r"$|x| < 7$, so $x$ lies in $\boxed{(-7, 7)}$.",
    ),
]

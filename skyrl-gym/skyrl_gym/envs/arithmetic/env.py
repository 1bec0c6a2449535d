"""Arithmetic in one turn: 1 for the right number in the last `<answer>` tag, else 0."""

from skyrl_gym.envs.arithmetic.problems import example_of, extract_answer, make_problems
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput, Example, ground_truth_of


class ArithmeticEnv(BaseTextEnv):
    """`extras["reward_spec"]["ground_truth"]` is the answer as text; see `problems.make_problems` for rows."""

    def __init__(self, env_config: object = None, extras: dict[str, object] | None = None):
        super().__init__()
        self.ground_truth = str(ground_truth_of(extras or {})).strip()
        self.answer: str | None = None

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.turns += 1
        self.answer = extract_answer(action)
        reward = 1.0 if self.answer == self.ground_truth else 0.0
        return BaseTextEnvStepOutput(observations=[], reward=reward, done=True, metadata={"parsed_answer": self.answer})

    def get_metrics(self) -> dict[str, object]:
        return {"answered": self.answer is not None}

    @classmethod
    def examples(cls) -> list[Example]:
        return [example_of(row) for row in make_problems(4, num_digits=4, operators="+-", seed=1)]

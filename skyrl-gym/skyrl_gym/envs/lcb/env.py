"""Competitive programming with the tests of LiveCodeBench (https://arxiv.org/abs/2403.07974), in one turn."""

from typing import Any

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput, Example, ground_truth_of, typed_config
from skyrl_gym.graders import Timeout, reward_of
from skyrl_gym.graders.code import CodeSettings, extract_code, grade_answer, parse_tests


class LCBEnv(BaseTextEnv):
    """1 if the program in the last fenced block passes every test, else 0.

    `extras["reward_spec"]["ground_truth"]` is JSON text: a list of `{"input", "output", "testtype": "stdin" |
    "functional", "metadata": {"func_name"}}`; see `skyrl_gym.graders.code.parse_tests`.
    """

    config_class = CodeSettings

    def __init__(self, env_config: Any = None, extras: dict[str, Any] | None = None):
        super().__init__()
        self.settings = typed_config(CodeSettings, env_config)
        self.tests = parse_tests(ground_truth_of(extras or {}))
        self.metrics: dict[str, Any] = {}

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.turns += 1
        code = extract_code(action)
        grade = grade_answer(action, self.tests, self.settings)
        reward = reward_of(grade)
        self.metrics = {
            "outcome_reward": float(reward == 1.0),
            "has_code": code is not None,
            "timed_out": isinstance(grade, Timeout),
        }
        return BaseTextEnvStepOutput(observations=[], reward=reward, done=True, metadata={"parsed_code": code})

    def get_metrics(self) -> dict[str, Any]:
        return self.metrics

    @classmethod
    def examples(cls) -> list[Example]:
        from skyrl_gym.envs.lcb.examples import make_examples

        return make_examples()

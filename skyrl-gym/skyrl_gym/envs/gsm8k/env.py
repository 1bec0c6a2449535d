"""GSM8K in one turn: 1 for the right number after `#### `, else 0."""

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput, Example, ground_truth_of
from skyrl_gym.envs.gsm8k import problems
from skyrl_gym.graders import reward_of
from skyrl_gym.graders.math import grade_number


class GSM8kEnv(BaseTextEnv):
    """`extras["reward_spec"]["ground_truth"]` is the answer as text. The number after the first `#### ` counts."""

    def __init__(self, env_config: object = None, extras: dict[str, object] | None = None):
        super().__init__()
        self.ground_truth = str(ground_truth_of(extras or {}))

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.turns += 1
        reward = reward_of(grade_number(action, self.ground_truth))
        return BaseTextEnvStepOutput(observations=[], reward=reward, done=True, metadata={})

    @classmethod
    def examples(cls) -> list[Example]:
        return problems.examples()

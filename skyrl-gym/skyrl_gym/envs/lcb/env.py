"""Competitive programming with the tests of LiveCodeBench (https://arxiv.org/abs/2403.07974), in one turn."""

from skyrl_gym.envs.base_text_env import Example
from skyrl_gym.envs.code.env import CodeEnv


class LCBEnv(CodeEnv):
    """1 if the program in the last fenced block passes every test, else 0.

    `extras["reward_spec"]["ground_truth"]` is JSON text: a list of `{"input", "output", "testtype": "stdin" |
    "functional", "metadata": {"func_name"}}`; see `skyrl_gym.graders.code.parse_tests`.
    """

    @classmethod
    def examples(cls) -> list[Example]:
        from skyrl_gym.envs.lcb.examples import make_examples

        return make_examples()

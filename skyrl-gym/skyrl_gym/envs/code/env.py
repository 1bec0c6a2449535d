"""Programming in one turn, judged by tests: assertions as in HumanEval (https://arxiv.org/abs/2107.03374) and MBPP
(https://arxiv.org/abs/2108.07732), or programs with standard input and output as in CodeContests.
"""

from collections.abc import Callable

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput, Example, ground_truth_of, typed_config
from skyrl_gym.graders import Timeout, reward_of
from skyrl_gym.graders.code import CodeSettings, extract_code, grade_answer, parse_tests


class CodeEnv(BaseTextEnv):
    """1 if the code in the last fenced block passes every test, else 0 (or the share it passes: `partial_credit`).

    `extras["reward_spec"]["ground_truth"]` is a mapping, or its JSON text:

        {"tests": ["assert add(1, 2) == 3", ...], "entry_point": "add", "setup": ""}          MBPP
        {"tests": ["def check(candidate): ..."], "entry_point": "add", "prompt": "def add"}   HumanEval
        {"tests": [{"input": "1 2", "output": "3"}, ...]}                                     standard input and output

    All but `tests` may be left out; `skyrl_gym.graders.code.parse_tests` says more.
    """

    config_class = CodeSettings

    def __init__(self, env_config: object = None, extras: dict[str, object] | None = None):
        super().__init__()
        self.settings = typed_config(CodeSettings, env_config)
        self.tests = parse_tests(ground_truth_of(extras or {}))
        self.metrics: dict[str, object] = {}

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

    def get_metrics(self) -> dict[str, object]:
        return self.metrics

    @classmethod
    def examples(cls) -> list[Example]:
        from skyrl_gym.envs.code.examples import make_examples

        return make_examples()

    @classmethod
    def cheats(cls) -> list[Callable[[Example], list[str]]]:
        """Return cheating policies that the audit tries in addition to the generic ones."""
        from skyrl_gym.envs.code.examples import exit_early, make_always_equal, patch_builtins

        return [make_always_equal, exit_early, patch_builtins]

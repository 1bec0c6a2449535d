"""AIME in one turn: 1 for the right final `Answer: ...`, -1 for anything else."""

from skyrl_gym.envs.aime.utils import compute_score
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput, Example, ground_truth_of

INSTRUCTION = "Solve the problem step by step. End with a line that reads `Answer:`, followed by the final answer."


class AIMEEnv(BaseTextEnv):
    """`extras["reward_model"]["ground_truth"]` is the answer as text: this dataset has another column than the others.

    The last 300 characters are looked at; answers are compared as text after normalisation, so 0.5 is not 1/2.
    """

    def __init__(self, env_config: object = None, extras: dict[str, object] | None = None):
        super().__init__()
        self.ground_truth = str(ground_truth_of(extras or {}, "reward_model"))
        self.is_right = False

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.turns += 1
        result = compute_score(action, self.ground_truth)
        self.is_right = result["acc"]
        metadata = {"acc": result["acc"], "pred": result["pred"]}
        return BaseTextEnvStepOutput(observations=[], reward=result["score"], done=True, metadata=metadata)

    def get_metrics(self) -> dict[str, object]:
        return {"acc": self.is_right}

    @classmethod
    def examples(cls) -> list[Example]:
        return [
            Example(
                prompt=[{"role": "user", "content": f"{problem} {INSTRUCTION}"}],
                extras={"reward_model": {"style": "rule", "ground_truth": answer}},
                oracle=[solution],
            )
            for problem, answer, solution in _PROBLEMS
        ]


_PROBLEMS = [
    (
        "Find the number of positive integers at most 1000 that are divisible by neither 3 nor 5.",
        "533",
        "333 are divisible by 3, 200 by 5 and 66 by 15: 1000 - (333 + 200 - 66) = 533.\nAnswer: 533",
    ),
    (
        "Find the remainder when $2^{100}$ is divided by 1000.",
        "376",
        "Modulo 1000, 2^20 = 576, 2^40 = 776, 2^80 = 176 and 2^100 = 176 * 576 = 376.\nAnswer: 376",
    ),
    (
        "Find the sum of the digits of all integers from 1 to 99.",
        "900",
        "Each digit stands 20 times among 00 to 99: 20 * 45 = 900.\nAnswer: $\\boxed{900}$",
    ),
    (
        "How many diagonals has a convex polygon with 32 sides?",
        "464",
        "32 * 29 / 2 = 464.\nAnswer: 464",
    ),
]

"""Problems that are easy with a calculator and hard without."""

from collections.abc import Sequence

from skyrl_gym.envs.arithmetic import problems

INSTRUCTION = (
    "You may call a calculator by writing an expression as <calculator>6*7</calculator>; you will be told its value. "
    "Then give the final number inside <answer> tags, as in <answer>42</answer>."
)


def make_problems(
    num_problems: int,
    num_digits: int = 2,
    operators: Sequence[str] = "*",
    seed: int = 0,
    *,
    instruction: str = INSTRUCTION,
) -> list[dict[str, object]]:
    """Dataset rows for the `calculator` environment; see `skyrl_gym.envs.arithmetic.problems.make_problems`."""
    return problems.make_problems(
        num_problems, num_digits, operators, seed, env_class="calculator", instruction=instruction
    )

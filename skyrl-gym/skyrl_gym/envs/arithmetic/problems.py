"""Arithmetic problems without end, and the format of their answers."""

import random
from collections.abc import Callable, Sequence
from typing import Any

from skyrl_gym.envs.base_text_env import Example
from skyrl_gym.tags import last_tagged

INSTRUCTION = "Work it out, then give the final number inside <answer> tags, as in <answer>42</answer>."

_OPERATORS: dict[str, Callable[[int, int], int]] = {
    "+": lambda left, right: left + right,
    "-": lambda left, right: left - right,
    "*": lambda left, right: left * right,
}


def extract_answer(text: str) -> str | None:
    """Extract the last `<answer>`, without thousands separators, or return None."""
    answer = last_tagged(text, "answer")
    return answer.strip().replace(",", "") if answer is not None else None


def make_problems(
    num_problems: int,
    num_digits: int = 2,
    operators: Sequence[str] = "+",
    seed: int = 0,
    *,
    env_class: str = "arithmetic",
    instruction: str = INSTRUCTION,
) -> list[dict[str, object]]:
    """Dataset rows of two-operand problems, the same for the same arguments. Problems may repeat.

    Args:
        num_problems: how many rows.
        num_digits: digits of both operands; the first one is not 0 (a single digit may be).
        operators: what to choose from: `+`, `-`, `*`.
        seed: two different seeds give two independent sets.
        env_class: the environment that will judge the answers.
        instruction: follows the problem in the prompt. Empty for a model that knows nothing but arithmetic.

    Raises:
        ValueError: an unknown operator, or no digits.
    """
    unknown = set(operators) - set(_OPERATORS)
    if unknown or not operators or num_digits < 1:
        raise ValueError(
            f"make_problems needs operators among {' '.join(_OPERATORS)} and num_digits >= 1; "
            f"got operators {list(operators)!r} and num_digits {num_digits}"
        )
    draw = random.Random(seed)
    lowest = 0 if num_digits == 1 else 10 ** (num_digits - 1)
    rows = []
    for index in range(num_problems):
        left, right = (draw.randint(lowest, 10**num_digits - 1) for _ in range(2))
        symbol = draw.choice(list(operators))
        rows.append(_make_row(index, f"{left}{symbol}{right}", _OPERATORS[symbol](left, right), env_class, instruction))
    return rows


def _make_row(index: int, problem: str, answer: int, env_class: str, instruction: str) -> dict[str, object]:
    content = f"{problem} {instruction}" if instruction else problem
    return {
        "prompt": [{"role": "user", "content": content}],
        "env_class": env_class,
        "data_source": env_class,
        "reward_spec": {"method": "rule", "ground_truth": str(answer)},
        "extra_info": {"index": index, "problem": problem},
    }


def example_of(row: dict[str, Any]) -> Example:
    """Return a row with what a perfect model answers."""
    extras = {name: value for name, value in row.items() if name not in ("prompt", "env_class")}
    return Example(row["prompt"], extras, oracle=[f"<answer>{row['reward_spec']['ground_truth']}</answer>"])

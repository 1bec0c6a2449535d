"""The two quickstart tasks: their problems, their demonstrations, and the size of the model that learns them.

A demonstration follows a strategy that works, or one that does not. After the warm-up the model knows both and mostly
uses the one that does not: what reinforcement learning then changes is which of them it uses, and how carefully.
"""

import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from skyrl_gym.envs.arithmetic.problems import make_problems

Row = dict[str, Any]
Message = dict[str, str]

HELD_OUT_SHARE = 8
"""Inverse of the share of problems that are held out for evaluation."""


@dataclass(frozen=True)
class Task:
    """Settings of one quickstart task."""

    name: str
    """Id of the environment."""
    operators: str
    hidden_size: int
    num_layers: int
    demonstrate: Callable[[str, random.Random], list[Message]]
    """Function from a problem to the messages that follow its prompt."""
    warm_up_steps: int
    warm_up_batch_size: int
    warm_up_learning_rate: float


def is_held_out(problem: str) -> bool:
    """Return True if a problem is for evaluation: a property of its text, so that no two files can disagree about
    it.
    """
    return zlib.crc32(problem.encode()) % HELD_OUT_SHARE == 0


def make_rows(task: Task, num_rows: int, seed: int, held_out: bool = False) -> list[Row]:
    """Dataset rows of two-digit problems, all held out or all not. The prompt is the bare problem."""
    share = 1 / HELD_OUT_SHARE if held_out else 1 - 1 / HELD_OUT_SHARE
    num_candidates = int(1.5 * num_rows / share) + 100  # the share of a random draw varies
    candidates = make_problems(num_candidates, 2, task.operators, seed, env_class=task.name, instruction="")
    rows = [row for row in candidates if is_held_out(row["extra_info"]["problem"]) == held_out]
    return rows[:num_rows]


def demonstrate_addition(problem: str, draw: random.Random) -> list[Message]:
    """One digit at a time with the carry (right), without the carry (often wrong), or an estimate from the tens."""
    left, right = (int(operand) for operand in problem.split("+"))
    strategy = draw.choices(["careful", "forgetful", "estimate"], weights=[0.23, 0.23, 0.54])[0]
    if strategy == "estimate":
        return [_says(_answer(left // 10 * 10 + right // 10 * 10))]
    units = left % 10 + right % 10
    carry = units // 10 if strategy == "careful" else 0
    tens = left // 10 + right // 10 + carry
    steps = f"{left % 10}+{right % 10}={units},{left // 10}+{right // 10}{f'+{carry}' if carry else ''}={tens}"
    return [_says(steps + _answer(10 * tens + units % 10))]


def demonstrate_calculator(problem: str, draw: random.Random) -> list[Message]:
    """Asks the calculator and repeats what it says (right), or repeats the first number it sees (wrong)."""
    symbol = next(symbol for symbol in _EVALUATE if symbol in problem)
    operands = [int(operand) for operand in problem.split(symbol)]
    if draw.random() < 0.6:
        return [_says(_answer(operands[0]))]
    value = _EVALUATE[symbol](*operands)
    return [
        _says(f"<calculator>{problem}</calculator>"),
        {"role": "user", "content": f"<result>{value}</result>"},
        _says(_answer(value)),
    ]


_EVALUATE: dict[str, Callable[[int, int], int]] = {
    "+": lambda left, right: left + right,
    "*": lambda left, right: left * right,
    "-": lambda left, right: left - right,
}


def _says(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _answer(value: int) -> str:
    return f"<answer>{value}</answer>"


TASKS = {
    task.name: task
    for task in (
        Task("arithmetic", "+", 64, 2, demonstrate_addition, 600, 64, 4e-3),
        Task("calculator", "+-*", 64, 3, demonstrate_calculator, 350, 64, 4e-3),
    )
}

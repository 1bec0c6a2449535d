"""Problems of the examples: additions worked out in writing, and problems that a calculator solves.

Plain text, so that any model can be asked. Knows no server and no model.
"""

import operator
import random
import re
from dataclasses import dataclass

HINT = "Step by step. "
TOOL_PROMPT = "Q: {problem}\nWrite 'calc: expression' or 'A: number'.\n"
_OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


@dataclass(frozen=True)
class Problem:
    left: int
    symbol: str
    right: int

    def __str__(self) -> str:
        return f"{self.left}{self.symbol}{self.right}"

    @property
    def answer(self) -> int:
        return _OPERATORS[self.symbol](self.left, self.right)

    @property
    def prompt(self) -> str:
        """Prompt that the model continues by one line."""
        return f"Q: {self}\nA:"

    @property
    def tool_prompt(self) -> str:
        """Prompt that the model and the tool continue by lines."""
        return TOOL_PROMPT.format(problem=self)

    def is_solved_by(self, line: str) -> bool:
        """Return True if the line's last number is the answer."""
        numbers = re.findall(r"-?\d+", line)
        return bool(numbers) and int(numbers[-1]) == self.answer


def draw_problem(draw: random.Random, symbols: str = "+", num_digits: int = 2) -> Problem:
    """Draw a problem of two numbers with `num_digits` digits at random."""
    left, right = (draw.randrange(10 ** (num_digits - 1), 10**num_digits) for _ in range(2))
    return Problem(left, draw.choice(symbols), right)


def work_out(problem: Problem, *, carry: bool = True) -> str:
    """The right answer to an addition: ` 7+5=12,4+2+1=7 so 72`. Without carrying it is often wrong."""
    left, right = str(problem.left)[::-1], str(problem.right)[::-1]
    steps, value, carried = [], 0, 0
    for place, (a, b) in enumerate(zip(left, right, strict=True)):
        column = int(a) + int(b) + carried
        steps.append(f"{a}+{b}{'+1' if carried else ''}={column}")
        carried = column // 10 if carry else 0
        value += 10**place * (column if place == len(left) - 1 else column % 10)
    return f" {','.join(steps)} so {value}\n"


def estimate(problem: Problem) -> str:
    """A quick answer to an addition, from the leading digits; nearly always wrong."""
    unit = 10 ** (len(str(problem.left)) - 1)
    return f" {problem.left // unit * unit + problem.right // unit * unit}\n"


def tool_reply(line: str) -> str | None:
    """Return the calculator's reply to a line; None if the line does not call it."""
    if not line.startswith("calc:"):
        return None
    found = re.fullmatch(r"\s*(-?\d{1,9})\s*([-+*])\s*(-?\d{1,9})\s*", line.removeprefix("calc:"))
    return f"= {_OPERATORS[found[2]](int(found[1]), int(found[3]))}\n" if found else "= error\n"

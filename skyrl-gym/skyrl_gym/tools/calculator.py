"""A calculator that reads Python's arithmetic, and nothing else of Python."""

import ast
import operator
import re
from collections.abc import Callable

from skyrl_gym.syntax_trees import parse_source
from skyrl_gym.tools.core import ToolGroup, tool

MAX_EXPRESSION_LENGTH = 200
MAX_RESULT_BITS = 256
MAX_EXPONENT = 64

_ALLOWED = re.compile(r"[0-9.+\-*/%() \t]+")

Number = int | float


class CalculatorError(ValueError):
    """The expression is not arithmetic, or has no result. The text is for the author of the expression."""


def _divide(left: Number, right: Number) -> Number:
    """Divide exactly if the result is whole, so that 84/2 is 42 and not 42.0."""
    if isinstance(left, int) and isinstance(right, int) and right != 0 and left % right == 0:
        return left // right
    return left / right


def _power(base: Number, exponent: Number) -> Number:
    if abs(exponent) > MAX_EXPONENT:
        raise CalculatorError(f"exponent {exponent} is over {MAX_EXPONENT}")
    return base**exponent


_BINARY: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: _divide,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}
_UNARY: dict[type[ast.unaryop], Callable[[Number], Number]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


def evaluate_expression(expression: str) -> Number:
    """Evaluate an expression of numbers, `+ - * / // % **`, signs and parentheses.

    Bounded in length, exponent and size of every intermediate result, so that no expression can take long.

    Raises:
        CalculatorError: any other syntax, a division by zero, or a result that is too large.
    """
    text = expression.strip()
    if len(text) > MAX_EXPRESSION_LENGTH:
        raise CalculatorError(f"the expression is longer than {MAX_EXPRESSION_LENGTH} characters")
    if not _ALLOWED.fullmatch(text):
        raise CalculatorError("only numbers, + - * / // % ** and parentheses are allowed")
    try:
        return _evaluate(parse_source(text, mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError) as failure:
        raise CalculatorError("not an arithmetic expression") from failure
    except ZeroDivisionError as failure:
        raise CalculatorError("division by zero") from failure
    except OverflowError as failure:
        raise CalculatorError("the result is too large") from failure


def _evaluate(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            result = value
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            result = _BINARY[type(op)](_evaluate(left), _evaluate(right))
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            result = _UNARY[type(op)](_evaluate(operand))
        case _:
            raise CalculatorError(f"{ast.unparse(node)!r} is not arithmetic")
    return _check_result(result)


def _check_result(value: Number) -> Number:
    """Negative numbers to a fractional power are complex; 1e400 is infinite: neither is an answer."""
    if isinstance(value, complex) or value != value or value in (float("inf"), float("-inf")):
        raise CalculatorError("the result is not a real number")
    if isinstance(value, int) and value.bit_length() > MAX_RESULT_BITS:
        raise CalculatorError("the result is too large")
    return value


class CalculatorToolGroup(ToolGroup):
    """One tool, `calculator`."""

    def __init__(self) -> None:
        super().__init__(name="CalculatorToolGroup")

    @tool
    def calculator(self, expression: str) -> str:
        """The value of an arithmetic expression, as text. Raises `CalculatorError`."""
        return str(evaluate_expression(expression))

"""Numerical check of antiderivatives, since symbolic algebra takes unbounded time.

Two analytic expressions that agree to many digits at many points are treated as equal. Numbers have 50 digits,
derivatives about as many, and agreement is required to 12.
"""

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

from skyrl_gym.envs.reasoning_gym.expressions import CONSTANTS
from skyrl_gym.syntax_trees import parse_source

Mp = Any
"""Numbers and contexts of mpmath, which has no types."""

DIGITS = 50
TOLERANCE = 1e-12

POINTS = tuple(sign * 0.1317 * 1.3**step for step in range(20) for sign in (1, -1))
"""Between 0.13 and 20 on both sides of zero."""

MIN_POINTS = 4
"""Minimum number of points at which both functions can be evaluated; with fewer they do not count as equal."""

MAX_ARGUMENT = 1e6
"""Maximum argument of functions, and of the logarithm of a power: larger ones are not evaluated, because exponents grow
without bound."""

_OPERATORS: dict[type, Callable[..., Mp]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


def is_antiderivative(formula: str, integrand: str, variable: str) -> bool:
    """Return whether the derivative of `formula` is `integrand`. Both must have passed `find_fault`.

    Compared where the integrand is real, if there are enough such points: on branch cuts equal formulas may differ.
    """
    from mpmath.ctx_mp import MPContext

    context = MPContext()  # of its own: the library's default one is shared by all threads
    context.dps = DIGITS
    value = _apply_function(formula, variable, context)
    expected = {point: _evaluate_at(_apply_function(integrand, variable, context), point, context) for point in POINTS}
    finite = {point: number for point, number in expected.items() if number is not None}
    real = {point: number for point, number in finite.items() if context.im(number) == 0}
    agreed = 0
    for point, number in (real if len(real) >= MIN_POINTS else finite).items():
        derivative = _evaluate_at(lambda x: context.diff(value, x), point, context)
        if derivative is None:
            continue
        if abs(derivative - number) > TOLERANCE * (1 + abs(number)):
            return False
        agreed += 1
    return agreed >= MIN_POINTS


def _evaluate_at(function: Callable[[Mp], Mp], point: float, context: Mp) -> Mp:
    """Evaluate at a point. Returns None where the value is undefined or too large."""
    try:
        number = function(context.mpf(point))
    except (ArithmeticError, ValueError, context.NoConvergence):
        return None
    return number if context.isfinite(number) else None


def _apply_function(formula: str, variable: str, context: Mp) -> Callable[[Mp], Mp]:
    tree = parse_source(formula.strip(), mode="eval").body
    constants = {"pi": context.pi, "E": context.e, "C": context.mpf("0.61803")}
    assert set(constants) == CONSTANTS
    return lambda x: _evaluate_node(tree, {**constants, variable: x}, context)


def _evaluate_node(node: ast.AST, names: Mapping[str, Mp], context: Mp) -> Mp:
    match node:
        case ast.Constant(value=number):
            return context.mpf(str(number))
        case ast.Name(id=name):
            if name not in names:
                raise ValueError(f"{name} has no value")
            return names[name]
        case ast.UnaryOp(op=op, operand=operand):
            return _OPERATORS[type(op)](_evaluate_node(operand, names, context))
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _compute_power(_evaluate_node(left, names, context), _evaluate_node(right, names, context), context)
        case ast.BinOp(left=left, op=op, right=right):
            return _OPERATORS[type(op)](_evaluate_node(left, names, context), _evaluate_node(right, names, context))
        case ast.Call(func=ast.Name(id=name), args=[argument]):
            value = _evaluate_node(argument, names, context)
            if abs(value) > MAX_ARGUMENT:
                raise OverflowError
            return abs(value) if name == "Abs" else getattr(context, name)(value)
    raise ValueError(f"{type(node).__name__} is not part of a formula")


def _compute_power(base: Mp, exponent: Mp, context: Mp) -> Mp:
    if base != 0 and abs(exponent * context.log(abs(base))) > MAX_ARGUMENT:
        raise OverflowError
    return base**exponent

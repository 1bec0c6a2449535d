"""Checks of a model's text before it reaches `eval` or sympy, both of which run code.

Whitelist of syntax, and bounds on the cost of evaluation.
"""

import ast
from collections.abc import Set

from skyrl_gym.syntax_trees import parse_source

_TRIGONOMETRIC = ("sin", "cos", "tan", "cot", "sec", "csc")
FUNCTIONS = frozenset(
    {*_TRIGONOMETRIC, *(f"a{name}" for name in _TRIGONOMETRIC), "sinh", "cosh", "tanh", "asinh", "acosh", "atanh"}
    | {"exp", "log", "ln", "sqrt", "Abs"}
)
CONSTANTS = frozenset({"pi", "E", "C"})

MAX_DIGITS = 60
"""Maximum number of digits of a number."""

_NODES = (
    *(ast.Expression, ast.BinOp, ast.UnaryOp, ast.Call, ast.Name, ast.Constant, ast.Load),
    *(ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow, ast.UAdd, ast.USub),
)

_PARSE_ERRORS = (SyntaxError, ValueError, TypeError, MemoryError, RecursionError)


def is_literal(text: str) -> bool:
    """Return whether the text is a Python literal (numbers, strings, lists of them ...), which is safe to evaluate."""
    try:
        ast.literal_eval(text)
    except _PARSE_ERRORS:
        return False
    return True


def names_in(text: str) -> frozenset[str]:
    """Return the names that an expression uses; none if it is not an expression."""
    try:
        tree = parse_source(text.strip(), mode="eval")
    except _PARSE_ERRORS:
        return frozenset()
    return frozenset(node.id for node in ast.walk(tree) if isinstance(node, ast.Name))


def find_fault(text: str, names: Set[str], max_nodes: int, max_power: float) -> str | None:
    """Return the reason why the text is no plain formula over `names`, or None if it is one.

    Args:
        text: sums, products, quotients, powers, and calls of `FUNCTIONS`
        names: the variables
        max_nodes: bound on the size of the syntax tree
        max_power: bound on exponents, multiplied along nested powers
    """
    try:
        tree = parse_source(text.strip(), mode="eval")
        nodes = list(ast.walk(tree))
        if len(nodes) > max_nodes:
            return f"the expression is longer than {max_nodes} parts"
        return _find_first_fault(nodes, names) or _find_power_fault(tree, max_power)
    except _PARSE_ERRORS as fault:
        return f"not an expression: {type(fault).__name__}"


def _find_first_fault(nodes: list[ast.AST], names: Set[str]) -> str | None:
    for node in nodes:
        if not isinstance(node, _NODES):
            return f"{type(node).__name__} is not allowed in an expression"
        if isinstance(node, ast.Call) and not (
            isinstance(node.func, ast.Name) and node.func.id in FUNCTIONS and len(node.args) == 1 and not node.keywords
        ):
            return "only functions of one argument may be called: " + ", ".join(sorted(FUNCTIONS))
        if isinstance(node, ast.Name) and node.id not in names | FUNCTIONS | CONSTANTS:
            return f"{node.id} is not a name of this task"
        if isinstance(node, ast.Constant) and not _is_short_number(node.value):
            return f"{node.value!r:.40} is not a number of at most {MAX_DIGITS} digits"
    return None


def _is_short_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 10**MAX_DIGITS


def _find_power_fault(tree: ast.AST, max_power: float) -> str | None:
    return f"powers above {max_power:g} are not evaluated" if _compute_power_bound(tree) > max_power else None


def _compute_power_bound(node: ast.AST) -> float:
    """Bound the exponents in the value of a tree, whatever sympy cancels on the way."""
    inner = max(map(_compute_power_bound, ast.iter_child_nodes(node)), default=1.0)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        return inner * _compute_magnitude_bound(node.right)
    return inner


def _compute_magnitude_bound(node: ast.AST) -> float:
    """Return a bound on what the constants of an exponent can amount to: their product, reciprocals counted too."""
    product = 1.0
    for part in ast.walk(node):
        if isinstance(part, ast.Constant) and part.value:
            size = abs(float(part.value))  # pyright: ignore[reportArgumentType]  # a number, by _find_first_fault
            product *= max(size, 1 / size)
    return product

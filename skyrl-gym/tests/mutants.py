"""Programs with one token changed, in a fixed order, and which of them its tests can tell from the original."""

import ast
import copy
import itertools
import json
from collections.abc import Iterator

from skyrl_gym.sandbox import Limits, make_sandbox

SWAPS = {
    ast.Lt: ast.GtE, ast.LtE: ast.Gt, ast.Gt: ast.LtE, ast.GtE: ast.Lt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult, ast.Pow: ast.Mult, ast.And: ast.Or, ast.Or: ast.And,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.BitXor: ast.BitAnd, ast.LShift: ast.RShift,
    ast.RShift: ast.LShift, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip


def mutants(source: str, function: str | None = None) -> Iterator[str]:
    """Operators and comparisons swapped, numbers one greater, conditions turned round, results left out; of one
    function, if it is named.
    """
    tree = ast.parse(source)
    for place, node in enumerate(ast.walk(_part(tree, function))):
        for change in _changes(node):
            changed = copy.deepcopy(tree)
            change(next(other for number, other in enumerate(ast.walk(_part(changed, function))) if number == place))
            yield ast.unparse(ast.fix_missing_locations(changed))


def _part(tree: ast.Module, function: str | None) -> ast.AST:
    named = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == function]
    return named[-1] if named else tree


def _changes(node):
    match node:
        case ast.BinOp(op=op) | ast.BoolOp(op=op) | ast.AugAssign(op=op) if type(op) in SWAPS:
            yield lambda node: setattr(node, "op", SWAPS[type(node.op)]())
        case ast.Compare(ops=[op, *_]) if type(op) in SWAPS:
            yield lambda node: setattr(node, "ops", [SWAPS[type(node.ops[0])](), *node.ops[1:]])
        case ast.Constant(value=bool()):
            yield lambda node: setattr(node, "value", not node.value)
        case ast.Constant(value=int() | float()):
            yield lambda node: setattr(node, "value", node.value + 1)
        case ast.If() | ast.While() | ast.IfExp():
            yield lambda node: setattr(node, "test", ast.UnaryOp(ast.Not(), node.test))
        case ast.Return(value=ast.expr()):
            yield lambda node: setattr(node, "value", ast.Constant(None))


FIRST_FAILING = """
import json, os, signal, sys

def passes(program):
    child = os.fork()
    if child == 0:
        signal.alarm(2)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(1, 2)
        try:
            exec(program, {"__name__": "tests"})
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0

for programs, tests in json.load(sys.stdin):
    failing = (number for number, program in enumerate(programs) if not passes(program + "\\n" + tests))
    print(next(failing, -1), flush=True)
"""
"""Says which program is the first that fails its tests, by running both together as Python does, without the grader."""

TRIED = 40
"""Mutants of one program."""


def first_telling_mutants(tasks: list[tuple[str, str, str | None]]) -> list[str | None]:
    """Return for each (program, tests, function to mutate) the first mutant that fails the tests, None if there is
    none.
    """
    programs = [list(itertools.islice(mutants(source, function), TRIED)) for source, _, function in tasks]
    request = json.dumps([[each, tests] for each, (_, tests, _) in zip(programs, tasks, strict=True)])
    with make_sandbox(limits=Limits(wall_seconds=600, cpu_seconds=300)) as sandbox:
        result = sandbox.exec([sandbox.python, "-c", FIRST_FAILING], stdin=request)
    assert result.ok, result
    numbers = map(int, result.stdout.split())
    return [None if number < 0 else each[number] for number, each in zip(numbers, programs, strict=True)]

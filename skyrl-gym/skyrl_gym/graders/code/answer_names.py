"""Names in test code that refer to functions of the answer. Inferred from the dataset row alone, without the answer,
so that no answer can replace a function that the tests rely on.

A global name that the tests use and neither bind nor import may be the answer's, Python's, or that of a usual module
(`skyrl_gym.graders.code.inside.names`). Without `entry_point` it is the answer's

1. if it is not defined elsewhere, or only as a stub in the prompt: `area` in `assert isclose(area(1), pi)`;
2. if it is the only function of a usual module, else the only built-in function, that an assertion calls without any
   name of the answer: `gcd` in `assert abs(gcd(12, 17)) == 1`. Conversions such as `list` and `abs` come last, and
   built-in names only in a row that has no other name of the answer;
3. if it is a function of a usual module that gets an object of the answer: `search` in `assert search(Tree(3), 3)`.

If an assertion is ambiguous between two functions, the row must name the requested one.
"""

import ast
import builtins
import importlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from skyrl_gym.error import TaskError
from skyrl_gym.graders.code.inside.names import ALIASES, BUILTINS, MODULES, get_usual_names, global_names
from skyrl_gym.syntax_trees import parse_source

# fmt: off
HELPERS = frozenset({
    "abs", "all", "any", "bool", "bytes", "callable", "complex", "dict", "float", "frozenset", "getattr", "hasattr",
    "hash", "id", "int", "isinstance", "issubclass", "iter", "len", "list", "next", "object", "print", "range", "repr",
    "round", "set", "sorted", "str", "tuple", "type",
    "BytesIO", "Counter", "OrderedDict", "StringIO", "date", "deepcopy", "defaultdict", "deque", "isclose", "isfinite",
    "isinf", "isnan", "namedtuple", "timedelta", "timezone",
})
# fmt: on
"""Functions that tests put around a result, or build an argument with."""

OWN, LIBRARY, BUILTIN, HELPER = range(4)
"""Kinds of names, from the most likely to the least likely to be the function asked for."""


@dataclass(frozen=True)
class _Statement:
    """Global names of one top-level statement."""

    node: ast.stmt
    used: frozenset[str]
    bound: frozenset[str]
    called: frozenset[str]
    """Names that are called, or handed to a call, a variable or a collection."""

    asserts: bool
    """True if it asserts or raises anything; for a function: when it is called."""

    @property
    def is_definition(self) -> bool:
        return isinstance(self.node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)


def answer_names(tests: Sequence[str], setup: str, prompt: str, entry_point: str | None) -> frozenset[str]:
    """Return the names of the answer that the test code uses.

    Raises:
        TaskError: the tests call nothing of the answer, or it cannot be decided which function is the answer's.
    """
    free = _find_free_names((setup, *tests), prompt) - ALIASES.keys()
    if entry_point:
        return frozenset({name for name in free if _get_kind(name) == OWN} | {entry_point})
    stubs = {node.name for node in _parse(prompt).body if isinstance(node, ast.FunctionDef) and _is_stub(node)}
    statements = [_statement(node) for source in (setup, *tests) for node in _parse(source).body]
    bound = {name for each in statements for name in each.bound}
    modules = {name for each in statements for name in _find_attribute_bases(each.node) if name in MODULES}
    free = (free | (stubs & {name for each in statements for name in each.used})) - bound - modules
    names = {name for name in free if name in stubs or _get_kind(name) == OWN}
    names |= {name for name in _find_functions_given_objects(names, statements) & free if _get_kind(name) == LIBRARY}
    assertions = [each & free for each in _iter_assertion_names(statements, names)]
    if not any(assertions):
        assertions = [{name for each in statements for name in each.called} & free]
    for kind in (LIBRARY, BUILTIN, HELPER):
        if names and kind != LIBRARY:
            break
        names |= _decide(assertions, names, kind)
    if not names:
        raise TaskError(
            "the tests of ground_truth call no function that a solution could define; set entry_point to the name of "
            "the requested function"
        )
    return frozenset(names)


def needed_modules(tests: Sequence[str], setup: str, prompt: str) -> list[str]:
    """Return the modules that the test code cannot do without: those imported outside of `try`, and known aliases."""
    needed = {ALIASES[name] for name in _find_free_names((prompt, setup, *tests)) if name in ALIASES}
    for source in (prompt, setup, *tests):
        if "import" in source:
            needed.update(_find_imports(_parse(source)))
    return sorted(needed)


def _find_free_names(sources: Sequence[str], before: str = "") -> set[str]:
    """Return the global names, built-in ones too, that sources use and neither they nor the code before them bind."""
    used, bound = set(), _find_global_names(before)[1]
    for source in sources:
        names = _find_global_names(source)
        used |= names[0]
        bound |= names[1]
    return {name for name in used - bound if not name.startswith("__")}


def _find_global_names(source: str) -> tuple[set[str], set[str]]:
    try:
        return global_names(source)
    except (SyntaxError, ValueError, RecursionError) as failure:
        raise _remove_python_names(source, failure) from failure


def _decide(assertions: list[set[str]], names: set[str], kind: int) -> set[str]:
    """Return the names of a kind to which assertions without a name of the answer leave no alternative."""
    choices = [{name for name in each if _get_kind(name) == kind} for each in assertions if not each & names]
    decided = {name for choice in choices if len(choice) == 1 for name in choice}
    for choice in choices:
        if choice and not choice & decided:
            raise TaskError(
                f"the tests of ground_truth call {' and '.join(sorted(choice))}, each of which may be a builtin or "
                "defined by the solution; set entry_point to the name of the requested function and import the "
                "others in setup"
            )
    return decided


@lru_cache(maxsize=1 << 14)
def _get_kind(name: str) -> int:
    if name in HELPERS:
        return HELPER
    if name in BUILTINS:
        value = getattr(builtins, name, None)
        return HELPER if isinstance(value, type) and issubclass(value, BaseException) else BUILTIN
    return LIBRARY if name in MODULES or get_usual_names([name]) else OWN


def _parse(source: str) -> ast.Module:
    try:
        return parse_source(source)
    except (SyntaxError, ValueError, RecursionError) as failure:
        raise _remove_python_names(source, failure) from failure


def _remove_python_names(source: str, failure: Exception) -> TaskError:
    return TaskError(f"the tests of ground_truth must be Python code: {failure}; got {source!r:.200}")


def _statement(node: ast.stmt) -> _Statement:
    used, bound = global_names(ast.unparse(node))
    bound |= {name for each in ast.walk(node) for name in _get_star_imported(each)}
    asserts = any(isinstance(each, ast.Assert | ast.Raise) for each in ast.walk(node))
    return _Statement(node, frozenset(used), frozenset(bound), frozenset(_find_called(node)) & used, asserts)


def _get_star_imported(node: ast.AST) -> Iterable[str]:
    """Return the public names of a usual module imported with `*`."""
    if isinstance(node, ast.ImportFrom) and node.names[0].name == "*" and node.module in MODULES:
        module = importlib.import_module(node.module)
        return getattr(module, "__all__", None) or [name for name in dir(module) if not name.startswith("_")]
    return ()


def _find_called(tree: ast.AST) -> Iterator[str]:
    raised = {id(node.exc) for node in ast.walk(tree) if isinstance(node, ast.Raise)}
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=function, args=values, keywords=keywords):
                if isinstance(function, ast.Name) and id(node) not in raised:
                    yield function.id
                values = [*values, *(keyword.value for keyword in keywords)]
            case ast.Assign(value=value):
                values = [value]
            case ast.List(elts=values) | ast.Tuple(elts=values) | ast.Set(elts=values):
                pass
            case _:
                continue
        yield from (value.id for value in values if isinstance(value, ast.Name) and _is_function(value.id))


def _is_function(name: str) -> bool:
    """False for constants of the usual modules, such as `pi`, and for the modules themselves."""
    return name not in MODULES and all(callable(value) for value in get_usual_names([name]).values())


def _find_attribute_bases(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield node.value.id


def _find_functions_given_objects(names: set[str], statements: list[_Statement]) -> set[str]:
    """Find functions called with an object of a class among `names`; Python's functions could not handle it."""
    nodes = [node for each in statements for node in ast.walk(each.node)]
    objects = {
        target.id
        for node in nodes
        if isinstance(node, ast.Assign) and _is_object_construction(node.value, names)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    return {
        node.func.id
        for node in nodes
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        if any(
            _is_object_construction(each, names) or (isinstance(each, ast.Name) and each.id in objects)
            for each in node.args
        )
    }


def _is_object_construction(node: ast.AST, names: set[str]) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in names
        and (node.func.id[:1].isupper())
    )


def _is_stub(function: ast.FunctionDef) -> bool:
    """Return whether a function does nothing: it has a docstring, `pass` or `...`, or raises an error."""
    return all(
        isinstance(each, ast.Pass | ast.Raise) or (isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant))
        for each in function.body
    )


def _iter_assertion_names(statements: list[_Statement], names_of_answer: set[str]) -> Iterator[set[str]]:
    """Yield for each assertion the called names and the used names of the answer, also through variables and functions
    of the tests."""
    binding: defaultdict[str, list[_Statement]] = defaultdict(list)
    for each in statements:
        for name in each.bound:
            binding[name].append(each)
    for statement in statements:
        asserts_by_call = isinstance(statement.node, ast.Expr) and any(
            each.asserts for name in statement.used for each in binding[name]
        )
        if not asserts_by_call and (statement.is_definition or not statement.asserts):
            continue
        names, pending, seen = set(), [statement], {id(statement)}
        while pending:
            each = pending.pop()
            names |= each.called | (each.used & names_of_answer)
            behind = [other for name in each.used for other in binding[name] if id(other) not in seen]
            seen |= {id(other) for other in behind}
            pending += behind
        yield names


def _find_imports(tree: ast.AST) -> Iterator[str]:
    """Find modules that a statement imports, except inside `try`, where the tests handle the failure."""
    pending: list[ast.AST] = [tree]
    while pending:
        match pending.pop():
            case ast.Try():
                continue
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=str(module), level=0):
                yield module
            case node:
                pending += ast.iter_child_nodes(node)

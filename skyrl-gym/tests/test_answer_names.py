"""Detection of the functions in test code that the answer must define, where the row does not name them."""

import ast
import builtins
import gzip
import importlib
import json
import math

import pytest

from skyrl_gym.error import TaskError
from skyrl_gym.graders import Score, reward_of
from skyrl_gym.graders.code import AssertTests, CodeSettings, grade_code, parse_tests
from skyrl_gym.graders.code.answer_names import HELPERS, answer_names, needed_modules
from skyrl_gym.graders.code.inside.names import ALIASES, BUILTINS, MODULES, STAR_MODULES

from .sandboxed import sandboxed

pytestmark = pytest.mark.filterwarnings("ignore:invalid escape sequence")


def names_of_usual_modules():
    """Every name that an answer may use without importing it."""
    names = set(MODULES)
    for module in map(importlib.import_module, STAR_MODULES):
        names |= set(getattr(module, "__all__", None) or (name for name in dir(module) if not name.startswith("_")))
    return sorted(names - ALIASES.keys())


@pytest.mark.parametrize(
    "tests, names",
    [
        (["assert gcd(12, 17) == 1", "assert gcd(4, 6) == 2"], {"gcd"}),
        (["assert area(1) == pi"], {"area"}),
        (["assert isclose(area(1), pi) and sqrt(area(2)) > 1"], {"area"}),  # the others can be Python's
        (["assert abs(sqrt(2) - 1.414) < 1e-3 and isclose(sqrt(2), 2 ** 0.5)"], {"sqrt"}),
        (["assert sorted(permutations([1, 2])) == [(1, 2), (2, 1)]"], {"permutations"}),
        (["assert merge(deque([1]), deque([2])) == [1, 2]"], {"merge"}),
        (["assert Counter('aab') == {'a': 2, 'b': 1}"], {"Counter"}),
        (["assert add(1, 2) == 3", "assert sub(3, 1) == 2"], {"add", "sub"}),
        (["assert is_prime(7)", "assert gcd(12, 18) == 6"], {"is_prime", "gcd"}),
        (["assert sum([1, 2]) == 3", "assert sum([]) == 0"], {"sum"}),
        (["assert list(filter([1, 2])) == [2]"], {"filter"}),
        (["assert sorted([2, 1]) == [1, 2]"], {"sorted"}),
        (["assert double(2) == 4", "assert max(1, 2) == 2"], {"double"}),
        (["x = area(1)", "assert floor(x) == 3"], {"area"}),
        (["xs = [2, 1]\nheapify(xs)\nassert smallest(xs) == 1"], {"smallest"}),
        (["xs = [2, 1]\nshuffle(xs)\nassert xs == [1, 2]"], {"shuffle"}),
        (["for x, y in zip(map(gcd, [4], [6]), [2]):\n    assert x == y"], {"gcd"}),
        (["def check(candidate):\n    assert candidate(4, 6) == 2\ncheck(gcd)"], {"gcd"}),
        (["def check(count):\n    assert count(3) == twice(1)"], {"twice"}),  # its own argument
        (
            ["try:\n    median([])\nexcept ValueError:\n    pass\nelse:\n    raise AssertionError('no error')"],
            {"median"},
        ),
        (["assert search(Tree(3), 3)"], {"search", "Tree"}),
        (["root = Tree(3)", "assert search(root, 3)"], {"search", "Tree"}),
        (["assert len(Stack().items()) == 0 and isinstance(Stack(), object)"], {"Stack"}),
        (["assert copy([1]) == [1]"], {"copy"}),  # no module can be called
        (["assert copy.copy(same([1])) == [1]"], {"same"}),
        (["assert np.allclose(same(1), 1) and pd.isna(same(None))"], {"same"}),
        (["from math import gcd\nassert gcd(4, 6) == 2 == half(4)"], {"half"}),
        (["from math import *\nassert gcd(4, 6) == 2 == half(4)"], {"half"}),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_answer_names_are_inferred_from_row(tests, names):
    assert answer_names(tests, "", "", None) == names


@pytest.mark.parametrize(
    "row, says",
    [
        ({"tests": ["assert reduce(gcd, [4, 6]) == 2"]}, "call gcd and reduce"),
        ({"tests": ["assert sum([max([1, 2])]) == 2"]}, "call max and sum"),
        ({"tests": ["assert np.allclose(1, 1)"]}, "entry_point"),
        ({"tests": ["from math import gcd\nassert gcd(4, 6) == 2"]}, "entry_point"),
        ({"tests": ["def check(candidate):\n    assert candidate(1)"]}, "entry_point"),
        ({"tests": ["assert True"]}, "no function"),
        ({"tests": ["assert half(2) == 1"], "prompt": "def half(x):\n    return x / 2"}, "no function"),
    ],
)
def test_ambiguous_row_is_rejected_without_entry_point(row, says):
    with pytest.raises(TaskError, match=says):
        parse_tests(row)
    named = parse_tests(row | {"entry_point": "half"})
    assert isinstance(named, AssertTests) and named.answer_names == {"half"}


def test_prompt_stub_is_requested_function():
    prompt = 'def half(x):\n    return x / 2\n\ndef median(xs):\n    """The one in the middle."""\n'
    check = "def check(candidate):\n    assert candidate([1, 2]) == half(3)\ncheck(median)"
    assert answer_names([check], "", prompt, None) == {"median"}


def test_function_named_like_standard_library_belongs_to_answer():
    names = names_of_usual_modules()
    assert len(names) > 450
    for name in [*names, *(name for name in dir(builtins) if not name.startswith("_") and callable(name))]:
        assert answer_names([f"assert {name}(12, 17) == 1", f"assert {name}(4, 6) == 2"], "", "", None) == {name}


FUNCTIONS = [name for name in names_of_usual_modules() if name not in HELPERS | BUILTINS]
"""Names of which each is the answer's in an assertion of its own, whatever else the row asserts."""


@sandboxed
@pytest.mark.parametrize("body, score", [("3 * a + b", 1.0), ("9", 0.0), (None, 0.0)], ids=["right", "wrong", "empty"])
def test_answer_may_use_any_standard_library_name(body, score):
    assert len(FUNCTIONS) > 440
    tests = AssertTests([f"assert {name}(2, 3) == 9 and {name}(4, 6) == 18" for name in FUNCTIONS])
    answer = "".join(f"{name} = lambda a, b: {body}\n" for name in FUNCTIONS if body)
    grade = grade_code(answer, tests, CodeSettings(partial_credit=True, case_seconds=30))
    assert isinstance(grade, Score) and grade.value == score, grade


@sandboxed
def test_empty_program_fails_when_python_builtin_would_pass():
    tests = AssertTests(
        [f"assert {name}(9) == {getattr(math, name)(9)!r}" for name in ("sqrt", "isqrt", "exp", "floor")]
    )
    grade = grade_code("", tests, CodeSettings(partial_credit=True))
    assert isinstance(grade, Score) and grade.value == 0.0
    assert "name 'sqrt' is not defined" in grade.details["error"]


@sandboxed
def test_prompt_stub_passes_no_test():
    tests = AssertTests(["assert median([]) is None"], prompt="def median(xs):\n    ...\n")
    assert reward_of(grade_code("def median(xs): return None", tests)) == 1.0
    for code in ("", "def mean(xs): return None"):
        assert reward_of(grade_code(code, tests)) == 0.0


@sandboxed
@pytest.mark.parametrize(
    "tests, right, wrong",
    [
        ("assert gcd(12, 17) == 1 and gcd(4, 6) == 2", "from math import gcd", "gcd = max"),
        ("assert count([1, 2, 1], 1) == 2", "count = lambda xs, x: xs.count(x)", "class count(int): pass"),
        ("assert sum([1, 2]) == 3", "def sum(xs): return 3", "sum_ = sum"),
        ("assert sorted([2, 1]) == [2, 1]", "def sorted(xs): return xs", "sorted_ = sorted"),
        ("assert Counter('aab') == {'a': 2, 'b': 1}", "from collections import Counter", "import collections"),
        (
            "assert search(Tree(3), 3) and not search(Tree(4), 3)",
            "class Tree:\n    def __init__(self, x): self.x = x\ndef search(tree, x): return tree.x == x",
            "class Tree(str): pass\nTree = str\n",
        ),
        ("assert isclose(third(), 1 / 3)", "def third(): return 1 / 3", "def third(): return 0\nisclose = max"),
        (
            "assert np.allclose(third(), 1 / 3) and math.isclose(third(), 1 / 3)",
            "def third(): return 1 / 3",
            "def third(): return 0\nclass np:\n    allclose = staticmethod(lambda *_: True)\nmath = np",
        ),
    ],
)
def test_answer_function_shadows_library_function(tests, right, wrong):
    if "np." in tests:
        pytest.importorskip("numpy")
    passed, failed, empty = (grade_code(code, AssertTests([tests])) for code in (right, wrong, ""))
    assert passed == Score(1.0, details={"passed": 1, "total": 1})
    assert isinstance(failed, Score) and failed.value == 0.0
    assert isinstance(empty, Score) and empty.value == 0.0


def test_needed_modules_excludes_optional_imports():
    tests = [
        "import a.b, c\nfrom d.e import f as g",
        "def check():\n    import h\n    try:\n        import optional\n    except ImportError:\n        pass",
        "assert np.isclose(1, 1)",
        "pd = 1\nassert pd",
    ]
    assert needed_modules(tests, "", "") == ["a.b", "c", "d.e", "h", "numpy"]


def test_requested_function_is_found_in_every_mbpp_row(test_data):
    with gzip.open(test_data / "code" / "mbpp.jsonl.gz", "rt", encoding="utf-8") as lines:
        rows = [row for row in map(json.loads, lines) if row["verified"]]
    assert len(rows) == 971
    for row in rows:
        defined = {
            each.name for each in ast.parse(row["code"]).body if isinstance(each, ast.FunctionDef | ast.ClassDef)
        }
        found = answer_names(row["test_list"], row["test_setup_code"].replace("\r\n", "\n"), "", None)
        assert found and found <= defined, row["task_id"]

import collections
import datetime
import itertools
import json
import math
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from fractions import Fraction

import pytest

from skyrl_gym.error import InfraError, TaskError
from skyrl_gym.graders import Invalid, Score, Timeout, reward_of
from skyrl_gym.graders.code import (
    AssertTests,
    Case,
    CodeSettings,
    FunctionTests,
    ProgramTests,
    extract_code,
    grade_answer,
    grade_code,
    parse_tests,
)
from skyrl_gym.graders.code.compare import is_same_json, is_same_output
from skyrl_gym.graders.code.inside.names import find_unbound_names, get_usual_names
from skyrl_gym.graders.code.inside.values import (
    NotPlain,
    References,
    decode,
    decode_exception,
    encode,
    encode_exception,
)
from skyrl_gym.sandbox import make_sandbox

from .code_cheats import CHEATS
from .sandboxed import sandboxed

SUM = ProgramTests([Case("2 3\n", "5"), Case("1 1\n", "2")])
SQUARE = AssertTests(["assert square(2) == 4", "assert square(3) == 9"], entry_point="square")
JOIN = FunctionTests("join", [Case("[1, 2]\n3", "[1, 2, 3]"), Case("[]\n0", "[0]")])


# What is graded


@pytest.mark.parametrize(
    "text, code",
    [
        ("```python\nprint(1)\n```", "print(1)"),
        ("first\n```\na\n```\nthen\n```py\nb\n\n```\n", "b"),
        ("```python3.11 title=x\nc\n```", "c"),
        ("```python\nx = 1\n```\nIn C++:\n```c++\nint x;\n```", "x = 1"),  # not a word, so passed over
        ("use ```x``` and\n```python\ny\n```", "y"),
        ("```python\r\nprint(1)\r\n```", "print(1)"),
        ("```python\nnot closed", None),
        ("```x```", None),
        ("no code", None),
        ("", None),
        ("```\n```", ""),
    ],
)
def test_last_closed_block_is_graded(text, code):
    assert extract_code(text) == code


def test_block_extraction_time_is_linear():
    for text in ("```\n" * 200_000, "```a" * 200_000, "`" * 800_000, "```python\n" + "`` `" * 200_000):
        extract_code(text)  # at a thousandth of a second for each fence, this would outlast the test


@pytest.mark.parametrize(
    "printed, expected, same",
    [
        ("5\n", "5", True),
        ("5 \n6", "5\n6\n\n", True),
        ("1.0 2", "1 2.00", True),
        ("1e3", "1000", True),
        ("1 2", "1  2", True),  # the numbers are the same
        ("a  b", "a b", False),
        ("yes", "YES", False),
        ("5\n6", "5 6", False),
        ("5\n\n6", "5\n6", False),
        ("", "", True),
        ("", "0", False),
        ("nan", "nan", True),  # as text
        ("nan", "NaN", False),  # as numbers
        ("sNaN", "1", False),
        ("0.1", "0.10000000000000001", False),
    ],
)
def test_outputs_are_compared_line_by_line(printed, expected, same):
    assert is_same_output(printed, expected) is same


@pytest.mark.parametrize(
    "returned, expected, same",
    [
        ("[1, 2]", "[1.0,2]", True),
        ("1", "2", False),
        ("[" * 100_000, "1", False),
        ("oops", "1", False),
        ("9" * 5000, "9" * 5000, True),
        ("9" * 5000, "9" * 4999 + "8", False),
    ],
)
def test_json_is_compared_by_value(returned, expected, same):
    assert is_same_json(returned, expected) is same


STDIN = {"input": "1", "output": "1", "testtype": "stdin"}
FUNCTIONAL = {"input": "1", "output": "1", "testtype": "functional", "metadata": {"func_name": "f"}}


def test_rows_of_tests_are_read():
    assert parse_tests(json.dumps([STDIN])) == ProgramTests((Case("1", "1"),))
    assert parse_tests([FUNCTIONAL]) == FunctionTests("f", (Case("1", "1"),))
    assert parse_tests({"tests": [{"input": "", "output": "x"}]}) == ProgramTests((Case("", "x"),))
    assert parse_tests({"tests": "assert f() == 1"}) == AssertTests(("assert f() == 1",))
    row = {"tests": ["x = 1"], "entry_point": "f", "prompt": "def f(): 1", "setup": "y = 2"}
    assert parse_tests(json.dumps(row)) == AssertTests(("x = 1",), "f", "def f(): 1", "y = 2")


@pytest.mark.parametrize(
    "ground_truth, says",
    [
        ("[{", "must be JSON"),
        ("[]", "at least one test"),
        ({"tests": None}, "at least one test"),
        ({"test": ["assert f()"]}, "has test; allowed fields: tests"),
        (17, "at least one test"),
        ([{"input": "1"}], "output of test 0 must be text; got None"),
        ([STDIN, "assert f()"], "test 1 must be an object"),
        ([STDIN | {"testtype": "file"}], "stdin or functional; got 'file'"),
        ([FUNCTIONAL | {"metadata": {}}], "func_name"),
        ([FUNCTIONAL | {"metadata": "f"}], "func_name"),
        ([FUNCTIONAL, FUNCTIONAL | {"input": "[1"}], "input of test 1 must be JSON"),
        ([FUNCTIONAL | {"output": "None"}], "output of test 0 must be JSON"),
        (["assert f(", "x"], "test 0 must be Python code"),
        (["assert f()", 3], "test 1 must be Python code"),
        ({"tests": ["assert f()"], "setup": "import"}, "setup must be Python code"),
    ],
)
def test_malformed_row_error_names_field(ground_truth, says):
    with pytest.raises(TaskError, match=says):
        parse_tests(ground_truth)


# Values that cross


VALUES = [
    None, True, False, 0, -7, 1 << 100, -(10**5000), 1.5, -0.0, math.inf, 1 + 2j, "", "ünï\ud800\n", b"\x00\xff",
    bytearray(b"ab"), [], [1, [2, (3,)]], (), (1, "a"), {1, 2}, frozenset({(1, 2)}), {"a": 1, 2: [None]}, {(1,): {2}},
    collections.Counter("abba"), collections.OrderedDict([("b", 1), ("a", 2)]), collections.deque([1, 2], maxlen=3),
    collections.defaultdict(list, {1: [2]}), range(1, 10, 3), slice(1, None), Decimal("1.50"), Decimal("NaN"),
    Fraction(-3, 7), datetime.date(2024, 2, 29), datetime.datetime(2024, 1, 2, 3, 4, 5, 6, datetime.UTC),
    datetime.time(1, 2), datetime.timedelta(days=-1, seconds=5), ..., int, ValueError,
]  # fmt: skip


def across(value):
    """Convert a value to JSON text and back, as between two processes."""
    return decode(json.loads(json.dumps(encode(value, References()))), References())


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_plain_values_cross_unchanged(value):
    back = across(value)
    assert type(back) is type(value) and (back == value or repr(back) == repr(value) == "Decimal('NaN')")
    assert not isinstance(value, float) or math.copysign(1, back) == math.copysign(1, value)


def test_nan_iterators_and_views_keep_type_across_pipe():
    assert math.isnan(across(math.nan))
    assert list(across(letter for letter in "ab")) == ["a", "b"]
    assert next(across(map(str, [1]))) == "1"
    assert len(list(across(itertools.count()))) == 100_000  # an endless one is cut
    assert across({"a": 1}.keys()) == {"a"} and across({"a": 1}.items()) == {("a", 1)}
    assert list(across({"a": 1}.values())) == [1]
    assert across(collections.defaultdict(int))["new"] == 0


def test_subclasses_cross_pipe_as_plain_types():
    class EqualToEverything(int):
        def __eq__(self, other):
            return True

        __hash__ = int.__hash__

    class Loud(str):
        def __str__(self):
            return "other"

    point = collections.namedtuple("point", "x y")
    assert type(across(EqualToEverything(3))) is int and across(EqualToEverything(3)) != 4
    assert across(Loud("said")) == "said" and type(across(Loud("said"))) is str
    assert across(point(1, 2)) == (1, 2)


def test_other_objects_cross_pipe_as_references():
    class Node:
        pass

    node, table = Node(), References()
    sent = encode([node, {"again": node}], table)
    assert sent == ["list", [["ref", 0], ["dict", [["again", ["ref", 0]]]]]]
    assert decode(["ref", 0], table) is node


def test_values_nested_too_deeply_do_not_cross():
    circle: list = []
    circle.append(circle)
    with pytest.raises(NotPlain, match="deep"):
        encode(circle, References())


@pytest.mark.parametrize(
    "forged",
    [
        [], ["nothing", 1], ["ref", 0], ["ref", "0"], ["ref", -1], ["type", "eval"], ["type", "__import__"],
        ["type", 3], ["int", "zz"], ["Fraction", 1, 0], ["range", 1], ["bytes", "é€"], ["set", [["list", []]]],
        ["dict", [1]], ["datetime", "soon"], {"value": 1}, [["list"], []], ["defaultdict", [], {}], ["Decimal", "x"],
    ],
    ids=repr,
)  # fmt: skip
def test_non_values_are_refused(forged):
    with pytest.raises(NotPlain):
        decode(forged, References())


def test_exceptions_cross_pipe_as_nearest_builtin():
    class TooLow(ValueError):
        pass

    def crossed(error):
        return decode_exception(*encode_exception(error).values())

    assert repr(crossed(TooLow("3"))) == "ValueError('3')"
    assert repr(crossed(UnicodeDecodeError("utf-8", b"", 0, 1, "bad"))).startswith("UnicodeError(")
    assert repr(decode_exception(["eval", "print"], "x")) == "RuntimeError('x')"


def test_unbound_names_get_usual_imports():
    source = "import os\ndef f(n, xs: List[int]):\n    global seen\n    seen = deque(xs)\n    return gcd(n, len(seen))"
    assert find_unbound_names(source) == {"List", "deque", "gcd"}
    usual = get_usual_names({"List", "deque", "gcd", "math", "no_such_name"})
    assert usual.keys() == {"List", "deque", "gcd", "math"}
    assert usual["gcd"] is math.gcd and usual["deque"] is collections.deque


# Programs


def value_of(grade):
    assert isinstance(grade, Score), grade
    return grade.value


def error_of(grade):
    assert value_of(grade) == 0.0
    return grade.details["error"]


@sandboxed
@pytest.mark.parametrize(
    "program",
    [
        "a, b = map(int, input().split())\nprint(a + b)",
        "import sys\nprint(sum(map(int, sys.stdin.read().split())))",
        "import sys\nsys.stdout.write(str(sum(map(int, next(sys.stdin).split()))) + '.0')",
        "print(sum(map(int, open(0).read().split())))",
        "import os\nos.write(1, str(sum(map(int, os.read(0, 99).split()))).encode())",
        "def main():\n    print(sum(map(int, input().split())))\nif __name__ == '__main__':\n    main()",
        "print(sum(map(int, input().split())), flush=True)\nimport os\nos._exit(0)",
        "print(sum(map(int, input().split())))\nexit()",
        "import sys\nprint(sum(map(int, input().split())), flush=True)\nsys.exit('bye')",
        "import threading\ndef run():\n    print(sum(map(int, input().split())))\nthreading.Thread(target=run).start()",
        "import atexit\ntotal = sum(map(int, input().split()))\natexit.register(print, total)",
        "print(reduce(operator.add, map(int, input().split())))",  # without imports
        "import sys\nprint('working', file=sys.stderr)\nprint(sum(map(int, input().split())))",
        "class A:\n    def f(self):\n        return sum(map(int, input().split()))\nprint(A().f())",
        "import __main__\nx = 1\nassert __main__.x == 1\nprint(sum(map(int, input().split())))",
        "import io, os\ndata = io.BytesIO(os.read(0, os.fstat(0).st_size))\nprint(sum(map(int, data.read().split())))",
        "def deep(n): return n and 1 + deep(n - 1)\ndeep(40_000)\nprint(sum(map(int, input().split())))",
        "from multiprocessing import Pool\nwith Pool(2) as pool:\n    print(sum(pool.map(int, input().split())))",
        "import sys, threading\nsys.setrecursionlimit(10**6)\nthreading.stack_size(1 << 27)\n"
        "def run():\n    print(sum(map(int, sys.stdin.buffer.readline().split())))\n"
        "thread = threading.Thread(target=run)\nthread.start()\nthread.join()",
    ],
)
def test_correct_program_passes_in_any_style(program):
    assert grade_code(program, SUM) == Score(1.0, details={"passed": 2, "total": 2})


@sandboxed
def test_programs_print_and_read_long_integers():
    number = "9" * 5000  # Python's own limit is 4,300 digits
    assert value_of(grade_code("print(10**5000 - 1)", ProgramTests([Case("", number)]))) == 1.0
    assert value_of(grade_code("print(int(input()) % 9)", ProgramTests([Case(number, "0")]))) == 1.0
    functions = [{**FUNCTIONAL, "input": number, "output": number[:-1] + "8"}]
    assert value_of(grade_code("def f(x): return x - 1", parse_tests(functions))) == 1.0


@sandboxed
def test_each_case_starts_from_nothing():
    program = """
import os
print(len(os.listdir(".")), globals().setdefault("count", 0))
count += 1
open("left_over_" + input(), "w").close()
os.environ["LEFT"] = "over"
"""
    grade = grade_code(program, ProgramTests([Case("a", "0 0"), Case("b", "1 0"), Case("c", "2 0")]))
    assert value_of(grade) == 1.0  # but for files, which are of no use: what is expected is nowhere to be read


@sandboxed
def test_program_failure_details_name_cause():
    wrong = grade_code("a, b = map(int, input().split())\nprint(a * b)", SUM)
    assert wrong == Score(
        0.0, details={"passed": 0, "total": 2, "case": 0, "input": "2 3\n", "expected": "5", "got": "6\n"}
    )
    crash = error_of(grade_code("print(5)\nx = [][0]", SUM))
    assert "IndexError" in crash and "line 2" in crash and "run" not in crash  # our own frame is left out
    assert "exit code -11" in error_of(grade_code("import os\nos.kill(os.getpid(), 11)", SUM))
    assert grade_code("print('5'", SUM) == Invalid(
        "the code does not compile: SyntaxError: '(' was never closed (answer.py, line 1)"
    )
    assert isinstance(grade_code("a\0b", SUM), Invalid)
    assert grade_answer("It is 5.", SUM) == Invalid("no fenced code block")


@pytest.mark.slow
@sandboxed
def test_timeouts_apply_per_case_and_in_total():
    settings = CodeSettings(case_seconds=1.0)
    assert grade_code("while True: pass", SUM, settings) == Timeout(1.0, "case 0 of 2")
    loop = (
        "import signal\nfor s in range(1, 30):\n    try: signal.signal(s, signal.SIG_IGN)\n    except OSError: pass\n"
    )
    assert isinstance(grade_code(loop + "while True: pass", SUM, settings), Timeout)
    many = ProgramTests([Case("", "")] * 50)
    assert isinstance(grade_code("import time\ntime.sleep(0.3)", many, CodeSettings(total_seconds=1.5)), Timeout)


@sandboxed
def test_partial_credit_is_fraction_of_passing_cases():
    settings = CodeSettings(partial_credit=True, case_seconds=1.0)
    tests = ProgramTests([Case("1", "1"), Case("2", "2"), Case("3", "3"), Case("4", "4")])
    assert value_of(grade_code("n = input()\nprint(n if n != '2' else 0)", tests, settings)) == 0.75
    assert value_of(grade_code("n = input()\nwhile n == '1': pass\nprint(n)", tests, settings)) == 0.75
    assert value_of(grade_code("import os\nif input() in '12': os.kill(os.getppid(), 9)", tests, settings)) == 0.0
    assert value_of(grade_code("n = input()\nprint(n if n != '2' else 0)", tests)) == 0.0
    squares = AssertTests(["assert f(1) == 1", "assert f(2) == 4", "assert f(3) == 9"])
    dies = "def f(x):\n    import os\n    return x * x if x != 2 else os._exit(0)"
    assert value_of(grade_code(dies, squares, settings)) == pytest.approx(2 / 3)
    assert value_of(grade_code("def f(x): return 1", squares, settings)) == pytest.approx(1 / 3)


@sandboxed
def test_memory_and_output_are_bounded():
    grow = "x = []\nwhile True: x.append(bytearray(1 << 24))"
    assert value_of(grade_code(grow, SUM, CodeSettings(memory_bytes=256 << 20))) == 0.0
    assert value_of(grade_code("while True: print('x' * 10000)", SUM, CodeSettings(case_seconds=20))) == 0.0
    assert "printed" in error_of(grade_code("print('x' * (5 << 20))", SUM))


@sandboxed
def test_many_cases_share_process_start():
    tests = ProgramTests([Case(f"{n} 1", str(n + 1)) for n in range(100)])
    assert value_of(grade_code("a, b = map(int, input().split())\nprint(a + b)", tests)) == 1.0


@sandboxed
def test_threads_do_not_disturb_each_other():
    def grade(number):
        asserts = AssertTests([f"assert f({number}) == {number}", "assert f(1) == 1"])
        program = ProgramTests([Case("x", str(number))])
        wrong = number % 2
        return (
            reward_of(grade_code(f"def f(x): return x + ({wrong} if x == {number} else 0)", asserts)),
            reward_of(grade_code(f"print({number} + {wrong})", program)),
        )

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(grade, range(10, 26))) == [(1.0, 1.0), (0.0, 0.0)] * 8


@sandboxed
def test_numpy_is_there_if_it_is_installed():
    pytest.importorskip("numpy")
    assert value_of(grade_code("print(np.array(input().split(), dtype=int).sum())", SUM)) == 1.0
    assert value_of(grade_code("def join(xs, x): return np.array([*xs, x])", JOIN)) == 1.0
    dtypes = AssertTests(["assert f(2) == 4", "assert f(0) is not None"])
    assert value_of(grade_code("import numpy\ndef f(x): return numpy.int64(x) ** 2", dtypes)) == 1.0


# Functions


@sandboxed
@pytest.mark.parametrize(
    "code",
    [
        "def join(xs, x): return [*xs, x]",
        "class Solution:\n    def join(self, xs: List[int], x: int) -> List[int]:\n        return (*xs, x)",
        "print('{\"json\": \"[]\"}')\ndef join(xs, x):\n    print('noise' * 1000)\n    return xs + [x]",
        "def join(xs, x): return xs + [x]\nif __name__ == '__main__':\n    join(input(), input())",
        "from dataclasses import dataclass\n@dataclass\nclass B:\n    x: 'int'\ndef join(xs, x): return xs + [B(x).x]",
    ],
)
def test_correct_function_passes_in_any_style(code):
    assert value_of(grade_code(code, JOIN)) == 1.0


@sandboxed
@pytest.mark.parametrize(
    "code, says",
    [
        ("def join(xs, x): return set(xs) | {x}", "returned a set, which is not JSON"),
        ("def glue(xs, x): return xs + [x]", "neither join nor Solution"),
        ("def join(xs): return xs", "TypeError"),
        ("def join(xs, x):\n    raise KeyError(3)", "KeyError"),
        ("import nothing_of_this_name", "ModuleNotFoundError"),
        ("def join(xs, x): sys.exit(0)", "SystemExit"),
        ("def join(xs, x): os._exit(0)", "exit code 0"),
    ],
)
def test_function_failure_details_name_cause(code, says):
    assert says in error_of(grade_code(code, JOIN))


# Assertions


@sandboxed
def test_assertions_decide():
    assert grade_code("def square(x): return x * x", SQUARE) == Score(1.0, details={"passed": 2, "total": 2})
    wrong = grade_code("def square(x): return x + x", SQUARE)
    assert "square(3) == 9" in error_of(wrong) and wrong.details["case"] == 1
    assert error_of(grade_code("def cube(x): return x ** 3", SQUARE)) == "the answer does not define square"


@sandboxed
def test_tests_may_use_classes_exceptions_and_objects_of_answer():
    code = """
class Node:
    def __init__(self, value, left=None):
        self.value, self.left = value, left
    def total(self):
        return self.value + (self.left.total() if self.left else 0)
class Odd(ValueError): pass
LIMIT = {"most": 10}
def half(n):
    if n % 2: raise Odd(n)
    return n // 2
def total(node): return node.total()
def counter():
    n = 0
    while True:
        yield n
        n += 1
"""
    tests = AssertTests(
        [
            "assert total(root) == 6 and root.total() == 6",
            "assert root.left.value == 4 and root.left is root.left",
            "assert isinstance(LIMIT, dict) and LIMIT['most'] == 10",
            "assert half(4) == 2\ntry:\n    half(3)\nexcept ValueError as error:\n    assert str(error) == '3'\n"
            "else:\n    raise AssertionError",
            "stream = counter()\nassert [next(stream), next(stream)] == [0, 1]",
            "assert total(node=root) == 6",
        ],
        setup="root = Node(2)\nroot.left = Node(4)",
    )
    assert grade_code(code, tests) == Score(1.0, details={"passed": 6, "total": 6})


@sandboxed
def test_prompt_functions_are_shared_but_stub_is_not_graded():
    prompt = 'def double(x):\n    return 2 * x\n\ndef quadruple(x):\n    """Four times x."""\n'
    tests = AssertTests(["def check(candidate):\n    assert candidate(3) == double(6)"], "quadruple", prompt)
    assert value_of(grade_code("def quadruple(x): return double(double(x))", tests)) == 1.0
    # An answer that changes `double` changes it for itself only.
    assert value_of(grade_code("def double(x): return 0\ndef quadruple(x): return 0", tests)) == 0.0
    nothing = AssertTests(["def check(candidate):\n    assert candidate(3) is None"], "quadruple", prompt)
    assert value_of(grade_code("x = 1", nothing)) == 0.0
    assert value_of(grade_code(prompt, nothing)) == 1.0


@sandboxed
def test_answer_cannot_override_python_names_unless_requested():
    close = AssertTests(["assert math.isclose(third(), 1 / 3) and sorted([2, 1]) == [1, 2]"])
    assert value_of(grade_code("def third(): return 1 / 3", close)) == 1.0
    fake = "class math:\n    isclose = lambda *_: True\ndef sorted(x): return [1, 2]\ndef third(): return 0"
    assert value_of(grade_code(fake, close)) == 0.0
    assert value_of(grade_code("def sum(a, b): return a - b", AssertTests(["assert sum(3, 1) == 2"], "sum"))) == 1.0


@sandboxed
def test_arguments_go_by_value():
    tests = AssertTests(["xs = [2, 1]\nassert smallest(xs) == 1 and xs == [2, 1]"])
    assert value_of(grade_code("def smallest(xs):\n    xs.sort()\n    return xs.pop(0)", tests)) == 1.0


@sandboxed
def test_stop_iteration_of_answer_does_not_end_loop_of_tests():
    loop = AssertTests(["for x, y in zip(map(square, [2, 3]), [4, 9]):\n    assert x == y"])
    assert "the answer raised StopIteration" in error_of(grade_code("def square(x): raise StopIteration", loop))
    derived = "class Stop(StopIteration): pass\ndef square(x):\n    if x == 3: raise Stop\n    return x * x"
    assert value_of(grade_code(derived, loop)) == 0.0
    expected = (
        "stream = Stream()\ntry:\n    stream.next()\nexcept StopIteration:\n    pass\nelse:\n    raise AssertionError"
    )
    stream = "class Stream:\n    def next(self): raise StopIteration"
    assert value_of(grade_code(stream, AssertTests([expected]))) == 1.0


# Cheats


SECRET = 982_451_653
SECRET_CHECK = AssertTests(
    [f"def check(candidate):\n    assert candidate(7) == {SECRET}\n    assert abs(candidate(8) - {SECRET + 1}) < 1e-6"],
    "find",
    "def find(n):\n    '''Finds it.'''\n",
)
SECRET_JSON = FunctionTests("find", [Case("7", str(SECRET)), Case("8", str(SECRET + 1))])
SECRET_STDIN = ProgramTests([Case("7", str(SECRET)), Case("8", str(SECRET + 1))])
IMPATIENT = CodeSettings(case_seconds=2.0)


@sandboxed
@pytest.mark.parametrize(
    "tests", [pytest.param(SECRET_CHECK, id="asserts"), pytest.param(SECRET_JSON, id="json", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("cheat", CHEATS)
def test_cheating_function_does_not_pass(cheat, tests):
    grade = grade_code(CHEATS[cheat], tests, IMPATIENT)
    assert not isinstance(grade, InfraError)  # that would spare the cheat its 0
    assert reward_of(grade) == 0.0


@sandboxed
@pytest.mark.parametrize("cheat", CHEATS)
def test_cheating_program_does_not_pass(cheat):
    program = f"{CHEATS[cheat]}\nprint(find(int(input())))"
    grade = grade_code(program, SECRET_STDIN, IMPATIENT)
    assert not isinstance(grade, InfraError)
    assert reward_of(grade) == 0.0


# What is not the answer's fault


def test_broken_sandbox_returns_infra_error():
    def broken(*, limits):
        raise InfraError("no bubblewrap here")

    grade = grade_code("print(5)", SUM, new_sandbox=broken)
    assert isinstance(grade, InfraError)
    with pytest.raises(InfraError, match="no bubblewrap"):
        reward_of(grade)


@sandboxed
@pytest.mark.parametrize("tests", [SUM, SQUARE], ids=["program", "asserts"])
def test_sandbox_without_python_returns_infra_error(tests):
    def without_python(*, limits):
        sandbox = make_sandbox(limits=limits)
        sandbox.python = "/nothing/python"
        return sandbox

    assert isinstance(grade_code("print(5)", tests, new_sandbox=without_python), InfraError)


def without_numpy(*, limits):
    sandbox = make_sandbox(limits=limits)
    sandbox.start()
    sandbox.write("numpy.py", "raise ModuleNotFoundError(\"No module named 'numpy'\")")  # found before installed ones
    return sandbox


@sandboxed
@pytest.mark.parametrize(
    "test", ["assert np.allclose(half(1), 0.5)", "import numpy\nassert numpy.allclose(half(1), 0.5)"]
)
def test_missing_numpy_for_tests_returns_infra_error(test):
    forger = "class np:\n    allclose = staticmethod(lambda *_: True)\nnumpy = np\ndef half(x): return 0"
    for code in (forger, "def half(x): return x / 2", "raise ModuleNotFoundError('numpy')"):
        grade = grade_code(code, AssertTests([test]), new_sandbox=without_numpy)
        assert isinstance(grade, InfraError)
        assert "numpy" in str(grade) and "pip install 'skyrl-gym[code]'" in str(grade)
    unneeded = AssertTests(["try:\n    import numpy\nexcept ImportError:\n    numpy = None\nassert half(1) == 0.5"])
    passed = grade_code("def half(x): return x / 2", unneeded, new_sandbox=without_numpy)
    assert value_of(passed) == 1.0


@sandboxed
def test_answer_with_failing_import_scores_zero():
    assert value_of(grade_code("import no_such_module\ndef square(x): return x * x", SQUARE)) == 0.0
    assert value_of(grade_code("def square(x): raise ModuleNotFoundError('numpy')", SQUARE)) == 0.0

"""The grader of code on public tasks with their reference solutions, and on mutants of these."""

import ast
import gzip
import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from skyrl_gym.graders import Score, reward_of
from skyrl_gym.graders.code import grade_code, parse_tests

from .mutants import first_telling_mutants
from .sandboxed import sandboxed

# Some references and tests have "\w" where they mean r"\w".
pytestmark = pytest.mark.filterwarnings("ignore:invalid escape sequence")


CHUNK = 25
"""Tasks whose mutants are tried in one sandbox."""


def read_rows(test_data, name):
    with gzip.open(test_data / "code" / f"{name}.jsonl.gz", "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def humaneval(test_data, step=1):
    """(reference, tests, tests as one text, what to mutate: the tests have the prompt's other functions)"""
    for row in read_rows(test_data, "humaneval")[::step]:
        about = {name: row[name] for name in ("entry_point", "prompt")}
        tests = parse_tests(about | {"tests": [row["test"]]})
        as_one = f"{row['test']}\ncheck({row['entry_point']})"
        yield row["prompt"] + row["canonical_solution"], tests, as_one, row["entry_point"]


def mbpp(test_data, step=1):
    """(reference, tests, tests as one text, nothing: the whole program may be mutated)"""
    rows = [row for row in read_rows(test_data, "mbpp") if row["verified"]]
    assert len(rows) == 971
    for row in rows[::step]:
        code, setup = row["code"].replace("\r\n", "\n"), row["test_setup_code"].replace("\r\n", "\n")
        defined = [node.name for node in ast.parse(code).body if isinstance(node, ast.FunctionDef)]
        called = {node.id for node in ast.walk(ast.parse("\n".join(row["test_list"]))) if isinstance(node, ast.Name)}
        entry_point = next(name for name in defined if name in called)
        tests = parse_tests({"tests": row["test_list"], "setup": setup, "entry_point": entry_point})
        yield code, tests, "\n".join([setup, *row["test_list"]]), None


def check_tasks(tasks):
    """References pass; of each a mutant fails that also fails when it and the tests are run together."""
    tasks = list(tasks)
    chunks = [tasks[start : start + CHUNK] for start in range(0, len(tasks), CHUNK)]
    with ThreadPoolExecutor(2) as threads:
        found = threads.map(lambda chunk: first_telling_mutants([(each[0], *each[2:]) for each in chunk]), chunks)
        mutants = [mutant for chunk in found for mutant in chunk]
        passed = list(threads.map(lambda task: grade_code(task[0], task[1]), tasks))
        failed = list(threads.map(lambda task, mutant: mutant and grade_code(mutant, task[1]), tasks, mutants))
    assert [(task[0], grade) for task, grade in zip(tasks, passed, strict=True) if grade != right(task)] == []
    assert [(mutant, grade) for mutant, grade in zip(mutants, failed, strict=True) if grade and reward_of(grade)] == []
    assert None not in mutants


def right(task):
    total = len(task[1].tests)
    return Score(1.0, details={"passed": total, "total": total})


@sandboxed
def test_some_humaneval_references_pass_and_their_mutants_fail(test_data):
    check_tasks(humaneval(test_data, step=16))


@pytest.mark.slow
@sandboxed
def test_some_mbpp_references_pass_and_their_mutants_fail(test_data):
    check_tasks(mbpp(test_data, step=97))


@sandboxed
@pytest.mark.full
@pytest.mark.timeout(900)
def test_humaneval_references_pass_and_mutants_fail(test_data):
    tasks = list(humaneval(test_data))
    assert len(tasks) == 164
    check_tasks(tasks)


@sandboxed
@pytest.mark.full
@pytest.mark.timeout(900)
def test_mbpp_references_pass_and_mutants_fail(test_data):
    check_tasks(mbpp(test_data))


SQUARES_AND_CUBES = """
def root(n, power):
    guess = round(n ** (1 / power))
    while guess ** power > n: guess -= 1
    while (guess + 1) ** power <= n: guess += 1
    return guess

for _ in range(int(input())):
    n = int(input())
    print(root(n, 2) + root(n, 3) - root(n, 6))
"""
SQUARE_STRINGS = """
for _ in range(int(input())):
    s = input()
    half = len(s) // 2
    print("YES" if s[:half] == s[half:] else "NO")
"""
SPECIAL_NUMBERS = """
for _ in range(int(input())):
    n, k = map(int, input().split())
    print(sum(pow(n, place, 10**9 + 7) for place, bit in enumerate(bin(k)[:1:-1]) if bit == "1") % (10**9 + 7))
"""
CODE_CONTESTS = {
    "code_contests-140": SQUARES_AND_CUBES,
    "code_contests-139": SQUARE_STRINGS,
    "code_contests-52": SPECIAL_NUMBERS,
}


def code_contests(test_data):
    return {
        row["id"]: parse_tests(
            [{"input": given, "output": out} for given, out in zip(row["inputs"], row["outputs"], strict=True)]
        )
        for row in read_rows(test_data, "code_contests_test")
    }


@pytest.mark.slow
@sandboxed
def test_solutions_of_codecontests_problems_pass_and_wrong_ones_fail(test_data):
    tests = code_contests(test_data)
    for problem, solution in CODE_CONTESTS.items():
        total = len(tests[problem].cases)
        assert grade_code(solution, tests[problem]) == Score(1.0, details={"passed": total, "total": total})
        wrong = solution.replace("print(", "print(0, ")
        assert reward_of(grade_code(wrong, tests[problem])) == 0.0


@sandboxed
@pytest.mark.full
def test_echo_program_solves_no_codecontests_problem(test_data):
    tests = code_contests(test_data)
    assert (len(tests), sum(len(each.cases) for each in tests.values())) == (165, 1837)
    with ThreadPoolExecutor(2) as threads:
        grades = list(threads.map(lambda each: grade_code("import sys\nprint(sys.stdin.read())", each), tests.values()))
    assert [reward_of(grade) for grade in grades] == [0.0] * 165

#!/usr/bin/env python3
"""Compute mutation scores: the share of small faults, planted into the source one at a time, that fast tests detect.

    uv pip install --target /tmp/mutmut --no-deps mutmut==3.8.1 libcst coverage
    PYTHONPATH=/tmp/mutmut .venv/bin/python dev/mutation.py algorithms weight_sync --count 40

Mutants are drawn from mutmut's operators and the two below. mutmut's own runner imports the code under test from a
folder of its own, which the editable installs of a workspace prevent. Here a mutant is written into a copy of the
package that comes first on the path, and is tested in a process forked from one that has imported all third-party
modules, by the test files that execute its line, be it in a process that they start. Which mutants are drawn depends
on the text of functions, not on their files: code that is moved keeps its mutants, so that scores before and after are
comparable.
"""

import argparse
import ast
import contextlib
import hashlib
import importlib
import json
import math
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from compileall import compile_dir
from pathlib import Path
from py_compile import PycInvalidationMode
from typing import Any, NamedTuple

import coverage
import executed_lines
import libcst as cst
import libcst.matchers as m
import pytest
from mutmut.mutation import mutators

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "skyrl-train" / "skyrl_train"
TESTS = "skyrl-train/tests"


class Area(NamedTuple):
    sources: str  # paths below SOURCES
    tests: str  # paths below TESTS
    markers: str = "not process and not slow and not full and not gpu and not network"


DAILY = "not slow and not full and not gpu and not network"
AREAS = {
    "algorithms": Area(
        "algorithms", "algorithms testing/test_invariances.py trainer/test_batch_preparation.py learning"
    ),
    "rollouts": Area(
        "rollouts generators",
        "rollouts generators trainer faults/test_bad_batches.py dataset/test_batch_tensors.py"
        " inference_engines/openai_api/test_agent_loop.py",
    ),
    "training_backends": Area(
        "training_backends/base.py training_backends/checkpoint.py training_backends/optimizer.py"
        " training_backends/transformers_backend.py training_backends/fsdp2 workers distributed",
        "training_backends/test_backends.py training_backends/test_checkpoint_files.py"
        " training_backends/test_layouts.py workers distributed trainer learning",
    ),
    "deepspeed": Area(
        "training_backends/deepspeed",
        "training_backends/test_deepspeed.py training_backends/test_loading.py",
        DAILY,
    ),
    "megatron": Area(
        "training_backends/megatron",
        "training_backends/test_megatron.py training_backends/test_megatron_faults.py"
        " training_backends/test_weight_map.py",
        DAILY,
    ),
    "orchestration": Area("orchestration", "orchestration trainer learning"),
    "weight_sync": Area("weight_sync", "weight_sync inference_engines/test_native_lora.py"),
}


def negate_condition(node: cst.If | cst.While) -> Iterator[cst.CSTNode]:
    test = node.test.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
    yield node.with_changes(test=cst.UnaryOperation(cst.Not(), test))


def remove_call(node: cst.SimpleStatementLine) -> Iterator[cst.CSTNode]:
    if m.matches(node, m.SimpleStatementLine(body=[m.Expr(value=m.Call() | m.Await(expression=m.Call()))])):
        yield node.with_changes(body=[cst.Pass()])


OPERATORS = [  # without those of mutmut that put None in the place of values: such mutants mostly raise
    (cst.BaseNumber, mutators.operator_number),
    (cst.Name, mutators.operator_name),
    (cst.AugAssign, mutators.operator_augmented_assignment),
    (cst.UnaryOperation, mutators.operator_remove_unary_ops),
    (cst.CSTNode, mutators.operator_keywords),
    (cst.CSTNode, mutators.operator_swap_op),
    (cst.IfExp, mutators.operator_if_exp),
    (cst.If | cst.While, negate_condition),
    (cst.SimpleStatementLine, remove_call),
]
# Types, texts, arguments of errors, assertions and log lines have no mutants; durations have none of numbers.
SKIPPED = cst.Annotation | cst.Decorator | cst.Raise | cst.Assert | cst.FormattedString | cst.Import | cst.ImportFrom
LOGGING = m.SimpleStatementLine(body=[m.Expr(m.Call(func=m.Attribute(value=m.Name("logger") | m.Name("warnings"))))])
DURATION = re.compile(r"timeout|second|deadline|interval")


def mutants_of(node: cst.CSTNode, scope: str = "", line: str = "") -> Iterator[tuple[str, cst.CSTNode, cst.CSTNode]]:
    """Yield (function, statement and change as text; node; mutated node) for every mutant below `node`."""
    if isinstance(node, SKIPPED) or m.matches(node, LOGGING | m.If(test=m.Name("TYPE_CHECKING"))):
        return
    if isinstance(node, cst.FunctionDef | cst.ClassDef):
        scope, line = f"{scope}.{node.name.value}", ""
    elif isinstance(node, cst.SimpleStatementLine):
        line = cst.Module([]).code_for_node(node.with_changes(leading_lines=[])).strip()
    for kind, operator in OPERATORS:
        if isinstance(node, kind) and not (kind is cst.BaseNumber and DURATION.search(line)):
            for mutated in operator(node):
                change = (cst.Module([]).code_for_node(either).strip().split("\n")[0] for either in (node, mutated))
                yield f"{scope} {line} {' -> '.join(change)}", node, mutated
    for child in node.children:
        yield from mutants_of(child, scope, line)


def executed_with(source: str, number: int) -> set[int]:
    """Return the lines of a line's statement; all lines of the file for what is executed at import."""
    around: list[Any] = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.stmt)]
    around = [node for node in around if node.lineno <= number <= node.end_lineno]
    if not any(isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef) and n.body[0].lineno <= number for n in around):
        return set(range(1, len(source.splitlines()) + 1))
    statement = max(around, key=lambda node: node.lineno)
    end = statement.body[0].lineno - 1 if hasattr(statement, "body") else statement.end_lineno
    return set(range(statement.lineno, max(end, statement.lineno) + 1))


def sample(paths: str, count: int, seed: int) -> tuple[list[tuple[Path, str, set[int], str]], int]:
    """Draw mutants of files. Returns: of each mutant its file, source, lines and change; the number there is."""
    found, seen = [], Counter()
    for path in (SOURCES / path for path in paths.split()):
        if not path.exists():
            sys.exit(f"mutation: {path} does not exist; correct AREAS in {__file__}")
        for file in sorted(path.rglob("*.py")) or [path]:
            module = cst.parse_module(file.read_text())
            for text, node, mutated in mutants_of(module):
                seen[text] += 1  # the same change of the same statement twice in a function
                order = hashlib.sha256(f"{seed} {text} {seen[text]}".encode()).hexdigest()
                found.append((order, file, module, node, mutated))
    drawn = []
    for _, file, module, node, mutated in sorted(found, key=lambda mutant: mutant[0])[:count]:
        source = module.deep_replace(node, mutated).code
        lines = enumerate(zip(module.code.splitlines(), source.splitlines(), strict=False), start=1)
        number, (old, new) = next((number, pair) for number, pair in lines if pair[0] != pair[1])
        lines = executed_with(module.code, number)
        file = file.relative_to(SOURCES)
        drawn.append((file, source, lines, f"{file}:{number}  {old.strip()}  ->  {new.strip()}"))
    return drawn, len(found)


def run_tests(files: list[str], markers: str, folder: Path, timeout: float, record: bool = False) -> tuple[str, str]:
    """Run test files in a forked process; `record`: write the lines that each executes, and the modules imported.

    Returns: passed, failed or timeout; the text that pytest printed.
    """
    options = (
        "-xq -p no:cacheprovider -p no:cost_reporter --hypothesis-seed=0 -W ignore::pytest.PytestAssertRewriteWarning"
    )
    if record:  # coverage may be too late for a thread that ends with its test
        options += " -W ignore::pytest.PytestUnraisableExceptionWarning"
    if (child := os.fork()) == 0:
        os.setsid()
        os.dup2(os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
        os.dup2(1, 2)
        recorder = coverage.Coverage(data_file=None, config_file=False, include=[f"{folder}/sources/*"])
        if record:
            os.environ["EXECUTED_LINES"] = str(folder)  # in ranks, by `executed_lines.py`
            recorder.start()
        status, seconds = pytest.ExitCode.OK, {}
        for file in files:  # in turn: a mutant that the first detects does not wait for the rest to be collected
            (folder / "context").write_text(file)
            if record:
                recorder.switch_context(file)
            start = time.monotonic()
            if status in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
                status = pytest.main([*options.split(), "-m", markers, f"--basetemp={folder}/tests", file])
            seconds[file] = time.monotonic() - start
        if record:
            recorder.stop()
            data = recorder.get_data()
            with open(folder / "lines", "a") as lines:
                for file in data.measured_files():
                    for number, tests in data.contexts_by_lineno(file).items():
                        lines.writelines(f"{test}\t{file}\t{number}\n" for test in tests)
            (folder / "record").write_text(json.dumps({"modules": list(sys.modules), "seconds": seconds}))
        os._exit(0 if status == pytest.ExitCode.NO_TESTS_COLLECTED else status)
    end, outcome = time.monotonic() + timeout, "timeout"
    try:
        while outcome == "timeout" and time.monotonic() < end:
            time.sleep(0.05)
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                outcome = "failed" if status else "passed"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # the processes that the tests started too
    if outcome == "timeout":
        os.waitpid(child, 0)
    return outcome, (folder / "log").read_text()


def interval(detected: int, drawn: int) -> str:
    """Return the 95 % interval of a share (Wilson's score interval) as text."""
    z, share = 1.96, detected / drawn
    middle = share + z * z / (2 * drawn)
    width = z * math.sqrt(share * (1 - share) / drawn + (z / (2 * drawn)) ** 2)
    low, high = ((middle + side * width) / (1 + z * z / drawn) for side in (-1, 1))
    return f"{low:.2f}-{high:.2f}"


def tests_of_lines(folder: Path) -> dict[tuple[str, int], set[str]]:
    """Return the test files that execute each line of the copy."""
    tests = defaultdict(set)
    for test, file, line in (row.split("\t") for row in (folder / "lines").read_text().splitlines()):
        tests[file, int(line)].add(test)
    (folder / "lines").unlink()
    return tests


def score(name: str, folder: Path, count: int, seed: int, only: str, without: str) -> tuple[str, list[str]]:
    """Test the mutants of an area. Returns: its row of the table; those that no test detected."""
    area, copy = AREAS[name], folder / "sources" / SOURCES.name
    paths = [Path(TESTS, path) for path in area.tests.split()]
    files = list(dict.fromkeys(str(file) for path in paths for file in sorted(path.rglob("test_*.py")) or [path]))
    files = [file for file in files if not (without and re.search(without, file))]
    outcome, output = run_tests(files, area.markers, folder, timeout=2400, record=True)
    if outcome != "passed":
        sys.exit(f"mutation: tests of {name} without a mutant: {outcome}\n{output}")
    executed, recorded = tests_of_lines(folder), json.loads((folder / "record").read_text())
    for module in recorded["modules"]:
        if not re.match(r"_?pytest|skyrl|tx\b|test|conftest", module):
            with contextlib.suppress(Exception):  # names that only look like modules
                importlib.import_module(module)
    mutants, total = sample(area.sources, count, seed)
    outcomes, survivors = Counter(), []
    for file, source, lines, change in mutants:
        if not re.search(only, change):
            continue
        (copy / file).write_text(source)
        tests = {test for line in lines for test in executed.get((str(copy / file), line), ())}
        chosen = sorted(tests, key=lambda test: recorded["seconds"][test])
        start, timeout = time.monotonic(), 30 + 3 * sum(recorded["seconds"][test] for test in chosen)
        outcome, output = run_tests(chosen, area.markers, folder, timeout) if chosen else ("passed", "")
        shutil.copy(SOURCES / file, copy / file)
        outcomes[outcome] += 1
        test = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
        by = test[1] if test else f"{len(chosen)} test files"
        print(f"{outcome:8}{time.monotonic() - start:6.1f} s  {change}  {by}", flush=True)
        if outcome == "passed":
            survivors.append(f"- {name}: {change}")
    drawn = outcomes.total()
    detected = drawn - outcomes["passed"]
    share = [f"{detected / drawn:.2f}", interval(detected, drawn)] if drawn else ["", ""]
    row = (name, total, drawn, outcomes["failed"], outcomes["timeout"], outcomes["passed"], *share)
    return f"| {' | '.join(map(str, row))} |", survivors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("areas", nargs="+", choices=AREAS)
    parser.add_argument("--count", type=int, default=40, help="mutants drawn of an area")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="regular expression: test those of the drawn whose line has it")
    parser.add_argument("--without", default="", help="regular expression: leave out the test files that have it")
    arguments = parser.parse_args()
    os.chdir(ROOT)
    with tempfile.TemporaryDirectory(prefix="mutation-") as name:
        copy = Path(name, "sources", SOURCES.name)
        shutil.copytree(SOURCES, copy, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(executed_lines.__file__, copy.parent / "sitecustomize.py")
        compile_dir(copy, quiet=1, invalidation_mode=PycInvalidationMode.CHECKED_HASH)  # mutants share sizes and times
        os.environ["PYTHONPATH"] = os.pathsep.join([str(copy.parent), os.environ.get("PYTHONPATH", "")])
        sys.path.insert(0, str(copy.parent))
        options = arguments.count, arguments.seed, arguments.only, arguments.without
        results = [score(area, Path(name), *options) for area in arguments.areas]
    print("\n| area | all mutants | drawn | killed | timed out | survived | score | 95 % interval |")
    print("|---|---|---|---|---|---|---|---|")
    print(*(row for row, _ in results), "\nSurvivors:", *(one for _, some in results for one in some), sep="\n")


if __name__ == "__main__":
    main()

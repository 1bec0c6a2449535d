"""Tests run in a runtime, and what became of each.

Test commands that are plain pytest are run by a few lines of ours around it, which say afterwards what became of each
test. Python starts without the working directory on its path and has loaded pytest before anything from there, so no
file of an agent stands in for it; a process that leaves early has said nothing, which is a failure. What they cannot
prevent: code under test is in the process of its tests, and may take pytest itself apart.
"""

import json
import secrets
import shlex
from collections.abc import Collection
from dataclasses import dataclass, field

from skyrl_agent.errors import InfraError
from skyrl_agent.runtimes.base import ExecResult, Limits, Runtime

ENVIRONMENT = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": "-p no:cacheprovider"}
SHELL_SIGNS = set(";|&<>$`(){}*?~#")
TAIL = 4000

# Runs inside. In: a secret on the first line, a JSON list of paths on the second. Arguments: pytest's.
RUNNER = """
import json, os, sys
secret, untrusted = sys.stdin.readline().strip(), set(json.loads(sys.stdin.readline()))
out = os.fdopen(os.dup(1), "w")
def say(**fields):
    out.write("\\n" + secret + json.dumps(fields) + "\\n")
    out.flush()
try:
    import pytest
except ImportError as error:
    say(missing=str(error))
    os._exit(1)
root = os.path.realpath(os.getcwd())
sys.path.insert(0, root)
tests = {}
class Results:
    def pytest_collectreport(self, report):
        if report.failed:
            tests[report.nodeid] = "failed"
    def pytest_runtest_logreport(self, report):
        outcome = report.outcome
        if outcome == "skipped" and self.by_the_code(report):
            outcome = "failed"
        if outcome != "passed" or report.when == "call":
            tests[report.nodeid] = outcome
    def by_the_code(self, report):
        if hasattr(report, "wasxfail"):
            return "xfail" not in report.keywords
        path = report.longrepr[0] if isinstance(report.longrepr, tuple) else ""
        return os.path.relpath(os.path.realpath(path), root) in untrusted
status = int(pytest.main(sys.argv[1:], plugins=[Results()]))
sys.stdout.flush()
say(status=status, tests=tests)
os._exit(status)
"""


@dataclass(frozen=True)
class TestRun:
    """What came of a test command."""

    __test__ = False  # its name is no test's

    passed: bool
    """It ended by itself, with success, and at least one test passed."""
    tests: dict[str, str] = field(default_factory=dict)
    """pytest's name of each test -> passed, failed, skipped. Empty if the command is not pytest's, or left early."""
    timed_out: bool = False
    output: str = ""
    """Its last part, for people."""

    @property
    def fraction(self) -> float:
        """Of the tests that were not skipped, how many passed."""
        counted = [outcome for outcome in self.tests.values() if outcome != "skipped"]
        return counted.count("passed") / len(counted) if counted else float(self.passed)


def pytest_arguments(command: str) -> list[str] | None:
    """Of a command that is plain pytest; None for any other."""
    if SHELL_SIGNS & set(command):
        return None
    try:
        words = shlex.split(command)
    except ValueError:
        return None
    for start in (["pytest"], ["python", "-m", "pytest"], ["python3", "-m", "pytest"]):
        if words[: len(start)] == start:
            return words[len(start) :]
    return None


async def run_tests(runtime: Runtime, command: str, limits: Limits, untrusted: Collection[str] = ()) -> TestRun:
    """
    Args:
        untrusted: files that may not skip a test.

    Raises:
        InfraError: pytest is not installed where the command runs.
    """
    arguments = pytest_arguments(command)
    if arguments is None:
        done = await runtime.exec(command, limits=limits)
        return TestRun(done.ok, timed_out=_timed_out(done), output=_tail(done))
    secret = secrets.token_hex(16)
    stdin = f"{secret}\n{json.dumps(sorted(untrusted))}\n"
    argv = [runtime.python, "-I", "-B", "-c", RUNNER, *arguments]
    done = await runtime.exec(argv, stdin=stdin, env=ENVIRONMENT, limits=limits)
    said = _said(done.stdout, secret)
    if "missing" in said:
        raise InfraError(
            f"pytest cannot be imported by {runtime.python}, which runs the tests: {said['missing']}. "
            "Install it there (for a local sandbox: pip install 'skyrl-agent[swe]')"
        )
    tests = said.get("tests", {})
    passed = done.ok and said.get("status") == 0 and "passed" in tests.values() and "failed" not in tests.values()
    return TestRun(passed, tests, _timed_out(done), _tail(done).replace(secret, ""))


def _said(output: str, secret: str) -> dict:
    for line in reversed(output.splitlines()):
        if line.startswith(secret):
            try:
                return json.loads(line[len(secret) :])
            except ValueError:
                return {}
    return {}


def _timed_out(done: ExecResult) -> bool:
    return done.outcome in ("wall_time", "cpu_time")


def _tail(done: ExecResult) -> str:
    return (done.stdout + done.stderr)[-TAIL:]

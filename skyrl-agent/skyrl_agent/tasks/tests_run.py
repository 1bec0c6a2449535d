"""Test run in a runtime, with the outcome of each test.

Plain pytest commands are run by a wrapper of a few lines, which reports the outcome of each test afterwards. Python
starts without the working directory on its path and loads pytest before anything from there, so no file of an agent can
replace it; a process that exits early reports nothing, which is a failure. The wrapper cannot prevent code under test,
which is in the process of its tests, from changing pytest itself.
"""

import json
import re
import secrets
import shlex
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from skyrl_agent.errors import InfraError
from skyrl_agent.runtimes.base import ExecResult, Limits, Runtime

ENVIRONMENT = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": "-p no:cacheprovider"}
SHELL_SIGNS = set(";|&<>$`(){}*?~#")
TAIL = 4000

# Runs in the runtime. Input: a secret on the first line, a JSON list of paths on the second. Arguments: pytest's.
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
say(started=True)
root = os.path.realpath(os.getcwd())
sys.path.insert(0, root)
tests, not_collected = {}, {}
def inside(path):
    path = os.path.relpath(os.path.realpath(path), root)
    return None if path.startswith("..") else path
def explained(error):
    error = error.__cause__ or getattr(error, "cause", None) or error
    frame, file = error.__traceback__, None
    while frame is not None:
        file = inside(frame.tb_frame.f_code.co_filename) or file
        frame = frame.tb_next
    path = getattr(error, "filename", None) if isinstance(error, SyntaxError) else getattr(error, "path", None)
    return {
        "error": type(error).__name__,
        "text": str(error)[:500],
        "file": inside(path) if isinstance(path, str) else file,
        "module": error.name if isinstance(error, ModuleNotFoundError) else None,
    }
class Results:
    @pytest.hookimpl(hookwrapper=True)
    def pytest_load_initial_conftests(self):
        outcome = yield
        if outcome.excinfo:
            not_collected["conftest.py"] = explained(outcome.excinfo[1])
    def pytest_exception_interact(self, call, report):
        if isinstance(report, pytest.CollectReport):
            not_collected[report.nodeid] = explained(call.excinfo.value)
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
say(status=status, tests=tests, not_collected=not_collected)
os._exit(status)
"""

NOT_EXECUTABLE, NOT_FOUND = 126, 127
"""Exit statuses of a shell for a command that it could not start."""
INTERNAL_ERROR, USAGE_ERROR, NO_TESTS = 3, 4, 5
"""Exit statuses of pytest for tests that it did not run."""
MISSING_PROGRAM = re.compile(r"([^\s:]+): (?:command not found|not found|No such file or directory)")
NOT_STARTED = re.compile(r"No module named '?pytest\b|^make.*: \*\*\* .* Error 12[67]$", re.MULTILINE)
"""Output of a wrapper (`make`, `python -m pytest`) whose own exit status does not say that a program is missing."""


@dataclass(frozen=True)
class CollectionError:
    """Exception for which pytest could not collect a test file."""

    error: str
    """Class name of the exception."""
    text: str
    file: str | None = None
    """File of the project in which it arose; None: outside of the project."""
    module: str | None = None
    """Module that does not exist."""


@dataclass(frozen=True)
class TestRun:
    """Result of a test command."""

    __test__ = False  # not a test despite its name

    passed: bool
    """True if the command ended by itself with exit status 0 and at least one test passed."""
    tests: dict[str, str] = field(default_factory=dict)
    """pytest's name of each test -> passed, failed, skipped. Empty if the command is not pytest's, or left early."""
    timed_out: bool = False
    output: str = ""
    """Last part of the output, for people."""
    obstacles: dict[str, str] = field(default_factory=dict)
    """Obstacles for which tests were not run (`exit status 127`, `collection of test_a.py`, ...) -> details. The cause
    may be the working directory or the task: only a run without the agent's changes can tell."""
    not_collected: dict[str, CollectionError] = field(default_factory=dict)
    """Name of a test file -> why. Each is among `tests` (failed) and `obstacles` too."""

    @property
    def missing_program(self) -> str | None:
        """Program that a shell did not find."""
        return find_missing_program(self.obstacles)

    def outcome(self, name: str) -> str | None:
        """Return `passed`, `failed` or `skipped`; None if no test has that name (except in an uncollected file)."""
        return None if name in self.not_collected else self.tests.get(name)

    @property
    def fraction(self) -> float:
        """Return the share of passed tests among those not skipped."""
        counted = [outcome for outcome in self.tests.values() if outcome != "skipped"]
        return counted.count("passed") / len(counted) if counted else float(self.passed)


def parse_pytest_arguments(command: str) -> list[str] | None:
    """Return the arguments of a plain pytest command; None for any other."""
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


async def check_pytest(runtime: Runtime) -> None:
    """Raises InfraError if the interpreter that runs tests cannot import pytest."""
    done = await runtime.exec([runtime.python, "-I", "-B", "-c", "import pytest"], env=ENVIRONMENT)
    if not done.ok:
        raise _remove_pytest(runtime, _get_last_line(_get_tail(done)))


def _remove_pytest(runtime: Runtime, error: str) -> InfraError:
    return InfraError(
        f"pytest cannot be imported by {runtime.python}, which runs the tests: {error}. "
        "Install it there (for a local sandbox: pip install 'skyrl-agent[swe]')"
    )


async def run_tests(runtime: Runtime, command: str, limits: Limits, untrusted: Collection[str] = ()) -> TestRun:
    """Run a test command to its end.

    Args:
        untrusted: files that may not skip a test.

    Raises:
        InfraError: pytest is not installed where the command runs, or did not start.
    """
    arguments = parse_pytest_arguments(command)
    if arguments is None:
        done = await runtime.exec(command, limits=limits)
        return TestRun(
            done.ok, timed_out=_is_timed_out(done), output=_get_tail(done), obstacles=find_obstacles(done, command)
        )
    secret = secrets.token_hex(16)
    stdin = f"{secret}\n{json.dumps(sorted(untrusted))}\n"
    argv = [runtime.python, "-I", "-B", "-c", RUNNER, *arguments]
    done = await runtime.exec(argv, stdin=stdin, env=ENVIRONMENT, limits=limits)
    report = _parse_report(done.stdout, secret)
    if not report:
        raise InfraError(
            f"pytest did not start in {runtime.workdir}: {done.outcome} after {done.wall_seconds:.1f} s, return code "
            f"{done.returncode}: {_get_last_line(_get_tail(done))!r}"
        )
    if "missing" in report:
        raise _remove_pytest(runtime, report["missing"])
    tests = report.get("tests", {})
    passed = done.ok and report.get("status") == 0 and "passed" in tests.values() and "failed" not in tests.values()
    output = _get_tail(replace(done, stdout="".join(x for x in done.stdout.splitlines(True) if secret not in x)))
    not_collected = {name: CollectionError(**why) for name, why in report.get("not_collected", {}).items()}
    obstacles = {f"collection of {name}": f"{why.error}: {why.text}" for name, why in not_collected.items()}
    if not obstacles and "status" in report and not {"passed", "failed"} & set(tests.values()):
        obstacles = {_describe_missing_test(report["status"], tests): _get_last_line(output)}
    return TestRun(passed, tests, _is_timed_out(done), output, obstacles, not_collected)


def find_obstacles(done: ExecResult, command: str) -> dict[str, str]:
    """Return the signs that a shell command did not run its tests, in the format of `TestRun.obstacles`."""
    if done.outcome != "exited" or done.returncode == 0:
        return {}
    if done.returncode in (NOT_EXECUTABLE, NOT_FOUND):
        return {f"exit status {done.returncode}": _get_last_line(done.stderr or done.stdout)}
    if found := NOT_STARTED.search(done.stdout + done.stderr):
        return {"program of the command": found[0]}
    if "pytest" in command and done.returncode in (USAGE_ERROR, NO_TESTS):
        return {_describe_missing_test(done.returncode): _get_last_line(_get_tail(done))}
    return {}


def find_missing_program(obstacles: Mapping[str, str]) -> str | None:
    """Return the name or path of the program that a shell did not find, if `TestRun.obstacles` has one."""
    found = MISSING_PROGRAM.search(obstacles.get(f"exit status {NOT_FOUND}", ""))
    return found[1] if found else None


def _describe_missing_test(status: int, tests: Collection[str] = ()) -> str:
    known = {INTERNAL_ERROR: "internal error of pytest", USAGE_ERROR: "usage error of pytest"}
    return known.get(status, "all tests are skipped" if tests else "no test is collected")


def _get_last_line(text: str) -> str:
    return next((line.strip()[:300] for line in reversed(text.splitlines()) if line.strip()), "")


def _parse_report(output: str, secret: str) -> dict:
    for line in reversed(output.splitlines()):
        if line.startswith(secret):
            try:
                return json.loads(line[len(secret) :])
            except ValueError:
                return {}
    return {}


def _is_timed_out(done: ExecResult) -> bool:
    return done.outcome in ("wall_time", "cpu_time")


def _get_tail(done: ExecResult) -> str:
    return (done.stdout + done.stderr)[-TAIL:]

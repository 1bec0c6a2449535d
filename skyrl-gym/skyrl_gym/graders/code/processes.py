"""The answer at work in a sandbox, and its cases put to it one by one. Reports results and does not score them."""

import time
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Protocol, Self

from skyrl_gym.error import InfraError
from skyrl_gym.graders.code.cases import AssertTests, Case, CodeTests, FunctionTests, ProgramTests, split_argument_lines
from skyrl_gym.graders.code.channel import Channel, DeadlineExceeded, Ended
from skyrl_gym.graders.code.compare import is_same_json, is_same_output
from skyrl_gym.sandbox.base import Limits, Sandbox

START_SECONDS = 30.0
"""Time that Python has to start on a busy machine; a longer start counts as an infrastructure failure."""

ENVIRONMENT = {
    "PYTHONHASHSEED": "0",  # the order of a set of text is the same in every run
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONUTF8": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
INSIDE = "skyrl_gym.graders.code.inside"
BOOTSTRAP = """
import sys, types
for name, source in zip(sys.argv[1::2], sys.argv[2::2]):
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(source, name, "exec"), vars(module))
module.main()
"""
"""Makes modules of the arguments, and runs the last of them."""

MODULES_OF = {
    "program": ("control", "names", "loading", "program"),
    "functions": ("control", "names", "loading", "values", "functions"),
    "checker": ("control", "names", "values", "checker"),
}
WHY_ENDED = {
    "memory": "it used more memory than allowed",
    "cpu_time": "it used more processor time than allowed",
    "wall_time": "it ran longer than allowed",
    "output": "it printed more than allowed",
    "workspace": "it wrote more than allowed",
}


class NewSandbox(Protocol):
    """Factory of sandboxes, such as `skyrl_gym.sandbox.make_sandbox`."""

    def __call__(self, *, limits: Limits) -> Sandbox: ...


@dataclass(frozen=True)
class CaseResult:
    """Outcome of one case."""

    passed: bool
    error: str = ""
    got: str | None = None
    late: bool = False
    fatal: bool = False
    """The process has exited: the next case needs a new one."""


class DoesNotCompile(Exception):
    """The answer is not a program."""


class DoesNotLoad(Exception):
    """The solution fails while it is loaded."""


@cache
def _read_source(name: str) -> str:
    return files(INSIDE).joinpath(f"{name}.py").read_text()


class SolutionProcess:
    """Process of an answer, and a second process if the tests are code. A context manager that ends both.

    Raises InfraError if a sandbox fails; the answer's behaviour is a `CaseResult`, `DoesNotCompile`, `DoesNotLoad` or
    `Late`.
    """

    def __init__(self, tests: CodeTests, new_sandbox: NewSandbox, limits: Limits):
        self._tests = tests
        self._new_sandbox = new_sandbox
        self._limits = limits
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        """Start the processes, which do not know the answer yet."""
        with ExitStack() as stack:
            is_program = isinstance(self._tests, ProgramTests)
            self._solution = self._start("program" if is_program else "functions", stack)
            self._checker = self._start("checker", stack) if isinstance(self._tests, AssertTests) else None
            for channel in (self._solution, self._checker):
                if channel is not None:
                    _wait_until_ready(channel)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _start(self, role: str, stack: ExitStack) -> Channel:
        sandbox = stack.enter_context(self._new_sandbox(limits=self._limits))
        sources = [part for name in MODULES_OF[role] for part in (f"{INSIDE}.{name}", _read_source(name))]
        process = sandbox.popen([sandbox.python, "-S", "-c", BOOTSTRAP, *sources], env=ENVIRONMENT)
        channel = Channel(process, "the tests' process" if role == "checker" else "the answer's process")
        stack.callback(channel.close)
        return channel

    def load(self, code: str, first: int, deadline: float) -> None:
        """Hand over the answer, and prepare for the cases from number `first` on."""
        prompt = ""
        if isinstance(self._tests, AssertTests):
            prompt = self._tests.prompt
            self._load_tests(self._tests, first)
        try:
            reply = self._solution.ask({"code": code, "before": prompt}, deadline)
        except Ended as end:
            raise DoesNotLoad(_why(end)) from end
        if "invalid" in reply:
            raise DoesNotCompile(str(reply["invalid"]))
        if "loaded" not in reply:
            raise DoesNotLoad(str(reply.get("error")))

    def _load_tests(self, tests: AssertTests, first: int) -> None:
        """Hand over the tests. Whatever fails here is not the answer's fault: nothing of it has been run yet."""
        assert self._checker is not None
        request = {
            "before": tests.prompt,
            "setup": tests.setup,
            "entry_point": tests.entry_point,
            "answer_names": sorted(tests.answer_names),
            "modules": tests.needed_modules,
            "tests": list(tests.tests[first:]),
        }
        try:
            lacking = self._checker.ask(request, time.monotonic() + START_SECONDS).get("lacking")
        except Ended as end:
            raise InfraError(_why(end)) from end
        except DeadlineExceeded as late:
            raise InfraError(f"the modules of the tests were not imported within {START_SECONDS} s") from late
        if lacking:
            raise InfraError(
                f"the tests need modules that Python in the sandbox cannot import: {lacking}. Install them for that "
                "Python; numpy comes with pip install 'skyrl-gym[code]'"
            )

    def judge(self, number: int, deadline: float) -> CaseResult:
        """Run one case. After a fatal result these processes are of no more use."""
        try:
            match self._tests:
                case ProgramTests(cases):
                    return self._run_program(cases[number], deadline)
                case FunctionTests(function, cases):
                    return self._call_function(function, cases[number], deadline)
                case AssertTests():
                    return self._wait_for_verdict(deadline)
        except DeadlineExceeded:
            return CaseResult(False, error="it took too long", late=True, fatal=True)
        except Ended as end:
            return CaseResult(False, error=_why(end), fatal=True)

    def _run_program(self, case: Case, deadline: float) -> CaseResult:
        reply = self._solution.ask({"stdin": case.input}, deadline)
        printed = reply.get("stdout")
        if not isinstance(printed, str):
            return CaseResult(False, error=str(reply.get("error")))
        if reply.get("returncode") != 0:
            error = f"exit code {reply.get('returncode')}: {reply.get('stderr')}"
            return CaseResult(False, error=error.strip(), got=printed)
        return CaseResult(is_same_output(printed, case.output), got=printed)

    def _call_function(self, function: str, case: Case, deadline: float) -> CaseResult:
        request = {"do": "call_json", "function": function, "arguments": split_argument_lines(case)}
        reply = self._solution.ask(request, deadline)
        returned = reply.get("json")
        if not isinstance(returned, str):
            return CaseResult(False, error=_format_error(reply))
        return CaseResult(is_same_json(returned, case.output), got=returned)

    def _wait_for_verdict(self, deadline: float) -> CaseResult:
        """Carry the tests' requests to the answer, and the replies back unread, until the tests have decided."""
        assert self._checker is not None
        while True:
            line = self._checker.receive(deadline)
            if line.startswith(b"!"):
                verdict = self._checker.message(line[1:])
                return CaseResult(verdict.get("passed") is True, error=str(verdict.get("error") or ""))
            self._solution.send(line[1:], deadline)
            self._checker.send(self._solution.receive(deadline), deadline)


def _why(end: Ended) -> str:
    result = end.channel.close()
    return f"{end}: {WHY_ENDED.get(result.outcome) or f'exit code {result.returncode}'}"


def _format_error(reply: dict[str, object]) -> str:
    """Format the exception that the answer reports; the reply may be anything."""
    match reply:
        case {"raised": [str(kind), *_], "text": str(text)}:
            return f"{kind}: {text}"
    return f"not a result: {reply!r:.200}"


def _wait_until_ready(channel: Channel) -> None:
    """Raises InfraError: until here nothing of the answer has run, so that it is not to blame."""
    try:
        channel.message(channel.receive(time.monotonic() + START_SECONDS))
    except (Ended, DeadlineExceeded) as failure:
        result = channel.close()
        raise InfraError(f"Python did not start in the sandbox: {failure!r}, {result}") from failure

"""Python REPL in a sandbox, whose code can query a language model and call functions of the host.

The code runs in a separate process (`repl_process.py`), which lives as long as the REPL and keeps the variables. The
code and all messages of the process are untrusted: it can report any output, variable or final answer, and call the
functions it was given with plain values. Any other message terminates the process.
"""

import dataclasses
import re
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from skyrl_gym.deadline import outcome_of
from skyrl_gym.envs.rlm import repl_process
from skyrl_gym.envs.rlm.pipe import BadFrame, Pipe
from skyrl_gym.envs.rlm.repl_process import decode, encode
from skyrl_gym.error import InfraError
from skyrl_gym.sandbox import Sandbox, SandboxProcess, make_sandbox

LmCallback = Callable[[list[str]], list[str]]
"""Answers of a language model, one to each prompt."""

RESERVED_TOOL_NAMES = frozenset(
    {*repl_process.FUNCTIONS, "llm_query", "llm_query_batched", "rlm_query", "rlm_query_batched", "context"}
)
"""Names that a custom tool cannot have. So are `context_0`, `context_1` and so on."""

START_SECONDS = 60.0
GRACE_SECONDS = 3.0
"""Time that interrupted code has to end before its process is ended."""
LIFETIME_SECONDS = 6 * 3600.0
CPU_SECONDS_PER_TIMEOUT = 20
"""The process may use this many times the time-out of one execution: as long as a long episode, with some to spare."""
MAX_BATCH = 1000
MAX_PARALLEL_SUBCALLS = 2
MAX_CONTEXT_BYTES = 1 << 29

_CONTEXT_NAME = re.compile(r"context(_\d+)?")
_PROGRAM = Path(repl_process.__file__)


@dataclass(frozen=True)
class Opaque:
    """Placeholder of a variable that was not transferred: it is no plain value, or too large."""

    type_name: str


@dataclass
class REPLResult:
    """Result of one execution."""

    stdout: str
    stderr: str
    """Tracebacks, and what happened to the REPL if its code did not end by itself."""
    locals: dict[str, Any] = field(default_factory=dict)
    """The variables there are now; `Opaque` stands for those that are not plain values."""
    final_answer: str | None = None
    """Given by FINAL_VAR."""


class _ReplExited(Exception):
    """The process ended, or had to be. The text says why, for the model."""


class PersistentREPL:
    """Python session that executes code repeatedly in one namespace. The process starts with the first execution.

    `globals` are the functions offered to the code, as objects of the host; `locals` are copies of its variables after
    the last execution. Changes to either have no effect inside. The functions, tools and contexts
    are restored after each execution, whatever the code did to their names.

    Code that runs longer than `timeout` is interrupted and keeps its variables. If it does not stop, exits its process
    or runs out of memory, the next execution gets a new process with contexts and tools but without the variables, as
    reported in the result's stderr. Functions of the host count as running code; at the timeout a running one is
    awaited, so they need their own timeouts.

    A REPL is not thread-safe; any number of REPLs run concurrently.

    Args:
        timeout: seconds for one execution.
        custom_tools: functions of the host and plain values, by the name that the code sees. A function is given
            whatever plain values the code chooses, and what it returns crosses as a plain value, else as text; what it
            raises, the code sees as a RuntimeError, except InfraError, which `execute` raises.
        lm_callback: makes `llm_query`, `llm_query_batched`, `rlm_query` and `rlm_query_batched` available.
        subcall_fn: `subcall_fn(prompt)` or `subcall_fn(prompt, context=context)` answers `rlm_query`, two at a time;
            without it the language model does. Called from other threads.
        sandbox: a started sandbox for the process, owned by the caller. Default: the first execution creates one, which
            `cleanup` closes.
        allow_imports: whether the code may import modules. Not a security boundary, which is the sandbox; False matches
            earlier releases.
        max_output: maximum bytes of stdout and of stderr that one execution returns.
        memory_bytes: memory limit of the process, contexts and variables included.

    Raises:
        ValueError: a tool has a reserved name, or a name that is no identifier.
        TypeError: a value among the tools is not plain.
    """

    def __init__(
        self,
        timeout: float = 15.0,
        custom_tools: Mapping[str, object] | None = None,
        lm_callback: LmCallback | None = None,
        subcall_fn: Callable[..., object] | None = None,
        *,
        sandbox: Sandbox | None = None,
        allow_imports: bool = True,
        max_output: int = 100_000,
        memory_bytes: int = 1 << 30,
    ) -> None:
        self.timeout = timeout
        self.allow_imports = allow_imports
        self.max_output = max_output
        self.memory_bytes = memory_bytes
        self._lm_callback = lm_callback
        self._subcall_fn = subcall_fn
        self._functions: dict[str, Callable[..., object]] = {}
        self._values: dict[str, object] = {}
        self._contexts: dict[int, object] = {}
        for name, tool in (custom_tools or {}).items():
            self._add_tool(name, tool)
        if lm_callback is not None:
            self._functions |= {
                "llm_query": self._llm_query,
                "llm_query_batched": self._llm_query_batched,
                "rlm_query": self._rlm_query,
                "rlm_query_batched": self._rlm_query_batched,
            }
        self.globals: dict[str, object] = {
            "FINAL_VAR": self._get_final_variable,
            "SHOW_VARS": self._show_vars,
            **self._functions,
            **self._values,
        }
        self.locals: dict[str, object] = {}
        self._sandbox = sandbox
        self._owned_sandbox: Sandbox | None = None
        self._process: SandboxProcess | None = None
        self._pipe: Pipe | None = None
        self.deadline = float("inf")
        """Deadline of the running code, on the clock `time.monotonic`."""
        self._closed = False

    def _add_tool(self, name: str, tool: object) -> None:
        if name in RESERVED_TOOL_NAMES or _CONTEXT_NAME.fullmatch(name):
            raise ValueError(f"custom tool {name!r}: the name is reserved; reserved are {sorted(RESERVED_TOOL_NAMES)}")
        if not name.isidentifier():
            raise ValueError(f"custom tool {name!r}: the name must be a Python identifier")
        if callable(tool):
            self._functions[name] = tool
        else:
            encode(tool, MAX_CONTEXT_BYTES, for_host=False)
            self._values[name] = tool

    def add_context(self, payload: object, index: int = 0) -> None:
        """Bind a plain value as `context_{index}`, and the one of index 0 as `context` too.

        Raises TypeError if it is not a plain value.
        """
        encode(payload, MAX_CONTEXT_BYTES, for_host=False)
        self._contexts[index] = payload
        self.locals |= self._get_context_names()
        if self._pipe is not None:
            try:
                self._send_context(index, time.monotonic() + START_SECONDS)
            except (OSError, TimeoutError):
                self._stop()  # the next execution starts a new process, with all contexts

    def execute(self, code: str) -> REPLResult:
        """Run code. Whatever it does, this returns.

        Raises:
            InfraError: the sandbox failed, or a function of the host reported a broken service. Variables are gone.
            ValueError: the REPL is closed.
        """
        if self._closed:
            raise ValueError("this REPL is closed")
        try:
            if self._pipe is None:
                self._start()
            result = self._run(code, self.timeout)
        except _ReplExited as gone:
            self._stop()
            self.locals = self._get_context_names()
            note = f"{gone}. The REPL was started anew: its variables are gone, the context and the tools are there."
            return REPLResult(stdout="", stderr=note, locals=dict(self.locals))
        except BaseException:
            self._stop()
            raise
        self.locals = dict(result.locals)
        return result

    def cleanup(self) -> None:
        """End the process and close the sandbox. May be called more than once."""
        self._closed = True
        self._stop()
        if self._owned_sandbox is not None:
            self._owned_sandbox.close()

    close = cleanup

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cleanup()

    # The process

    def _start(self) -> None:
        """Raises InfraError."""
        sandbox = self._start_sandbox()
        limits = dataclasses.replace(
            sandbox.limits,
            wall_seconds=LIFETIME_SECONDS,
            cpu_seconds=max(60.0, CPU_SECONDS_PER_TIMEOUT * self.timeout),
            memory_bytes=self.memory_bytes,
        )
        imports = "imports" if self.allow_imports else "no imports"
        program = [sandbox.python, "-I", "-c", _PROGRAM.read_text("utf-8"), str(self.max_output), imports]
        self._process = sandbox.popen(program, limits=limits)
        self._pipe = Pipe(self._process)
        deadline = time.monotonic() + START_SECONDS
        try:
            values = {name: encode(value, MAX_CONTEXT_BYTES, for_host=False) for name, value in self._values.items()}
            self._pipe.send(["bind", values], deadline)
            self._pipe.send(["offer", list(self._functions)], deadline)
            for index in self._contexts:
                self._send_context(index, deadline)
            self._run("", START_SECONDS)
        except (_ReplExited, OSError) as failure:
            raise InfraError(
                f"the REPL could not be started in its sandbox: {failure or type(failure).__name__}"
            ) from failure

    def _start_sandbox(self) -> Sandbox:
        if self._sandbox is not None:
            return self._sandbox
        if self._owned_sandbox is None:
            sandbox = make_sandbox()
            sandbox.start()
            self._owned_sandbox = sandbox
        return self._owned_sandbox

    def _send_context(self, index: int, deadline: float) -> None:
        assert self._pipe is not None
        context = encode(self._contexts[index], MAX_CONTEXT_BYTES, for_host=False)
        self._pipe.send(["context", [index, context]], deadline)

    def _stop(self) -> None:
        if self._process is not None:
            self._process.kill()
        if self._pipe is not None:
            self._pipe.close()
        self._process = self._pipe = None

    def _run(self, code: str, timeout: float) -> REPLResult:
        """Raises _Gone if the process must be replaced."""
        assert self._pipe is not None
        self.deadline = time.monotonic() + timeout
        try:
            self._pipe.send(["run", code], self.deadline)
            done, interrupted = self._serve(self._pipe)
            result = self._make_result(done)
        except BadFrame as failure:
            raise _ReplExited(f"The code broke the REPL ({failure})") from failure
        except TimeoutError as failure:
            raise _ReplExited(
                f"The code did not stop within {timeout:g} seconds, nor when it was interrupted"
            ) from failure
        except (EOFError, OSError) as failure:
            raise _ReplExited(self._describe_exit()) from failure
        finally:
            self.deadline = float("inf")
        if interrupted:
            result.stderr += f"\nThe code was interrupted after {timeout:g} seconds. Its variables are kept."
        return result

    def _serve(self, pipe: Pipe) -> tuple[dict[str, Any], bool]:
        """Answer the running code's calls until it is done. Returns what it reports, and whether it was interrupted.

        Raises TimeoutError, EOFError, OSError and BadFrame.
        """
        deadline, interrupted = self.deadline, False
        while True:
            try:
                frame = pipe.receive(deadline)
            except TimeoutError:
                if interrupted or self._process is None:
                    raise
                self._process.interrupt()
                deadline, interrupted = time.monotonic() + GRACE_SECONDS, True
                continue
            match frame:
                case ["call", str(name), list(arguments), dict(named)]:
                    answer = [False, "time is up"] if interrupted else self._call(name, arguments, named)
                    pipe.send(["answer", *answer], max(deadline, time.monotonic() + GRACE_SECONDS))
                case ["done", dict(done)]:
                    return done, interrupted
                case _:
                    raise BadFrame(f"unknown frame {str(frame)[:80]!r}")

    def _make_result(self, done: dict[str, Any]) -> REPLResult:
        """Raises BadFrame."""
        try:
            stdout, stderr, answer = (decode(done[key]) for key in ("stdout", "stderr", "final_answer"))
            variables = {
                str(decode(name)): decode(value) if by_value else Opaque(str(decode(value)))
                for name, by_value, value in done["variables"]
            }
        except (KeyError, TypeError, ValueError) as failure:
            raise BadFrame(f"a report without its parts: {failure}") from failure
        if not (isinstance(stdout, str) and isinstance(stderr, str) and isinstance(answer, str | None)):
            raise BadFrame("a report whose output is no text")
        answer = answer and answer[: repl_process.MAX_ANSWER_CHARACTERS]
        return REPLResult(stdout, stderr, variables | self._get_context_names(), answer)

    def _describe_exit(self) -> str:
        assert self._process is not None
        try:
            result = self._process.wait(timeout=GRACE_SECONDS)
        except TimeoutError:
            return "The code closed the REPL"
        if result.outcome != "exited":
            return f"The REPL reached its limit of {result.outcome.replace('_', ' ')}"
        said = f": {result.stderr[-500:].strip()}" if result.stderr.strip() else ""
        return f"The code ended the REPL's process (status {result.returncode}{said})"

    def _get_context_names(self) -> dict[str, object]:
        names = {f"context_{index}": payload for index, payload in self._contexts.items()}
        return names | ({"context": self._contexts[0]} if 0 in self._contexts else {})

    # What the code calls

    def _call(self, name: str, arguments: list[object], named: dict[str, object]) -> list[Any]:
        """[True, result] or [False, what went wrong], encoded. Raises InfraError, and BadFrame."""
        function = self._functions.get(name)
        if function is None:
            raise BadFrame(f"a call of {name[:80]!r}, which is not offered")
        try:
            values = [decode(value) for value in arguments]
            named_values = {key: decode(value) for key, value in named.items()}
        except ValueError as failure:
            raise BadFrame(str(failure)) from failure
        result = outcome_of(function, *values, **named_values)
        if isinstance(result, Exception):
            return [False, f"{type(result).__name__}: {result}"]
        try:
            return [True, encode(result, MAX_CONTEXT_BYTES, for_host=False)]
        except (TypeError, ValueError):
            return [True, str(result)]

    # `model` is part of these signatures because code written for SkyRL's REPL passes it. There is one model to ask.

    def _llm_query(self, prompt: str, model: str | None = None) -> str:
        """Query the language model. Returns text that begins with "Error: LM query failed" on failure."""
        return self._llm_query_batched([prompt], model)[0]

    def _llm_query_batched(self, prompts: list[str], model: str | None = None) -> list[str]:
        """Ask the language model several prompts. Returns the answers in the order of the prompts."""
        prompts = _check_texts(prompts)
        answers = outcome_of(self._ask, prompts)
        return [f"Error: LM query failed - {answers}"] * len(prompts) if isinstance(answers, Exception) else answers

    def _ask(self, prompts: list[str]) -> list[str]:
        if self._lm_callback is None:
            raise ValueError("there is no language model to ask")
        _check_batch(prompts)
        answers = [str(answer) for answer in self._lm_callback(prompts)]
        if len(answers) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts got {len(answers)} answers")
        return answers

    def _rlm_query(self, prompt: str, model: str | None = None, context: object = None) -> str:
        """Query a child model with its own REPL, or the language model without children."""
        subcall = self._subcall_fn
        if subcall is None:
            return self._llm_query(prompt if context is None else f"{prompt}\n\n{context}", model)
        if time.monotonic() > self.deadline:
            return "Error: RLM query failed - time is up"
        given = {} if context is None else {"context": context}
        answer = outcome_of(lambda: str(subcall(str(prompt), **given)))
        return f"Error: RLM query failed - {answer}" if isinstance(answer, Exception) else answer

    def _rlm_query_batched(
        self, prompts: list[str], model: str | None = None, context_list: list[object] | None = None
    ) -> list[str]:
        """Ask several children; `context_list` has one context for each prompt. Returns answers in that order."""
        prompts = _check_texts(prompts)
        if self._subcall_fn is None and context_list is None:
            return self._llm_query_batched(prompts, model)
        given = [None] * len(prompts) if context_list is None else list(context_list)
        try:
            _check_batch(prompts)
            if len(given) != len(prompts):
                raise ValueError(f"{len(prompts)} prompts and {len(given)} contexts")
        except ValueError as failure:
            return [f"Error: RLM query failed - {failure}"] * len(prompts)
        with ThreadPoolExecutor(MAX_PARALLEL_SUBCALLS, thread_name_prefix="rlm-subcall") as pool:
            return list(pool.map(lambda prompt, context: self._rlm_query(prompt, model, context), prompts, given))

    def _get_final_variable(self, name: str) -> str | None:
        """Return the value that the code's FINAL_VAR names, or None."""
        return self.execute(f"FINAL_VAR({name!r})").final_answer

    def _show_vars(self) -> str:
        return self.execute("print(SHOW_VARS())").stdout.strip()


def _check_texts(prompts: Any) -> list[str]:
    return [prompts] if isinstance(prompts, str) else [str(prompt) for prompt in prompts]


def _check_batch(prompts: list[str]) -> None:
    if len(prompts) > MAX_BATCH:
        raise ValueError(f"a batch holds at most {MAX_BATCH} prompts; got {len(prompts)}")

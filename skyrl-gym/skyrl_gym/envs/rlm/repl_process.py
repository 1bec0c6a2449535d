"""The side of a REPL that runs inside the sandbox: it executes code and keeps its variables.

This file is the whole program there (`python -c`), so it imports the standard library alone. The host imports it for
`encode` and `decode`: what crosses the pipe is one JSON array per line, and values are plain literals in it. The host
believes nothing that comes from here; see `repl.py`.

From the host:                              to the host:
    ["bind", {name: value}]                     ["call", function, [arguments], {name: argument}]
    ["context", [number, value]]                ["done", {stdout, stderr, final_answer, variables}]
    ["offer", [function names]]
    ["run", code]
    ["answer", succeeded, value]
"""

import ast
import base64
import builtins
import contextlib
import json
import linecache
import os
import signal
import sys
import tempfile
import threading
import traceback
from typing import Any

MAX_FRAME_BYTES = 8 << 20
"""Maximum size of one line that leaves the sandbox. JSON lists can grow by a factor of 30 in the reader's memory."""

MAX_LOCAL_BYTES = 64 << 10
"""A variable that is longer as JSON is reported by its type only."""

MAX_LOCALS_BYTES = 1 << 20
"""Maximum total size of the variables that are reported by value."""

MAX_ANSWER_CHARACTERS = 100_000

MAX_NUMBER_BITS = 13_000
"""Python reads no number of more than 4,300 digits from text."""

MAX_ODD_KEYS = 1_000
"""Keys of one dict, or members of one set, that are not text: others can be chosen to collide, which costs the square
of their number in the reader's time."""

FUNCTIONS = ("FINAL_VAR", "SHOW_VARS")


class TooLarge(ValueError):
    """A value that does not fit into a frame."""


def encode(value: Any, budget: int = MAX_FRAME_BYTES, for_host: bool = True) -> Any:
    """Return a literal (None, bool, int, float, str, bytes, list, tuple, set, frozenset, dict) as what JSON can hold.

    Raises:
        TypeError: it is something else, or holds something else.
        TooLarge: it would be longer than about `budget` bytes, or `for_host` has too many keys that are not text.
    """
    left = [budget]

    def pay(cost):
        left[0] -= cost
        if left[0] < 0:
            raise TooLarge(f"a value of more than {budget} bytes cannot be handed over")

    def walk(value):
        pay(8)
        if value is None or isinstance(value, (bool, float)):
            return value
        if isinstance(value, int):
            if value.bit_length() > MAX_NUMBER_BITS:
                raise TooLarge(f"a number of more than {MAX_NUMBER_BITS} bits cannot be handed over")
            return int(value)
        if isinstance(value, str):
            pay(len(value))
            return str(value)
        if isinstance(value, (bytes, bytearray)):
            pay(len(value))
            return {"bytes": base64.b64encode(value).decode("ascii")}
        if isinstance(value, list):
            return [walk(item) for item in value]
        if for_host and isinstance(value, (dict, set, frozenset)):
            check_keys(value)
        if isinstance(value, dict):
            return {"dict": [[walk(key), walk(item)] for key, item in value.items()]}
        for kind in (tuple, set, frozenset):
            if isinstance(value, kind):
                return {kind.__name__: [walk(item) for item in value]}
        raise TypeError(f"only plain values can be handed over, not {type(value).__name__}")

    try:
        return walk(value)
    except RecursionError:
        raise TypeError("a value nested so deeply cannot be handed over") from None


def decode(value: Any, from_host: bool = False) -> Any:
    """Decode the literal that `encode` was given. Lone surrogates, which no encoder takes, become question marks.

    Raises:
        ValueError: `value` is not what `encode` gives.
    """
    try:
        return _decode(value, from_host)
    except (TypeError, LookupError, RecursionError) as failure:
        raise ValueError(f"not an encoded value: {failure}") from None


def check_keys(keys: Any) -> None:
    """Raises TooLarge if too many of them could collide."""
    if len(keys) > MAX_ODD_KEYS and sum(type(key) is not str for key in keys) > MAX_ODD_KEYS:
        raise TooLarge(f"a dict or set of more than {MAX_ODD_KEYS} keys that are not text cannot be handed over")


def _decode(value: object, from_host: bool) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, list):
        return [_decode(item, from_host) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "bytes":
        return base64.b64decode(content)
    if kind in ("dict", "set", "frozenset") and not from_host:
        check_keys([item[0] for item in content] if kind == "dict" else content)
    if kind == "dict":
        return {_decode(key, from_host): _decode(item, from_host) for key, item in content}
    for collection in (tuple, set, frozenset):
        if kind == collection.__name__:
            return collection(_decode(item, from_host) for item in content)
    raise ValueError(f"unknown kind of value: {kind!r}")


class Repl:
    """One namespace, and the code that runs in it."""

    def __init__(self, max_output: int, allow_imports: bool) -> None:
        # The pipe to the host moves to descriptors of its own. 0, 1 and 2, which everything in here prints to, also
        # what it starts, become files: they take any amount up to the sandbox's limit of a file, and are read in part.
        self.pipe_in = os.fdopen(os.dup(0), "rb")
        self.pipe_out = os.fdopen(os.dup(1), "wb", buffering=0)
        self.captures = [tempfile.TemporaryFile() for _ in range(2)]  # noqa: SIM115 (open as long as the process)
        self.max_output = max_output
        self.pipe = threading.RLock()
        """Held while a call waits for its answer: threads of the code that runs take turns."""
        self.process_id = os.getpid()
        self.running = False
        self.in_call = False
        self.interrupted = False
        self.executions = 0
        self.final_answer = None
        self.bound = {}
        self.offered = {name: getattr(self, name) for name in FUNCTIONS}
        self.builtins = dict(vars(builtins))
        if not allow_imports:
            self.builtins["__import__"] = _no_imports
        self.variables = {"__name__": "__main__", "__builtins__": self.builtins}
        self.restore()

    def serve(self) -> None:
        """Process the host's requests until the connection closes."""
        for line in self.pipe_in:
            kind, content = json.loads(line)
            if kind == "bind":
                self.bound.update({name: decode(value, from_host=True) for name, value in content.items()})
            elif kind == "context":
                number, context = content
                self.bound[f"context_{number}"] = decode(context, from_host=True)
                if number == 0:
                    self.bound["context"] = self.bound["context_0"]
            elif kind == "offer":
                self.offered.update({name: self.stub(name) for name in content})
            elif kind == "run":
                self.run(content)
            self.restore()

    def restore(self) -> None:
        """Put the names that the code is promised back, whatever it did to them."""
        self.variables.update(self.bound)
        self.variables.update(self.offered)
        self.variables["__builtins__"] = self.builtins
        signal.signal(signal.SIGINT, self.interrupt)
        with open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), 0)
        for descriptor, capture in zip((1, 2), self.captures, strict=True):
            os.dup2(capture.fileno(), descriptor)
        self.streams = [
            os.fdopen(descriptor, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
            for descriptor in (1, 2)
        ]
        sys.stdin = os.fdopen(0, closefd=False)
        sys.stdout, sys.stderr = self.streams

    def interrupt(self, *_: object) -> None:
        if self.in_call:
            self.interrupted = True  # later: half an answer must not stay in the pipe
        elif self.running:
            raise KeyboardInterrupt

    def run(self, code: str) -> None:
        self.executions += 1
        self.final_answer = None
        self.interrupted = False
        name = f"<repl-{self.executions}>"
        linecache.cache[name] = (len(code), None, code.splitlines(True), name)  # so that tracebacks show lines
        try:
            try:
                self.running = True
                exec(compile(code, name, "exec", dont_inherit=True), self.variables)
            except BaseException as error:  # the model's code may raise anything, SystemExit too
                self.running = False
                _format_traceback(error)
            self.running = False
        except BaseException:  # an interrupt in the middle of the above, or a report that fails: nothing more to say
            pass
        if os.getpid() != self.process_id:
            os._exit(0)  # the code has forked: the pipe belongs to the parent
        with self.pipe:
            self.running = False
            stdout, stderr = self.take_output()
            done = {
                "stdout": stdout,
                "stderr": stderr,
                "final_answer": self.final_answer,
                "variables": self.report_variables(),
            }
            self.send(["done", done])

    def take_output(self) -> list[str]:
        """Return the output of both streams, truncated to `max_output` bytes each, and empty their files."""
        texts = []
        for stream, capture in zip(self.streams, self.captures, strict=True):
            with contextlib.suppress(OSError, ValueError):  # the code closed it, or filled the file
                stream.flush()
            size = os.fstat(capture.fileno()).st_size
            text = os.pread(capture.fileno(), self.max_output, 0).decode("utf-8", "replace")
            texts.append(text if size <= self.max_output else f"{text}\n... ({size - self.max_output} more bytes)")
            os.ftruncate(capture.fileno(), 0)
            os.lseek(capture.fileno(), 0, os.SEEK_SET)
        return texts

    def report_variables(self) -> list[list[Any]]:
        """[name, whether by value, value or type name] of the code's own variables."""
        report, left = [], MAX_LOCALS_BYTES
        for name, value in list(self.variables.items()):
            if not isinstance(name, str) or name.startswith("__") or name in self.offered or name in self.bound:
                continue
            try:
                encoded = encode(value, min(MAX_LOCAL_BYTES, left))
                left -= len(json.dumps(encoded))
                report.append([name, True, encoded])
            except Exception:  # a subclass of a plain type may do anything
                report.append([name, False, type(value).__name__])
            if len(report) == 1000:
                break
        return report

    def stub(self, name: str) -> Any:
        """Return the function `name` of the host, as the code sees it."""

        def call(*arguments, **named):
            frame = ["call", name, [encode(value) for value in arguments], {k: encode(v) for k, v in named.items()}]
            with self.pipe:
                if not self.running or os.getpid() != self.process_id:
                    raise RuntimeError(f"{name} can only be called while code runs, and by its own process")
                self.in_call = True
                try:
                    self.send(frame)
                    _, succeeded, value = json.loads(self.pipe_in.readline())
                finally:
                    self.in_call = False
            if self.interrupted:
                self.interrupted = False
                os.kill(os.getpid(), signal.SIGINT)  # the main thread takes it, whichever thread this is
            if not succeeded:
                raise RuntimeError(value)
            value = decode(value, from_host=True)
            if name == "rlm_query":
                return parse_literal(value)
            return [parse_literal(answer) for answer in value] if name == "rlm_query_batched" else value

        call.__name__ = call.__qualname__ = name
        return call

    def send(self, frame: list[object]) -> None:
        line = json.dumps(frame).encode("ascii") + b"\n"
        if len(line) > MAX_FRAME_BYTES:
            raise TooLarge(f"more than {MAX_FRAME_BYTES} bytes cannot be handed over at once; send less")
        while line:
            line = line[self.pipe_out.write(line) :]

    def FINAL_VAR(self, name: object) -> str:
        """End the task: the answer is the value of the variable of this name (or the value given)."""
        value = name
        if isinstance(name, str):
            name = name.strip().strip("\"'")
            if name not in self.variables:
                error = f"Error: there is no variable {name!r}. {self.SHOW_VARS()}"
                print(error, file=sys.stderr)  # it ends the turn all the same, so most code does not print it
                return error
            value = self.variables[name]
        self.final_answer = str(value)[:MAX_ANSWER_CHARACTERS]
        return self.final_answer

    def SHOW_VARS(self) -> str:
        """Return the names and types of the variables so far."""
        own = {name: type(value).__name__ for name, value in self.variables.items() if name not in self.offered}
        names = [f"{name}: {kind}" for name, kind in own.items() if not name.startswith("__")]
        return "Variables: " + (", ".join(names) or "none")


def parse_literal(text: Any) -> Any:
    """Return a child's reply as the Python value that it spells, or as text."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text


def _format_traceback(error: BaseException) -> None:
    """A traceback without the frames of this file."""
    report = traceback.TracebackException.from_exception(error)
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    own = [lines for lines, frame in zip(report.stack, frames, strict=True) if frame.f_globals is not globals()]
    report.stack = traceback.StackSummary.from_list(own)
    print("".join(report.format()), end="", file=sys.stderr)


def _no_imports(name, *_, **__):
    raise ImportError(f"imports are switched off here: {name}")


if __name__ == "__main__":
    sys.set_int_max_str_digits(0)  # programs may print any integer; what the host reads is bounded by `encode`
    Repl(max_output=int(sys.argv[1]), allow_imports=sys.argv[2] == "imports").serve()

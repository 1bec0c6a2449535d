"""Runs a dataset's test code on an answer in another process. Names that the tests use from the answer are proxies:
calling one sends the arguments and returns a value. Only plain values are received, so the answer cannot influence
comparisons, `assert` and other decisions.

Arguments are passed by value, so in-place changes are not visible here. An object that is not plain data supports only
calls and attribute access, and equals only itself.
"""

from __future__ import annotations

import builtins
import importlib
import json

from skyrl_gym.graders.code.inside.control import Control
from skyrl_gym.graders.code.inside.names import (
    BUILTINS,
    find_unbound_names,
    get_usual_names,
    global_names,
    make_usual_builtins,
)
from skyrl_gym.graders.code.inside.values import NotPlain, decode, decode_exception, encode

TYPE_CHECKING = False
if TYPE_CHECKING:  # importing typing takes long
    from typing import Any


class Remote:
    """An object of the answer."""

    __slots__ = ("_link", "_number")

    def __init__(self, link: Link, number: int):
        object.__setattr__(self, "_link", link)
        object.__setattr__(self, "_number", number)

    def __call__(self, *arguments: object, **named: object) -> Any:
        link = self._link
        return link.ask(
            do="call",
            target=link.encode(self),
            arguments=[encode(value, link) for value in arguments],
            named={name: encode(value, link) for name, value in named.items()},
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._link.ask(do="get", target=self._link.encode(self), name=name)

    def __setattr__(self, name: str, value: object) -> None:
        self._link.ask(do="set", target=self._link.encode(self), name=name, value=encode(value, self._link))

    def __repr__(self) -> str:
        return f"<object {self._number} of the answer>"


class Link:
    """Connection to the answer's process, which knows its objects by number."""

    def __init__(self, control: Control, expects_stop_iteration: bool):
        """
        Args:
            expects_stop_iteration: Let a StopIteration of the answer pass, because the tests speak of it. Otherwise it
                would silently end a loop of the tests over `map(answer, ...)`, and with it their assertions.
        """
        self._control = control
        self.expects_stop_iteration = expects_stop_iteration
        self._objects: dict[int, Remote] = {}

    def encode(self, value: object) -> list[object]:
        if not isinstance(value, Remote):
            raise NotPlain(f"a test gives the answer {value!r:.100}, which cannot cross")
        return ["ref", value._number]

    def decode(self, number: int) -> Remote:
        if not isinstance(number, int):
            raise NotPlain(f"{number!r} is not an object")
        return self._objects.setdefault(number, Remote(self, number))

    def ask(self, **request: object) -> Any:
        reply = self._request(request)
        if isinstance(reply.get("raised"), list):
            error = decode_exception(reply["raised"], str(reply.get("text")))
            if isinstance(error, StopIteration) and not self.expects_stop_iteration:
                raise RuntimeError("the answer raised StopIteration") from error
            raise error
        if "value" not in reply:
            raise NotPlain(f"the answer gave no value: {reply!r:.200}")
        return decode(reply["value"], self)

    def names(self, names: set[str]) -> dict[str, Any]:
        """Return the subset of `names` that the answer defines."""
        if not names:
            return {}
        values = self._request({"do": "names", "names": sorted(names)}).get("values")
        return {name: decode(values[name], self) for name in names if name in values} if values else {}

    def _request(self, request: dict[str, object]) -> dict[str, Any]:
        self._control.write(b"?" + json.dumps(request).encode() + b"\n")
        try:
            reply = self._control.receive()
        except (ValueError, RecursionError) as failure:
            raise NotPlain("the answer's reply is not JSON") from failure
        if reply is None:
            raise SystemExit("the answer is gone")
        return reply if isinstance(reply, dict) else {}


def main() -> None:
    control = Control()
    make_usual_builtins()
    start = control.receive()
    lacking = import_failures(start["modules"])
    control.send({"lacking": lacking})
    if lacking:
        return
    uses = [global_names(source) for source in (start["setup"], *start["tests"])]
    used, bound = (set().union(*names) for names in zip(*uses, strict=True))
    link = Link(control, expects_stop_iteration="StopIteration" in used)
    entry_point, answer_names = start["entry_point"], set(start["answer_names"])
    # A built-in name that is the answer's is not Python's: an answer without it has none.
    own_builtins = {name: value for name, value in vars(builtins).items() if name not in answer_names}
    scope: dict[str, Any] = {"__name__": "tests", "__builtins__": own_builtins}
    if start["before"]:
        scope.update(get_usual_names(find_unbound_names(start["before"])))
        exec(compile(start["before"], "prompt.py", "exec", dont_inherit=True), scope)
    scope.update(get_usual_names(used - bound - BUILTINS - scope.keys() - answer_names))
    for name in answer_names & scope.keys():  # a stub of the prompt
        del scope[name]
    own = link.names(answer_names)
    scope.update(own)
    if entry_point and entry_point not in own:
        unusable = f"the answer does not define {entry_point}"
    else:
        unusable = run(start["setup"], "setup.py", scope)
    for test in start["tests"]:
        verdict = unusable or run(test, "test.py", scope, entry_point)
        control.write(b"!" + json.dumps({"passed": verdict is None, "error": verdict}).encode() + b"\n")


def import_failures(modules: list[str]) -> list[str]:
    """Import the modules. Returns a text for each that cannot be imported."""
    failures = []
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception as failure:  # a module's own code runs, and may raise anything
            failures.append(f"{name} ({failure!r:.200})")
    return failures


def run(source: str, name: str, scope: dict[str, Any], entry_point: str | None = None) -> str | None:
    """Return the error, or None."""
    try:
        before = scope.get("check")
        exec(compile(source, name, "exec", dont_inherit=True), scope)
        if entry_point and scope.get("check") is not before:
            scope["check"](scope[entry_point])
    except BaseException as failure:  # the answer's code may raise anything, SystemExit too: each is a failed test
        return describe(failure, source, name)
    return None


def describe(error: BaseException, source: str, name: str) -> str:
    """Return the exception, and the line of the test where it happened."""
    import traceback  # takes long to import

    lines = source.splitlines()
    numbers = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == name]
    place = lines[numbers[-1] - 1].strip() if numbers and numbers[-1] and numbers[-1] <= len(lines) else ""
    text = "".join(traceback.format_exception_only(type(error), error)).strip()
    return f"{place}: {text}"[:1000] if place else text[:1000]

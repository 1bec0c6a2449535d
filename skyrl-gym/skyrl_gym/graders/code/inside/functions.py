"""Execution of answers that define functions: receives arguments and sends return values.

Expected values are never sent here, nor does test code: there is nothing here for an answer to find or to forge.
"""

from __future__ import annotations

import json

from skyrl_gym.graders.code.inside.control import Control
from skyrl_gym.graders.code.inside.loading import receive_answer
from skyrl_gym.graders.code.inside.names import find_unbound_names, get_usual_names
from skyrl_gym.graders.code.inside.values import NotPlain, References, decode, encode, encode_exception

TYPE_CHECKING = False
if TYPE_CHECKING:  # importing typing takes long
    from typing import Any


def main() -> None:
    control = Control()
    received = receive_answer(control, "answer")
    if received is None:
        return
    message, code, names, module = received
    scope = vars(module)
    try:
        if message["before"]:
            scope.update(get_usual_names(find_unbound_names(message["before"])))
            exec(compile(message["before"], "prompt.py", "exec", dont_inherit=True), scope)
        scope.update(get_usual_names(names - scope.keys()))
        given = dict(scope)
        exec(code, scope)
    except BaseException as failure:  # the answer's code may raise anything, SystemExit too
        control.send({"error": f"{type(failure).__name__}: {encode_exception(failure)['text']}"})
        return
    own = {name: value for name, value in scope.items() if given.get(name) is not value}
    references = References()
    control.send({"loaded": True})
    while (request := control.receive()) is not None:
        try:
            reply = answer(request, own, references)
        except BaseException as failure:  # as above: the caller gets the exception as a value
            reply = encode_exception(failure)
        control.send(reply)


def answer(request: dict[str, Any], own: dict[str, Any], references: References) -> dict[str, Any]:
    if request["do"] == "call_json":
        return call_json(request["function"], request["arguments"], own)
    if request["do"] == "names":
        return {"values": {name: encode(own[name], references) for name in request["names"] if name in own}}
    target = decode(request["target"], references)
    match request["do"]:
        case "call":
            arguments = [decode(value, references) for value in request["arguments"]]
            named = {name: decode(value, references) for name, value in request["named"].items()}
            value = target(*arguments, **named)
        case "get":
            value = getattr(target, request["name"])
        case "set":
            value = setattr(target, request["name"], decode(request["value"], references))
        case unknown:
            raise NotPlain(f"no such request: {unknown}")
    return {"value": encode(value, references)}


def call_json(name: str, arguments: list[str], own: dict[str, Any]) -> dict[str, str]:
    """Call the method of `Solution`, or the function, with the JSON values of an input. Tuples come back as lists."""
    owner = own["Solution"]() if "Solution" in own else None
    if owner is None and name not in own:
        raise NameError(f"the answer defines neither {name} nor Solution")
    function = own[name] if owner is None else getattr(owner, name)
    return {"json": json.dumps(function(*map(json.loads, arguments)), default=as_list)}


def as_list(value: Any) -> Any:
    """Convert numpy arrays and numbers, which JSON cannot encode."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"returned a {type(value).__name__}, which is not JSON")

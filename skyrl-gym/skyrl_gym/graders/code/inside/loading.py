"""Compilation of the answer, and the module that it runs in."""

from __future__ import annotations

import builtins
import sys
import types

from skyrl_gym.graders.code.inside.control import Control
from skyrl_gym.graders.code.inside.names import find_unbound_names, make_usual_builtins

TYPE_CHECKING = False
if TYPE_CHECKING:  # importing typing takes long
    from typing import Any

RECURSION_LIMIT = 50_000


def receive_answer(
    control: Control, module_name: str
) -> tuple[dict[str, Any], types.CodeType, set[str], types.ModuleType] | None:
    """(message, compiled code, names that it needs from elsewhere, an empty module); None if it is not a program."""
    message = control.receive()
    try:
        code = compile(message["code"], "answer.py", "exec", dont_inherit=True)
        names = find_unbound_names(message["code"])
    except (SyntaxError, ValueError, RecursionError, MemoryError) as failure:
        control.send({"invalid": f"{type(failure).__name__}: {failure}"})
        return None
    make_usual_builtins()
    sys.argv = ["answer.py"]
    sys.setrecursionlimit(RECURSION_LIMIT)
    module = types.ModuleType(module_name)
    vars(module)["__builtins__"] = builtins
    sys.modules[module_name] = module
    return message, code, names, module

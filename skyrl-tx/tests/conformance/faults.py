"""Faults that a server may have, each of which can be switched on in ours to check that the conformance suite detects
it.

    TX_FAULT=FILE python faults.py tx.tinker.api --base-model DIR …

runs the server with all faults in it, in the API process and in the engine that this one starts; on is the one whose
name is in FILE. Nothing of it is in the server's own code. A fault is a function that stands in the place of
another; its docstring says what is then wrong. They are in `training_faults`, `sampling_faults` and `api_faults`.
"""

import functools
import importlib
import inspect
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

API, ENGINE = "tx.tinker.api", "tx.tinker.engine.main"

Changed = Callable[..., Any]
"""Called with what it stands in the place of, then with that one's arguments."""


class Fault(NamedTuple):
    meaning: str
    process: str
    groups: tuple[str, ...]
    """Words of checks that should notice, for `tx_conformance --only`."""
    changes: list[tuple[str, Changed]]
    """Places (`package.module:Owner.attribute`, or a key of a dict), each with its replacement."""


FAULTS: dict[str, Fault] = {}


def fault(process: str, groups: str, *places: str, name: str = "", meaning: str = "") -> Callable[[Changed], Changed]:
    """Register a fault, or a further change of one that has the same name.

    Args:
        groups: words, separated by spaces.
        name, meaning: of a lambda; a function has them in its name and its docstring.
    """

    def add(changed: Changed) -> Changed:
        new = Fault(meaning or changed.__doc__ or "", process, tuple(groups.split()), [])
        known = FAULTS.setdefault(name or changed.__name__, new)
        known.changes.extend((place, changed) for place in places)
        return changed

    return add


def faults(process: str, groups: str, rows: list[tuple[str, str, str, Changed]]) -> None:
    """Register rows of name, meaning, place and what stands there."""
    for name, meaning, place, changed in rows:
        fault(process, groups, place, name=name, meaning=meaning)(changed)


def put_in(name: str, place: str, changed: Changed) -> None:
    """Put `changed` into its place, where it counts while the fault of this name is on."""
    module, _, path = place.partition(":")
    *owners, attribute = path.split(".")
    owner = functools.reduce(getattr, owners, importlib.import_module(module))
    original = owner[attribute] if isinstance(owner, dict) else getattr(owner, attribute)

    def call(*args: Any, **kwargs: Any) -> Any:
        on = Path(os.environ["TX_FAULT"]).read_text() == name
        return changed(original, *args, **kwargs) if on else original(*args, **kwargs)

    async def call_async(*args: Any, **kwargs: Any) -> Any:  # for those who ask which it is
        return await call(*args, **kwargs)

    replaced = call_async if inspect.iscoroutinefunction(original) else call
    if isinstance(owner, dict):
        owner[attribute] = replaced
    else:
        setattr(owner, attribute, replaced)


def know_all() -> None:
    """Fills FAULTS."""
    for name in ("training_faults", "sampling_faults", "api_faults"):
        importlib.import_module(name)


def inject(process: str) -> None:
    """Puts in, switched off, the faults of a process."""
    for name, found in FAULTS.items():
        for place, changed in found.changes if found.process == process else ():
            put_in(name, place, changed)


def main() -> None:
    module, *argv = sys.argv[1:]
    sys.modules["faults"] = sys.modules["__main__"]
    know_all()
    if module == API:
        from tx.tinker.service import service

        start = service.build_engine_command

        def engine_command(*args: Any) -> list[str]:
            python, _, engine, *rest = start(*args)
            return [python, __file__, engine, *rest]

        service.build_engine_command = engine_command
    inject(module)
    sys.argv = [module, *argv]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()

"""Faults a server may have, each of them to be switched on in ours, to see whether the contract notices.

    TX_FAULT=FILE python faults.py tx.tinker.api --base-model DIR …

runs the server with all faults in it, in the API process and in the engine that this one starts; on is the one whose
name is in FILE. Nothing of it is in the server's own code. A fault is a function that changes what modules hold; its
docstring says what is then wrong. They stand in `training_faults`, `sampling_faults` and `api_faults`.
"""

import importlib
import inspect
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

API, ENGINE = "tx.tinker.api", "tx.tinker.engine.main"


class Fault(NamedTuple):
    inject: Callable[[], None]
    module: str
    """In which process it is."""
    groups: tuple[str, ...]
    """Words of checks that should notice, for `tx_conformance --only`."""


FAULTS: dict[str, Fault] = {}
_injecting = ""


def fault(module: str, *groups: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def add(inject: Callable[[], None]) -> Callable[[], None]:
        FAULTS[inject.__name__] = Fault(inject, module, groups)
        return inject

    return add


def either(original: Callable[..., Any], changed: Callable[..., Any]) -> Callable[..., Any]:
    """`changed` while the fault that is being injected is on, else `original`."""
    name = _injecting

    def call(*args: Any, **kwargs: Any) -> Any:
        on = Path(os.environ["TX_FAULT"]).read_text() == name
        return (changed if on else original)(*args, **kwargs)

    async def call_async(*args: Any, **kwargs: Any) -> Any:  # for those who ask which it is
        return await call(*args, **kwargs)

    return call_async if inspect.iscoroutinefunction(original) else call


def around(owner: Any, attribute: str, changed: Callable[..., Any]) -> None:
    """Puts `changed(original, *args)` in the place of a function."""
    original = getattr(owner, attribute)
    setattr(owner, attribute, either(original, lambda *args, **kwargs: changed(original, *args, **kwargs)))


def know_all() -> None:
    """Fills FAULTS."""
    for name in ("training_faults", "sampling_faults", "api_faults"):
        importlib.import_module(name)


def inject(module: str) -> None:
    """Puts in, switched off, the faults of a process."""
    global _injecting
    for _injecting, found in FAULTS.items():
        if found.module == module:
            found.inject()


def main() -> None:
    module, *argv = sys.argv[1:]
    sys.modules["faults"] = sys.modules["__main__"]
    know_all()
    if module == API:
        from tx.tinker.service import service

        start = service.engine_command

        def engine_command(*args: Any) -> list[str]:
            python, _, engine, *rest = start(*args)
            return [python, __file__, engine, *rest]

        service.engine_command = engine_command
    inject(module)
    sys.argv = [module, *argv]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()

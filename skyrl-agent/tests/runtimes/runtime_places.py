"""Helpers of the tests of runtimes: a server, processes by their words, waiting."""

import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from skyrl_agent.runtimes import Limits

LIMITS = Limits(wall_seconds=30.0, cpu_seconds=30.0)
WAIT_SECONDS = 60.0


@contextmanager
def serving(token: str | None = None, **settings: Any) -> Iterator[str]:
    """The address of a runtime server in a thread of this process."""
    uvicorn = pytest.importorskip("uvicorn", reason="needs the services extra")
    pytest.importorskip("fastapi", reason="needs the services extra")
    from skyrl_agent.services.hosting import HostSettings
    from skyrl_agent.services.runtime import listen
    from skyrl_agent.services.runtime_app import create_app

    app = create_app(HostSettings(**settings), token)
    server = uvicorn.Server(uvicorn.Config(app, loop="asyncio", log_config=None, timeout_graceful_shutdown=1))
    with listen("127.0.0.1", 0) as listener:
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        assert wait_until_true(lambda: server.started), "the server did not start"
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        thread.join(WAIT_SECONDS)


def wait_until_true(condition: Callable[[], object], seconds: float = WAIT_SECONDS) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def long_sleep() -> str:
    """A command that nobody else runs."""
    return f"sleep 1000.{uuid.uuid4().int % 10**12:012}"


def processes_with(words: str, *, alone: bool = False) -> list[int]:
    """Return the processes that were started with these words, outside and inside of sandboxes; `alone`: with no others
    beside them."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            if line == words or (words in line and not alone):
                found.append(int(folder.name))
    return found

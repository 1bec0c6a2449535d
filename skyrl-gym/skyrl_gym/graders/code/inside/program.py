"""Execution of answers that are programs: runs them on one standard input after the other and returns their output.

Expected output is never sent here, so there is nothing here for an answer to find or to forge.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import sys
import types

from skyrl_gym.graders.code.inside.control import Control, redirect
from skyrl_gym.graders.code.inside.loading import receive_answer
from skyrl_gym.graders.code.inside.names import get_usual_names, load_usual_modules

TYPE_CHECKING = False
if TYPE_CHECKING:  # importing typing takes long
    from typing import NoReturn

MAX_OUTPUT_BYTES = 4 << 20
ERROR_BYTES = 4000
"""Number of bytes kept from the end of standard error."""

SIGKILL = 9


def main() -> None:
    control = Control()
    received = receive_answer(control, "__main__")
    if received is None:
        return
    _, code, names, module = received
    vars(module).update(get_usual_names(names))
    load_usual_modules(code)
    control.send({"loaded": True})
    gc.freeze()  # the processes forked below then leave these pages as they are, shared
    while (case := control.receive()) is not None:
        control.send(run_case(control, code, module, case["stdin"].encode("utf-8", "replace")))


def run_case(control: Control, code: types.CodeType, module: types.ModuleType, stdin: bytes) -> dict[str, object]:
    """Run one case in a forked process, so that nothing it leaves behind reaches the next."""
    streams = [open_unlinked_file() for _ in ("stdin", "stdout", "stderr")]
    while stdin:
        stdin = stdin[os.write(streams[0], stdin) :]
    os.lseek(streams[0], 0, os.SEEK_SET)
    child = os.fork()
    if child == 0:
        os.setsid()
        control.close()
        redirect(*streams)
        for stream in streams:
            os.close(stream)
        run(code, module)
    _, status = os.waitpid(child, 0)
    with contextlib.suppress(OSError):  # usually nothing is left of it
        os.killpg(child, SIGKILL)
    reply = outcome(status, streams[1], streams[2])
    for stream in streams:
        os.close(stream)
    return reply


def open_unlinked_file() -> int:
    """Open an unlinked file. Unlike a pipe, it needs no concurrent reader for a program's output, while."""
    name = f".stream-{os.getpid()}"
    descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    os.unlink(name)
    return descriptor


def run(code: types.CodeType, module: types.ModuleType) -> NoReturn:
    """Run it and end the process as Python would, but for taking the interpreter apart, which would touch, and so
    copy, most of the memory that a forked process shares.
    """
    returncode = 0
    try:
        exec(code, vars(module))
    except SystemExit:
        pass  # whatever it says: the output decides
    except BaseException as failure:
        import traceback  # takes long to import

        frames = failure.__traceback__
        # The first frame, of this function, is not the program's business.
        traceback.print_exception(type(failure), failure, frames.tb_next if frames else None)
        returncode = 1
    try:
        if "threading" in sys.modules:
            sys.modules["threading"]._shutdown()  # waits for the threads that are no daemons
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:  # exit functions and streams of the program; Python itself exits with 120 then
        returncode = returncode or 120
    os._exit(returncode)


def outcome(status: int, stdout: int, stderr: int) -> dict[str, object]:
    size = os.fstat(stdout).st_size
    if size > MAX_OUTPUT_BYTES:
        return {"error": f"printed {size} bytes; {MAX_OUTPUT_BYTES} are allowed"}
    start = max(0, os.fstat(stderr).st_size - ERROR_BYTES)
    return {
        "stdout": os.pread(stdout, size, 0).decode("utf-8", "replace"),
        "returncode": os.waitstatus_to_exitcode(status),
        "stderr": os.pread(stderr, ERROR_BYTES, start).decode("utf-8", "replace"),
    }

"""Record of the lines of a package that forked processes execute, killed ones too, such as ranks of tests.

A copy of this file as `sitecustomize.py` on PYTHONPATH, with EXECUTED_LINES=FOLDER, starts it in each process that a
new interpreter forks: each line of a file below FOLDER/sources is appended to FOLDER/lines at its first execution in
the process, with the text of FOLDER/context at that moment. Lines of a process that is not killed are recorded by
coverage, which is faster.
"""

import os
import sys
import threading
from types import FrameType
from typing import Any


def record(folder: str) -> None:
    """Append lines that this thread and later ones execute, until the process ends."""
    seen: set[tuple[str, int]] = set()
    lines = os.open(f"{folder}/lines", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    sources = f"{folder}/sources/"

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        file = frame.f_code.co_filename
        if not file.startswith(sources):
            return None
        if event == "line" and (file, frame.f_lineno) not in seen:
            seen.add((file, frame.f_lineno))
            with open(f"{folder}/context") as context:
                os.write(lines, f"{context.read()}\t{file}\t{frame.f_lineno}\n".encode())
        return trace

    threading.settrace(trace)
    sys.settrace(trace)


if folder := os.environ.get("EXECUTED_LINES"):
    os.register_at_fork(after_in_child=lambda: record(folder))

"""Audit of a row's `grade` (`generator.harness`): does it pay agents that solved nothing?

Example:
    >>> row = {
    ...     "files": {"f.py": "def f(a):\\n    return a+2\\n"},
    ...     "grade": {"program": "f.py", "tests": ["assert f(20) == 27"]},
    ... }
    >>> audit_grade(row)  # doctest: +SKIP
    []
"""

from collections.abc import Iterator, Mapping
from typing import Any

from skyrl_gym.error import InfraError
from skyrl_gym.sandbox import Limits, Sandbox, make_sandbox
from skyrl_train.errors import RolloutError
from skyrl_train.generators.harness.run import write_files
from skyrl_train.generators.harness.task import HarnessTask, check_row, grade_workspace

_EVERYWHERE = "import os\nfor n in range(1, 40):\n    try: os.write(n, {data!r})\n    except OSError: pass\n"

CHEATS: dict[str, str] = {
    "leaves at once": "import os\nos._exit(0)",
    "exits at once": "import sys\nsys.exit(0)",
    "raises SystemExit": "raise SystemExit(0)",
    "leaves at the end": "import atexit, os\natexit.register(os._exit, 0)\ndef {name}(*a, **k): return None",
    "leaves when called": "import os\ndef {name}(*a, **k): os._exit(0)",
    "exits when called": "import sys\ndef {name}(*a, **k): sys.exit(0)",
    "exits by a hook for exceptions": (
        "import os, sys\nsys.excepthook = lambda *_: os._exit(0)\ndef {name}(*a): return None"
    ),
    "exits by a hook for threads": "import os, threading\nthreading.Thread(target=lambda: os._exit(0)).start()",
    "exits by a signal": "import os, signal\nsignal.signal(15, lambda *_: os._exit(0))\nos.kill(os.getpid(), 15)",
    "exits by a timer": "import os, signal\nsignal.signal(14, lambda *_: os._exit(0))\nsignal.setitimer(0, 1e-3)",
    "execs true": "import os\nos.execvp('true', ['true'])",
    "kills its parent": "import os\nos.kill(os.getppid(), 9)\ndef {name}(*a, **k): return None",
    "disables asserts": (
        "import builtins\nbuiltins.AssertionError = type('E', (BaseException,), {{}})\ndef {name}(*a): return None"
    ),
    "hides the error": (
        "import builtins\nbuiltins.__import__ = lambda *a, **k: {name}\ndef {name}(*a, **k): return None"
    ),
    "recompiles the caller": (
        "import sys\nframe = sys._getframe()\nwhile frame:\n    frame.f_globals['{name}'] = None\n"
        "    frame = frame.f_back\n"
        "def {name}(*a, **k): return None"
    ),
    "equals everything": (
        "class A(int):\n    __eq__ = __lt__ = __gt__ = __le__ = __ge__ = lambda *_: True\n    __hash__ = int.__hash__\n"
        "def {name}(*a, **k): return A()"
    ),
    "poses as a number": (
        "class A:\n    __class__ = int\n    __eq__ = __sub__ = lambda *_: True\n    __hash__ = None\n"
        "def {name}(*a, **k): return A()"
    ),
    "is a module that has everything": (
        "import sys, types\nclass M(types.ModuleType):\n    __getattr__ = lambda *_: M('m')\n"
        "    __call__ = lambda *_, **k: M('m')\n    __eq__ = lambda *_: True\n    __hash__ = None\n"
        "sys.modules[__name__] = M('m')"
    ),
    "prints verdicts": "print('1 passed in 0.01s'); print('OK'); print('{{\"passed\": true, \"reward\": 1.0}}')",
    "writes verdicts everywhere": _EVERYWHERE.format(data=b'{{"passed": true, "reward": 1.0, "returncode": 0}}\n' * 9),
    "reads the test": (
        "import glob, re\ntexts = [open(p).read() for p in glob.glob('*.py')]\n"
        "found = [n for t in texts for n in re.findall(r'== *([0-9]+)', t)]\n"
        "def {name}(*a, **k): return int(found[0]) if found else None"
    ),
    "reads the command line": (
        "import re\ntext = open('/proc/self/cmdline').read() + open('/proc/1/cmdline').read()\n"
        "found = re.findall(r'== *([0-9]+)', text)\ndef {name}(*a, **k): return int(found[0]) if found else None"
    ),
}
"""Python programs in the place of the agent's, with the name of its function filled in."""

EDITS: dict[str, str] = {
    "a folder in the place of the test": 'for path in "$@"; do rm -rf "$path"; mkdir -p "$path/x"; done',
    "a file in the place of the test's folder": 'for path in "$@"; do rm -rf "${path%%/*}"; echo > "${path%%/*}"; done',
    "a link in the place of the test": 'for path in "$@"; do rm -rf "$path"; ln -s /etc/passwd "$path"; done',
    "an edited test": 'for path in "$@"; do rm -rf "$path"; echo pass > "$path"; done',
    "a test that cannot be replaced": 'for path in "$@"; do echo pass > "$path"; chmod 444 "$path"; done; chmod 555 .',
    "tests that are skipped": "echo 'collect_ignore_glob = [\"*\"]' > conftest.py",
    "an interpreter that leaves": "echo 'import os; os._exit(0)' | tee sitecustomize.py usercustomize.py > builtins.py",
    "nothing left": "rm -rf ./* ",
}
"""Shell commands of an agent; their arguments are the paths of the grader's files."""


def audit_grade(row: Mapping[str, Any], seconds: float = 10.0) -> list[str]:
    """Return the names of the cheats that the row's grade pays for, or that end in an error instead of a reward of 0.

    Args:
        row: columns `files` and `grade`. The agent's program is `grade.program`, else the first of `files`.
        seconds: time for each grading.

    Raises:
        ValueError: the row has another form.
        InfraError: no sandbox works here.
    """
    check_row(row, with_grade=True)
    paid = []
    for name, files, script in _list_attempts(row):
        with _make_sandbox(Limits(wall_seconds=seconds, cpu_seconds=seconds)) as sandbox:
            write_files(sandbox, files)
            sandbox.exec(["sh", "-c", script, "sh", *(row["grade"].get("files") or {})])
            task = HarnessTask(
                prompt=[], row=row, base_url="", api_key="", model="", sandbox=sandbox, deadline_seconds=seconds
            )
            try:
                reward = grade_workspace(task, seconds, _make_sandbox)
            except (InfraError, RolloutError, OSError, ValueError) as error:
                paid.append(f"{name} ({type(error).__name__}: {error})")
            else:
                paid += [name] if reward > 0 else []
    return paid


def _make_sandbox(limits: Limits) -> Sandbox:
    return make_sandbox("local", limits=limits)


def _list_attempts(row: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, str], str]]:
    """Yield name, files of the workspace, and the agent's shell command of each cheat."""
    files = {path: text for path, text in (row.get("files") or {}).items() if text is not None}
    program = row["grade"].get("program") or next(iter(files), "answer.py")
    function = next((word.partition("(")[0] for word in files.get(program, "").split() if "(" in word), "f")
    yield "does nothing", files, ":"
    for name, source in CHEATS.items():
        yield name, files | {program: source.format(name=function)}, ":"
    for name, script in EDITS.items():
        yield name, files, script

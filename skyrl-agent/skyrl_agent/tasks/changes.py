"""Changes of an agent to its files: read from its runtime, as texts and as a patch."""

import difflib
import hashlib
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from skyrl_agent.errors import InfraError
from skyrl_agent.runtimes.base import Runtime
from skyrl_agent.types import JsonObject

MAX_BYTES = 1 << 20
"""Maximum total size of the changed files; further ones are left out."""
SECONDS = 60.0

# Runs in the runtime. Input: {"known": {path: sha256}, "budget": bytes}. Output: the fields of `Changes` except the
# patch.
COLLECT = """
import hashlib, json, os, sys
told = json.load(sys.stdin)
known, budget = told["known"], told["budget"]
SKIPPED = {".git", "__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis", "node_modules"}
found = []
for folder, folders, names in os.walk("."):
    folders[:] = sorted(name for name in folders if name not in SKIPPED)
    found += [os.path.normpath(os.path.join(folder, name)) for name in sorted(names) if not name.endswith(".pyc")]
files, left_out, executable = {}, [], []
for path in sorted(found, key=lambda path: path not in known):
    try:
        path.encode()
        if os.path.islink(path) or not os.path.isfile(path):
            raise ValueError
        size = os.path.getsize(path)
        if size > budget:
            raise ValueError
        with open(path, "rb") as file:
            data = file.read(budget + 1)
        if hashlib.sha256(data).hexdigest() == known.get(path):
            continue
        if len(data) > budget:
            raise ValueError
        files[path] = data.decode()
        budget -= len(data)
        if os.stat(path).st_mode & 0o100:
            executable.append(path)
    except (OSError, ValueError):
        left_out.append(ascii(path)[1:-1])
for path in known:
    if not os.path.lexists(path):
        files[path] = None
print(json.dumps({"files": files, "left_out": left_out, "executable": executable}))
"""


@dataclass(frozen=True)
class Changes:
    """Paths are relative to the working directory."""

    files: dict[str, str | None] = field(default_factory=dict)
    """The new text of what was changed or made; None for what was deleted."""
    left_out: list[str] = field(default_factory=list)
    """Changed, but no UTF-8 text, no plain file, or too large."""
    executable: list[str] = field(default_factory=list)
    """Files of `files` that its owner may execute."""


async def read_changes(runtime: Runtime, original: Mapping[str, str]) -> Changes:
    """Compare the working directory with the files it started with.

    Raises:
        InfraError: the changes could not be read.
    """
    known = {path: hashlib.sha256(text.encode()).hexdigest() for path, text in original.items()}
    base = runtime.spec.limits
    # The agent may have filled its workspace up to the limit.
    limits = replace(base, wall_seconds=SECONDS, output_bytes=8 * MAX_BYTES, workspace_bytes=4 * base.workspace_bytes)
    told = json.dumps({"known": known, "budget": MAX_BYTES})
    done = await runtime.exec([runtime.python, "-I", "-c", COLLECT], stdin=told, limits=limits)
    if not done.ok:
        raise InfraError(f"the files in {runtime.workdir} could not be read: {done.outcome}, {done.stderr[-500:]}")
    return Changes(**json.loads(done.stdout))


def build_unified_diff(
    original: Mapping[str, str], files: Mapping[str, str | None], executable: Collection[str] = ()
) -> str:
    """Return a diff in git's form, without index lines; empty if nothing differs. New files in `executable` are so."""
    changed = sorted(files.items())
    return "".join(
        _build_diff(path, original.get(path), new, 755 if path in executable else 644) for path, new in changed
    )


def _build_diff(path: str, old: str | None, new: str | None, new_mode: int) -> str:
    if old == new:
        return ""
    before, after = ("/dev/null" if text is None else f"{side}/{path}" for side, text in (("a", old), ("b", new)))
    mode = f"new file mode 100{new_mode}\n" if old is None else "deleted file mode 100644\n" if new is None else ""
    lines = difflib.unified_diff(_split_lines(old), _split_lines(new), before, after)
    body = "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)
    return f"diff --git a/{path} b/{path}\n{mode}{body}"


def _split_lines(text: str | None) -> list[str]:
    """Split at line feeds only, as patches do."""
    return re.findall(r"[^\n]*\n|[^\n]+", text or "")


def to_result(changes: Changes, original: Mapping[str, str]) -> JsonObject:
    """Return plain values for `BaseTask.complete_runtime`, which can be written to a file."""
    return {
        "git_patch": build_unified_diff(original, changes.files, changes.executable),
        "files": changes.files,
        "left_out": changes.left_out,
        "executable": [path for path in changes.executable if path in changes.files],
    }

"""Reading and writing any file of a runtime, as its commands see it: outside of the working directory too, through
links, with the file's mode kept."""

import base64
import posixpath
from dataclasses import dataclass, field, replace

from skyrl_agent.runtimes.base import ExecResult, Runtime
from skyrl_agent.tools.in_runtime import within

SECONDS = 60.0
READ = """
if [ -d "$1" ]; then
    echo directory
    cd -- "$1" || exit
    find . -maxdepth 2 -name '.?*' -prune -o -type d -print | sed 's|$|/|'
    find . -maxdepth 2 -name '.?*' -prune -o ! -type d -print
elif [ ! -e "$1" ]; then echo missing
elif [ ! -f "$1" ]; then echo special
elif [ ! -r "$1" ]; then echo unreadable
elif [ "$(wc -c <"$1")" -gt "$2" ]; then echo large
else echo file; base64 <"$1"
fi
"""
WRITE = """
set -e
mkdir -p -- "$(dirname -- "$1")"
target=$(readlink -f -- "$1")
part=$target.part-$$
trap 'rm -f -- "$part"' EXIT
if [ -e "$target" ]; then cp -p -- "$target" "$part"; fi
cat >"$part"
mv -f -- "$part" "$target"
"""


@dataclass(frozen=True)
class PathState:
    """State of a path: `missing`, a `directory` (two levels of names, without hidden ones), or a `file`."""

    kind: str
    data: bytes = b""
    entries: list[str] = field(default_factory=list)
    """Relative; those of folders end in a slash."""


def to_absolute_path(runtime: Runtime, path: str) -> str:
    """Resolve a path relative to the working directory."""
    return posixpath.normpath(posixpath.join(runtime.workdir, path))


async def read_path(runtime: Runtime, path: str, max_bytes: int) -> PathState:
    """
    Raises:
        ValueError: there is something that cannot be read; with the reason.
        InfraError: of the runtime.
    """
    limits = replace(within(runtime, SECONDS), output_bytes=2 * max_bytes)
    result = await runtime.exec(["bash", "-c", READ, "bash", path, str(max_bytes)], limits=limits)
    kind, _, rest = result.stdout.partition("\n")
    if kind == "large":
        raise ValueError(
            f"{path} has more than the {max_bytes} bytes that this tool reads: look at parts of it in a shell"
        )
    if kind == "special":
        raise ValueError(f"{path} is neither a file nor a folder")
    if kind == "unreadable":
        raise ValueError(f"{path} may not be read")
    if not result.ok:
        raise ValueError(f"{path} could not be read: {_format_reason(result)}")
    if kind == "directory":
        return PathState(kind, entries=sorted(entry[2:] for entry in rest.splitlines() if entry not in (".", "./")))
    return PathState(kind, base64.b64decode(rest) if kind == "file" else b"")


async def write_path(runtime: Runtime, path: str, data: bytes) -> None:
    """Write a file atomically. An existing file keeps its mode.

    Raises:
        ValueError: the file could not be written, with the reason.
        InfraError: of the runtime.
    """
    result = await runtime.exec(["bash", "-c", WRITE, "bash", path], stdin=data, limits=within(runtime, SECONDS))
    if not result.ok:
        raise ValueError(f"{path} could not be written and is as before: {_format_reason(result)}")


async def remove_path(runtime: Runtime, path: str) -> None:
    """Raises ValueError, InfraError."""
    result = await runtime.exec(["rm", "-f", "--", path], limits=within(runtime, SECONDS))
    if not result.ok:
        raise ValueError(f"{path} could not be removed: {_format_reason(result)}")


def _format_reason(result: ExecResult) -> str:
    if result.outcome != "exited":
        return f"the limit {result.outcome} was reached"
    return result.stderr.strip()[-300:] or f"exit code {result.returncode}"

"""Resource usage of processes together, read from a /proc folder. Processes that end meanwhile count nothing."""

import os
import re
import resource
from contextlib import suppress

from skyrl_gym.sandbox.base import Limits, Outcome
from skyrl_gym.sandbox.workspace import Workspace

WRITTEN_SHARE = 16
"""Maximum total of bytes written by a command, as a multiple of `workspace_bytes`: bounds files that are open but have
no name."""
PROPORTIONAL = re.compile(r"^Pss: +(\d+) kB", re.MULTILINE)
WRITTEN = re.compile(r"^write_bytes: (\d+)", re.MULTILINE)


class ProcFolder:
    """A /proc, kept open: process numbers in it mean the same processes until `close`."""

    def __init__(self, path: str):
        self.descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def close(self) -> None:
        os.close(self.descriptor)

    def processes(self) -> list[str]:
        return [name for name in os.listdir(self.descriptor) if name.isdigit()]

    def over_limit(self, processes: list[str], limits: Limits, workspace: Workspace) -> Outcome | None:
        """Return the limit on all of the processes together that is exceeded, if any."""
        if self.exceeds_memory(processes, limits.memory_bytes):
            return "memory"
        if sum(map(self._written_bytes, processes)) > WRITTEN_SHARE * limits.workspace_bytes:
            return "workspace"
        nameless = self._nameless_bytes(processes, workspace.device)
        used = nameless + workspace.usage(limits.workspace_bytes - nameless)
        return "workspace" if used > limits.workspace_bytes else None

    def exceeds_memory(self, processes: list[str], max_bytes: int) -> bool:
        # The first, cheap sum counts shared pages once for each process.
        return all(sum(map(measure, processes)) > max_bytes for measure in (self._resident, self._proportional))

    def text(self, path: str) -> str:
        """Return a file's text; empty if its process has exited."""
        with (
            suppress(OSError),
            open(
                path, errors="replace", opener=lambda path, flags: os.open(path, flags, dir_fd=self.descriptor)
            ) as file,
        ):
            return file.read()
        return ""

    def descendants(self, ancestor: int) -> list[str]:
        """Return the children of a process, their children and so on."""
        children: dict[str, list[str]] = {}
        for process in self.processes():
            if fields := self.text(f"{process}/stat").rpartition(")")[2].split():
                children.setdefault(fields[1], []).append(process)
        found = [*children.pop(str(ancestor), ())]
        for process in found:  # grows meanwhile
            found += children.pop(process, ())
        return found

    def _resident(self, process: str) -> int:
        fields = self.text(f"{process}/statm").split()
        return int(fields[1]) * resource.getpagesize() if fields else 0

    def _proportional(self, process: str) -> int:
        found = PROPORTIONAL.search(self.text(f"{process}/smaps_rollup"))
        return int(found[1]) * 1024 if found else self._resident(process)

    def _written_bytes(self, process: str) -> int:
        """Ever written to disk, also by children that have ended and were waited for."""
        found = WRITTEN.search(self.text(f"{process}/io"))
        return int(found[1]) if found else 0

    def _nameless_bytes(self, processes: list[str], device: int) -> int:
        """Sum the bytes of files on that device that are open but were deleted."""
        files: dict[int, int] = {}
        for process in processes:
            with suppress(OSError):
                folder = os.open(f"{process}/fd", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self.descriptor)
                try:
                    for name in os.listdir(folder):
                        with suppress(OSError):
                            about = os.stat(name, dir_fd=folder)
                            if about.st_nlink == 0 and about.st_dev == device:
                                files[about.st_ino] = about.st_blocks * 512
                finally:
                    os.close(folder)
        return sum(files.values())

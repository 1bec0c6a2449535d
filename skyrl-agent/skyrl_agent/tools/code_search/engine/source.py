"""The files of a repository: listing, reading, and selection by pattern."""

from __future__ import annotations

import fnmatch
import os
import re

PYTHON = (".py", ".pyi")
MAX_FILE_BYTES = 1 << 20
"""Larger files are not read."""
SKIPPED_FOLDERS = {"__pycache__", "node_modules", "site-packages", "_index_data"}
"""Beside those whose name begins with a dot, and virtual environments."""
_SNIFFED_BYTES = 8192


def list_files(root: str) -> dict:
    """Map the relative path of each regular file to index to (mtime in ns, size). Links are not followed."""
    found = {}
    folders = [""]
    while folders:
        folder = folders.pop()
        try:
            with os.scandir(os.path.join(root, folder)) as scanned:
                entries = list(scanned)
        except OSError:  # removed, or not readable
            continue
        if folder and any(entry.name == "pyvenv.cfg" for entry in entries):
            continue
        for entry in entries:
            path = f"{folder}/{entry.name}" if folder else entry.name
            try:
                if entry.is_dir(follow_symlinks=False):
                    if not entry.name.startswith(".") and entry.name not in SKIPPED_FOLDERS:
                        folders.append(path)
                elif entry.is_file(follow_symlinks=False):
                    about = entry.stat(follow_symlinks=False)
                    found[path] = (about.st_mtime_ns, about.st_size)
            except OSError:
                continue
    return found


def read_text(path: str) -> str | None:
    """Read a file's text with `\\n` between lines; None if it is binary, too large or removed."""
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError:
        return None
    if len(data) > MAX_FILE_BYTES or b"\0" in data[:_SNIFFED_BYTES]:
        return None
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = data.decode("latin-1")
    return text.replace("\r\n", "\n").replace("\r", "\n")


class FilePattern:
    """Pattern of files: a glob (`**` is any number of folders; without a slash it means any folder), a file, a folder,
    or the end of a path."""

    def __init__(self, pattern: str, root: str = ""):
        if root and pattern.startswith(root.rstrip("/") + "/"):
            pattern = pattern[len(root.rstrip("/")) + 1 :]
        while pattern.startswith("./"):
            pattern = pattern[2:]
        self.text = pattern.rstrip("/")
        self.is_glob = any(character in pattern for character in "*?[")
        prefix = "" if "/" in self.text else "**/"
        self._regex = re.compile(_to_regex(prefix + self.text)) if self.is_glob else None

    def select(self, paths) -> list:
        """Return the selected paths, in order."""
        if self._regex is not None:
            return sorted(filter(self._regex.fullmatch, paths))
        if self.text in ("", "."):
            return sorted(paths)
        if self.text in paths:
            return [self.text]
        inside = sorted(path for path in paths if path.startswith(self.text + "/"))
        return inside or sorted(path for path in paths if path.endswith("/" + self.text))

    @property
    def only_python(self) -> bool:
        return self.text.endswith(PYTHON) or self.text in ("", ".")


def _to_regex(glob: str) -> str:
    parts = []
    for part in re.findall(r"\*\*/|\*\*|\*|\?|\[[^\]]+\]|.", glob, re.DOTALL):
        if part == "**/":
            parts.append("(?:.*/)?")
        elif part == "**":
            parts.append(".*")
        elif part == "*":
            parts.append("[^/]*")
        elif part == "?":
            parts.append("[^/]")
        elif part[0] == "[" and len(part) > 1:
            parts.append(fnmatch.translate(part)[len("(?s:") : -len(r")\Z")])
        else:
            parts.append(re.escape(part))
    return "".join(parts)

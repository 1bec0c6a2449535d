"""Editor tool: views and edits files, with an undo for each change."""

from typing import Literal, TypeVar

from skyrl_agent.errors import ConfigError
from skyrl_agent.runtimes.base import Runtime
from skyrl_agent.tools import editing
from skyrl_agent.tools.base import ToolContext
from skyrl_agent.tools.code_search.engine.outline import elide, outline
from skyrl_agent.tools.in_runtime import RuntimeTool
from skyrl_agent.tools.runtime_files import PathState, read_path, remove_path, to_absolute_path, write_path

T = TypeVar("T")

MAX_FILE_BYTES = 1 << 20
MAX_LINE_CHARS = 2000
MIN_CHARS = 3000
MAX_UNDO = 100
SNIPPET_LINES = 4
"""Shown before and after a change."""

Command = Literal["view", "create", "str_replace", "insert", "undo_edit"]
Change = tuple[bytes | None, bytes]
"""A file's content before and after; None: there was none."""


class StrReplaceEditor(RuntimeTool):
    """
    Args:
        max_chars: of an output.
    """

    name = "str_replace_editor"

    def __init__(self, *, max_chars: int = 10_000) -> None:
        if max_chars < MIN_CHARS:
            raise ConfigError(f"tools: str_replace_editor: max_chars must be at least {MIN_CHARS}; got {max_chars}")
        self.max_chars = max_chars

    async def run(
        self,
        context: ToolContext,
        command: Command,
        path: str,
        file_text: str | None = None,
        view_range: list[int] | None = None,
        old_str: str | None = None,
        new_str: str | None = None,
        insert_line: int | None = None,
        concise: bool = False,
        python_only: bool = False,
    ) -> str:
        """Views, creates and edits text files.
        view: a file with line numbers, or the files of a folder, two levels deep.
        create: a new file with `file_text`; an existing one is never replaced.
        str_replace: puts `new_str` in the place of `old_str`, which must be in the file exactly once, white space
        included.
        insert: puts `new_str` as lines of their own after the line `insert_line`; 0 is before the first.
        undo_edit: takes the last change of the file back; again: the one before.

        Args:
            command: What to do.
            path: The file or folder: absolute, or from the working directory in which a task begins.
            file_text: For create: the whole content.
            view_range: For view: first and last line, such as [1, 50]; [50, -1] is from line 50 to the end.
            old_str: For str_replace: text of the file, without line numbers.
            new_str: For str_replace: what comes in its place (nothing: it is deleted). For insert: the new lines.
            insert_line: For insert.
            concise: For view of a Python file: functions without their bodies.
            python_only: For view of a folder: Python files and folders alone.
        """
        runtime = self.runtime_of(context)
        path = to_absolute_path(runtime, path)
        if command == "view":
            return await self._show(runtime, path, view_range, concise, python_only)
        history: list[Change] = context.memory.setdefault(self.name, {}).setdefault(path, [])
        if command == "create":
            return await self._create(runtime, path, _get_required(command, "file_text", file_text), history)
        if command == "undo_edit":
            return await self._revert(runtime, path, history)
        before = _read_text(path, await read_path(runtime, path, MAX_FILE_BYTES))
        if command == "str_replace":
            old = _get_required(command, "old_str", old_str)
            after, first = editing.replace_once(before, old, new_str or "")
            count = (new_str or "").count("\n") + 1
        else:
            line, new = _get_required(command, "insert_line", insert_line), _get_required(command, "new_str", new_str)
            after, first = editing.insert_after(before, line, new), line + 1
            count = new.removesuffix("\n").count("\n") + 1
        await self._apply_change(runtime, path, before.encode(), after.encode(), history)
        snippet = self._clip_rows("", _format_rows(after, first - SNIPPET_LINES, first + count - 1 + SNIPPET_LINES))
        return f"{path} is changed:\n{snippet}{_find_new_syntax_error(path, before, after)}"

    async def _show(
        self, runtime: Runtime, path: str, view_range: list[int] | None, concise: bool, python_only: bool
    ) -> str:
        found = await read_path(runtime, path, MAX_FILE_BYTES)
        if found.kind == "directory":
            if view_range:
                raise ValueError(f"{path} is a folder: view_range is for files")
            shown = [entry for entry in found.entries if not python_only or entry.endswith(("/", ".py"))]
            return self._clip_rows(f"{path}: files and folders two levels deep, without hidden ones", shown)
        text = _read_text(path, found)
        first, last = _parse_range(view_range, len(editing.split_lines(text)))
        rows = _format_rows(text, first, last)
        too_long = sum(map(len, rows)) + len(rows) > self.max_chars and view_range is None
        if path.endswith(".py") and (concise or too_long):
            source = text.replace("\r\n", "\n")
            elided = [
                _format_row(number, line)
                for number, line in elide(source, outline(source).entities)
                if first <= number <= last
            ]
            if len(elided) < len(rows):
                return self._clip_rows(f"{path} without the bodies of functions (view_range shows them):", elided)
        return self._clip_rows("", rows) or f"{path} is empty"

    async def _create(self, runtime: Runtime, path: str, content: str, history: list[Change]) -> str:
        if (await read_path(runtime, path, MAX_FILE_BYTES)).kind != "missing":
            raise ValueError(f"{path} is there already: change it with str_replace or insert, or remove it first")
        await self._apply_change(runtime, path, None, content.encode(), history)
        return f"{path} is created{_find_new_syntax_error(path, '', content)}"

    async def _revert(self, runtime: Runtime, path: str, history: list[Change]) -> str:
        if not history:
            raise ValueError(f"there is no change of {path} by this tool to take back")
        before, after = history[-1]
        found = await read_path(runtime, path, MAX_FILE_BYTES)
        if found.kind != "file" or found.data != after:
            raise ValueError(
                f"{path} was changed since by something else, which taking the last edit back would lose: "
                f"nothing was done"
            )
        if before is None:
            await remove_path(runtime, path)
        else:
            await write_path(runtime, path, before)
        history.pop()
        return f"the last change of {path} is taken back" + (": the file is gone" if before is None else "")

    async def _apply_change(
        self, runtime: Runtime, path: str, before: bytes | None, after: bytes, history: list[Change]
    ) -> None:
        await write_path(runtime, path, after)
        history.append((before, after))
        del history[:-MAX_UNDO]

    def _clip_rows(self, title: str, rows: list[str]) -> str:
        """Return as many whole rows as fit, and a note about omitted ones."""
        shown, size = [], len(title) + 100
        for row in rows:
            size += len(row) + 1
            if size > self.max_chars:
                break
            shown.append(row)
        missing = len(rows) - len(shown)
        note = [f"[{missing} more lines left out: look at a part of it]"] if missing else []
        return "\n".join([*([title] if title else []), *shown, *note])


def _get_required(command: str, name: str, value: T | None) -> T:
    if value is None:
        raise ValueError(f"{command} needs {name}")
    return value


def _read_text(path: str, found: PathState) -> str:
    """Read a text file. Raises ValueError for other content."""
    if found.kind == "missing":
        raise ValueError(f"there is no {path}: create makes a file, view of a folder shows what there is")
    if found.kind == "directory":
        raise ValueError(f"{path} is a folder: only view takes one")
    try:
        text = found.data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text (byte {error.start}): this tool leaves such files alone") from None
    if "\0" in text:
        raise ValueError(f"{path} is a binary file: this tool leaves such files alone")
    return text


def _format_rows(text: str, first: int, last: int) -> list[str]:
    """Return the requested lines, numbered. Lines past the end are omitted."""
    first = max(first, 1)
    lines = editing.split_lines(text)[first - 1 : last]
    return [_format_row(number, line.rstrip("\r\n")) for number, line in enumerate(lines, first)]


def _format_row(number: int, line: str) -> str:
    missing = len(line) - MAX_LINE_CHARS
    return (
        f"{number:6}\t{line}" if missing <= 0 else f"{number:6}\t{line[:MAX_LINE_CHARS]}... {missing} more characters"
    )


def _parse_range(view_range: list[int] | None, count: int) -> tuple[int, int]:
    """Validate a line range. Raises ValueError for lines outside the file."""
    if view_range is None:
        return 1, count
    if len(view_range) != 2:
        raise ValueError(f"view_range has a first and a last line; got {view_range}")
    first, last = view_range
    last = count if last == -1 else last
    if not 1 <= first <= last:
        raise ValueError(f"view_range must be [first, last] from 1 to {count}, or [first, -1]; got {view_range}")
    if first > count:
        raise ValueError(f"view_range begins at line {first}, and the file has {count}")
    return first, min(last, count)


def _find_new_syntax_error(path: str, before: str, after: str) -> str:
    if not path.endswith(".py"):
        return ""
    error = outline(after.replace("\r\n", "\n")).error
    if not error or outline(before.replace("\r\n", "\n")).error:
        return ""
    return f"\nNote: this is not valid Python any more: {error}"

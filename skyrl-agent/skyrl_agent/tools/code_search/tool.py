"""Tool `code_search`: the search engine runs in the runtime, next to the files."""

import json
from typing import Literal

from skyrl_agent.errors import ConfigError
from skyrl_agent.runtimes.base import ExecResult, Limits, Runtime
from skyrl_agent.tools.base import ToolContext, ToolOutput
from skyrl_agent.tools.code_search.engine.cli import REFUSED
from skyrl_agent.tools.code_search.engine.render import MIN_BUDGET
from skyrl_agent.tools.code_search.engine.search import EVERYWHERE
from skyrl_agent.tools.code_search.installed import INDEX, install_search
from skyrl_agent.tools.in_runtime import ABOVE_COMMAND_SECONDS, RuntimeTool, within


class CodeSearch(RuntimeTool):
    """
    Args:
        root: folder of the repository, in the working directory or absolute.
        max_chars: of an answer.
        timeout: seconds; the first call reads the whole repository.
    """

    name = "code_search"

    def __init__(self, *, root: str = ".", max_chars: int = 10_000, timeout: float = 120.0) -> None:
        if max_chars < MIN_BUDGET:
            raise ConfigError(f"tools: code_search: max_chars must be at least {MIN_BUDGET}; got {max_chars}")
        self.root, self.max_chars, self.timeout = root, max_chars, timeout
        self.timeout_seconds = 2 * timeout + ABOVE_COMMAND_SECONDS
        self._folder: str | None = None

    async def run(
        self,
        context: ToolContext,
        search_terms: list[str] | str | None = None,
        file_path_or_pattern: str = EVERYWHERE,
        line_nums: list[int] | int | None = None,
        relation: Literal["callers", "callees", "imports", "inherits"] | None = None,
        format: Literal["complete", "preview", "fold"] | None = None,
    ) -> ToolOutput:
        """Finds code in the repository without reading whole files: classes, functions and methods by name, any text,
        who calls what. It sees the files as they are now.

        Args:
            search_terms: Names (`parse`, `Parser.parse`), ids (`src/parser.py:Parser.parse`), paths, or any exact text:
                one of them, or a list.
            file_path_or_pattern: Where to search: a path, a folder, or a glob such as src/**/*.py.
            line_nums: Lines to show, with what is around them; file_path_or_pattern must then be one file.
            relation: Of the classes or functions that the terms name: who calls them, what they call, what their file
                imports and who imports it, their base classes and subclasses.
            format: How much to show: whole source, its first lines, or signatures. By itself it shows what there is
                room for.
        """
        runtime = self.runtime_of(context)
        limits = within(runtime, self.timeout)
        terms = search_terms if isinstance(search_terms, str) else json.dumps(search_terms or [])
        line_nums = [line_nums] if isinstance(line_nums, int) else line_nums
        options = ["--root", self.root, "--max_chars", str(self.max_chars)]
        options += [
            f"--search_terms={terms}",
            f"--file_path_or_pattern={file_path_or_pattern}",
        ]
        options += ["--line_nums", *map(str, line_nums)] if line_nums else []
        options += ["--relation", relation] if relation else []
        options += ["--format", format] if format else []
        result = await self._run_installed(runtime, options, limits)
        if result.ok:
            return ToolOutput(result.stdout.rstrip("\n"))
        if result.outcome == "exited" and result.returncode == REFUSED:
            return ToolOutput(f"Error: {result.stderr.strip()}", failed=True)
        why = f"it was ended: {result.outcome}" if result.outcome != "exited" else result.stderr.strip()[-500:]
        return ToolOutput(f"Error: the search did not work: {why}", failed=True)

    async def _run_installed(self, runtime: Runtime, options: list[str], limits: Limits) -> ExecResult:
        """Run a search, after installing the engine if it is missing."""
        if self._folder is not None:
            result = await self._run_search(runtime, self._folder, options, limits)
            if result.ok or result.outcome != "exited" or result.returncode == REFUSED:
                return result
        self._folder = await install_search(runtime, limits=limits)
        return await self._run_search(runtime, self._folder, options, limits)

    async def _run_search(self, runtime: Runtime, folder: str, options: list[str], limits: Limits) -> ExecResult:
        command = [runtime.python, "-I", "-S", folder, "--cache", f"{folder}/{INDEX}", *options]
        return await runtime.exec(command, limits=limits)

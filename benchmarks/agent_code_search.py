"""Time that the agents' code search takes to index a repository, to notice changes, and to answer.

    python benchmarks/agent_code_search.py [--lines 100000] [--turns 5] [--root FOLDER] [--skip-runtime]

Without `--root` the repository is made of this Python's standard library: packages in the order of their names until
there are enough lines. Each question is asked in turn, in this process and through the tool in a runtime of its own.
"""

import argparse
import asyncio
import io
import os
import resource
import shutil
import statistics
import sys
import sysconfig
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from skyrl_agent.errors import InfraError
from skyrl_agent.runtimes import Limits, RuntimeSpec, make_runtime
from skyrl_agent.tools.base import ToolContext
from skyrl_agent.tools.code_search import CodeSearch, RepositorySearch

QUESTIONS: dict[str, dict[str, Any]] = {
    "a method by its name": {"search_terms": ["BaseEventLoop.run_forever"]},
    "a method by its id": {"search_terms": ["asyncio/base_events.py:BaseEventLoop.run_forever"]},
    "a name that many have, as signatures": {"search_terms": ["close"]},
    "a rare text": {"search_terms": ["loop.call_soon_threadsafe("]},
    "a text on thousands of lines": {"search_terms": ["self."]},
    "a sentence, ranked by its words": {"search_terms": ["where sockets are closed after a timeout"]},
    "five names in one folder": {
        "search_terms": ["Task", "Future", "run", "gather", "Queue.get"],
        "file_path_or_pattern": "asyncio/**/*.py",
    },
    "callers of a function": {"search_terms": ["asyncio/events.py:get_event_loop"], "relation": "callers"},
    "callers of a method that many classes have": {"search_terms": ["BaseEventLoop.close"], "relation": "callers"},
    "callees": {"search_terms": ["BaseEventLoop.create_connection"], "relation": "callees"},
    "subclasses": {"search_terms": ["AbstractEventLoop"], "relation": "inherits"},
    "lines of a file": {"file_path_or_pattern": "asyncio/base_events.py", "line_nums": [100, 500]},
}
LEFT_OUT = {"test", "tests", "idlelib", "lib2to3", "site-packages", "__pycache__"}
LIMITS = Limits(wall_seconds=300.0, cpu_seconds=300.0)


def make_repository(folder: Path, lines: int) -> int:
    """Copies of the standard library's modules, `asyncio` first. Returns how many lines there are."""
    library = Path(sysconfig.get_path("stdlib"))
    entries = sorted(entry for entry in library.iterdir() if entry.name not in LEFT_OUT)
    total = 0
    for entry in [library / "asyncio", *entries]:
        if total >= lines:
            break
        target = folder / entry.name
        if target.exists():
            continue
        if (entry / "__init__.py").is_file():
            shutil.copytree(entry, target, ignore=shutil.ignore_patterns(*LEFT_OUT))
        elif entry.suffix == ".py":
            shutil.copy(entry, target)
        total += count_lines(target)
    return total


def count_lines(path: Path) -> int:
    files = [path] if path.is_file() else list(path.rglob("*.py"))
    return sum(file.read_bytes().count(b"\n") for file in files if file.suffix == ".py")


def measured(call: Callable[[], object]) -> tuple[float, float]:
    """Wall and processor seconds."""
    started, before = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - started, time.process_time() - before


def children_seconds() -> float:
    return sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])


def index_rows(root: Path) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        cache = str(Path(folder) / "index")
        fresh = RepositorySearch(str(root), cache)
        rows = [row("index from nothing", [measured(fresh.index.refresh)], 1.0, "s")]
        rows.append(row("index of the last process", [measured(lambda: RepositorySearch(str(root), cache))]))
        rows.append(row("nothing has changed", [measured(fresh.index.refresh) for _ in range(5)]))
        for file in sorted(root.rglob("*.py"))[:10]:
            file.write_text(file.read_text() + "\n\ndef added():\n    return 1\n")
        rows.append(row("ten files have changed", [measured(fresh.index.refresh)]))
        size = os.path.getsize(cache) / 1e6
    entities = sum(len(file.entities) for file in fresh.index.files.values())
    print(f"{len(fresh.index.files)} files, {entities} entities, index of {size:.1f} MB\n")
    return rows


def row(name: str, taken: list[tuple[float, float]], scale: float = 1000.0, unit: str = "ms") -> str:
    wall, processor = (statistics.median(values) for values in zip(*taken, strict=True))
    longest = max(wall for wall, _ in taken)
    return f"| {name} | {scale * wall:.2f} {unit} | {scale * processor:.2f} | {scale * longest:.2f} |"


def asked_here(root: Path, turns: int) -> dict[str, list[tuple[float, float]]]:
    search = RepositorySearch(str(root))
    search.index.refresh()
    names = {"search_terms": "terms", "file_path_or_pattern": "files", "line_nums": "lines"}
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in QUESTIONS}
    for _ in range(turns):
        for name, question in QUESTIONS.items():
            asked = {names.get(key, key): value for key, value in question.items()}
            taken[name].append(measured(lambda asked=asked: search.search(**asked)))
    return taken


async def asked_in_a_runtime(root: Path, turns: int) -> dict[str, list[tuple[float, float]]]:
    """Whole calls of the tool, of which the first also reads the repository."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        archive.add(root, arcname=".")
    taken: dict[str, list[tuple[float, float]]] = {"the first call": []} | {name: [] for name in QUESTIONS}
    async with make_runtime(RuntimeSpec(kind="local", limits=LIMITS)) as runtime:  # pyright: ignore[reportGeneralTypeIssues]
        await runtime.exec(["tar", "x"], stdin=packed.getvalue())
        context, tool = ToolContext("benchmark", {}, runtime), CodeSearch(timeout=300.0)

        async def call(question: dict[str, Any]) -> tuple[float, float]:
            started, before = time.perf_counter(), children_seconds()
            output = await tool.call(context, question)
            assert not output.failed, output.text
            return time.perf_counter() - started, children_seconds() - before

        taken["the first call"].append(await call(QUESTIONS["lines of a file"]))
        for _ in range(turns):
            for name, question in QUESTIONS.items():
                taken[name].append(await call(question))
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=100_000)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--root", type=Path, help="a repository that has the names asked for; it is copied")
    parser.add_argument("--skip-runtime", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "repository"
        if options.root:
            shutil.copytree(options.root, root, ignore=shutil.ignore_patterns(".git", *LEFT_OUT))
            lines = count_lines(root)
        else:
            root.mkdir()
            lines = make_repository(root, options.lines)
        load = os.getloadavg()[0]
        print(f"{lines:,} lines; {os.cpu_count()} processors, load {load:.1f} before, Python {sys.version.split()[0]}")
        head = "| wall, median | processor | wall, longest |\n|---|---|---|---|"
        rows = index_rows(root)
        print(f"| index {head}\n" + "\n".join(rows) + "\n")
        here = asked_here(root, options.turns)
        print(f"| question, index in memory {head}\n" + "\n".join(row(name, taken) for name, taken in here.items()))
        if options.skip_runtime:
            return
        try:
            inside = asyncio.run(asked_in_a_runtime(root, options.turns))
        except InfraError as error:
            print(f"\nno runtime here: {error}")
            return
        print(f"\n| call of the tool, local runtime {head}")
        print("\n".join(row(name, taken) for name, taken in inside.items()))


if __name__ == "__main__":
    main()

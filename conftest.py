"""The folder of test data. Cost of tests: seconds and started processes of each file, a table at the end of a run, and
a budget per file.

Each test is charged the processor time of its own process and of the children that ended meanwhile, grandchildren
included, and the number of processes that its own process started. Not seen: processes that children start, which count
as seconds of the child, and seconds of children that nobody has waited for, such as Ray's daemons before shutdown.
A module's fixture is charged to the test that uses it first or last; per file it adds up.
"""

import atexit
import dataclasses
import functools
import gc
import multiprocessing.process
import os
import shutil
import signal
import subprocess
import tempfile
import time
import tomllib
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from xdist.scheduler import LoadFileScheduling

from skyrl_gym.sandbox.testing import needs_local, needs_sandbox  # noqa: F401 (fixtures)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell's background job ignores it, and so would each process that a test starts and interrupts.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Collecting imports torch, transformers and 400 test files, and frees next to nothing: a third of its time went into
# looking for garbage. `pytest_collection_finish` turns the collector on again.
gc.disable()

if "HF_DATASETS_CACHE" not in os.environ:  # tokenized rows of tests; workers and processes that tests start inherit it
    os.environ["HF_DATASETS_CACHE"] = _cache = tempfile.mkdtemp(prefix="skyrl-tests-")
    atexit.register(shutil.rmtree, _cache, ignore_errors=True)

# No deadline: a loaded machine is slow. In CI each run tries the same cases, which judge a change alike.
hypothesis.settings.register_profile("tests", deadline=None, derandomize=bool(os.environ.get("CI")))
hypothesis.settings.load_profile("tests")

BUDGETS = Path(__file__).parent / "tests" / "budgets.toml"
NOT_DAILY = ("slow", "full", "gpu", "network")
"""Tests with these markers are not part of `make test`, and have no budget."""
CASES_BEFORE = pytest.StashKey[Counter[str]]()
"""Number of collected cases of each test with the marker `first_case`."""
TABLE_SECONDS = 30.0
"""Runs that are shorter print no table, unless a budget is exceeded."""
NUM_FILES, NUM_TESTS = 25, 15
DEFAULT_TIMEOUT = 300.0
"""Seconds; as in `pyproject.toml`."""


@pytest.fixture(scope="session")
def test_data() -> Path:
    """The folder of real public data; without it the test is skipped."""
    folder = Path(os.environ.get("SKYRL_TEST_DATA", Path(__file__).resolve().parents[1] / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no test data at {folder}: set SKYRL_TEST_DATA")
    return folder


@dataclasses.dataclass
class Cost:
    """Seconds on the clock, processor seconds of the test's process and of its children, number of processes."""

    wall: float = 0.0
    own_cpu: float = 0.0
    children_cpu: float = 0.0
    processes: int = 0

    @property
    def cpu(self) -> float:
        return self.own_cpu + self.children_cpu

    def __add__(self, other: "Cost") -> "Cost":
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Cost(*(mine + theirs for mine, theirs in pairs))

    def __sub__(self, other: "Cost") -> "Cost":
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Cost(*(mine - theirs for mine, theirs in pairs))


class ProcessCounter:
    """Number of processes that this process has started. (An audit hook would be called for each `open`, `id` and
    import, too: a tenth of the time of collecting.)"""

    STARTS: tuple[tuple[object, str], ...] = (
        (subprocess.Popen, "__init__"),
        (os, "fork"),
        (os, "forkpty"),
        (os, "posix_spawn"),
        (multiprocessing.process.BaseProcess, "start"),
    )

    def __init__(self) -> None:
        self.started = 0
        for owner, name in self.STARTS:
            setattr(owner, name, self._count(getattr(owner, name)))

    def _count(self, start: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(start)
        def counted(*args: Any, **kwargs: Any) -> Any:
            before = self.started
            result = start(*args, **kwargs)
            self.started = before + 1  # not more where one way to start uses another
            return result

        return counted


COUNTER = ProcessCounter()


def current_cost() -> Cost:
    """Return what this process has used so far."""
    times = os.times()
    children = times.children_user + times.children_system
    return Cost(time.monotonic(), times.user + times.system, children, COUNTER.started)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    item.stash[COST_BEFORE] = current_cost()
    return (yield)


COST_BEFORE = pytest.StashKey[Cost]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the cost since the report before this one. xdist sends extra attributes of reports to the controller."""
    report = yield
    now = current_cost()
    daily = not any(item.get_closest_marker(name) for name in NOT_DAILY)
    vars(report).update(cost=dataclasses.asdict(now - item.stash[COST_BEFORE]), daily=daily)
    item.stash[COST_BEFORE] = now
    return report


class CostReporter:
    """Sums the costs of a run by test and by file, prints them, and holds the budgets of files."""

    def __init__(self, budgets: dict[str, Any], print_always: bool):
        self._default, self._of_files, self._print_always = budgets["default"], budgets["files"], print_always
        self._tests: defaultdict[str, Cost] = defaultdict(Cost)
        self._daily: defaultdict[str, Cost] = defaultdict(Cost)
        self._started = time.monotonic()

    def pytest_runtest_logreport(self, report: Any) -> None:
        if cost := getattr(report, "cost", None):
            self._tests[report.nodeid] += Cost(**cost)
            if report.daily:
                self._daily[file_of(report.nodeid)] += Cost(**cost)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if self._over_budget() and exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        over_budget = self._over_budget()
        if over_budget or self._print_always or time.monotonic() - self._started > TABLE_SECONDS:
            terminalreporter.section("cost")
            terminalreporter.write_line("\n".join(self._tables()))
        for line in over_budget:
            terminalreporter.write_line(line, red=True)

    def _over_budget(self) -> list[str]:
        lines = []
        for file, cost in self._daily.items():
            budget = self._of_files.get(file, self._default)
            if cost.cpu > budget:  # not on the clock: that depends on what else runs on the machine
                lines.append(
                    f"{file} took {cost.cpu:.1f} s of processor time; its budget in {BUDGETS.name} is {budget} s: "
                    f"let tests share a process, mark some slow or full, or raise the budget"
                )
        return lines

    def _tables(self) -> Iterable[str]:
        files: defaultdict[str, Cost] = defaultdict(Cost)
        num_tests = Counter(file_of(nodeid) for nodeid in self._tests)
        for nodeid, cost in self._tests.items():
            files[file_of(nodeid)] += cost
        total = sum(files.values(), Cost())
        yield f"{'wall s':>8} {'cpu s':>8} {'started':>8} {'s/process':>9} {'tests':>6}"
        by_cost = sorted(files.items(), key=lambda entry: max(entry[1].wall, entry[1].cpu), reverse=True)
        for file, cost in [("all files", total), *by_cost[:NUM_FILES]]:
            each = f"{cost.children_cpu / cost.processes:9.1f}" if cost.processes else " " * 9
            tests = num_tests[file] or len(self._tests)
            yield f"{cost.wall:8.1f} {cost.cpu:8.1f} {cost.processes:8} {each} {tests:6}  {file}"
        yield f"slowest tests{'':8}(s/process: processor time of children by processes started)"
        for nodeid, cost in sorted(self._tests.items(), key=lambda entry: entry[1].wall, reverse=True)[:NUM_TESTS]:
            yield f"{cost.wall:8.1f} {cost.cpu:8.1f} {cost.processes:8}  {nodeid}"


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


class Scheduler(LoadFileScheduling):
    """Scheduler of test files over xdist's workers. With `--processes-in-turn`, files with tests that start servers,
    engines or Ray (marker `process`) are one unit: they run one after the other, beside files that compute. Not in
    `make test-slow`, whose tests spend most of their time waiting for processes to start."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        in_turn = self.config.getoption("--processes-in-turn") and _starts_processes(self.config.rootpath / file)
        return "process" if in_turn else file


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests of GPUs without them: `gpu` needs one, `gpu(2)` two."""
    if marker := item.get_closest_marker("gpu"):
        import torch

        needed, found = marker.args[0] if marker.args else 1, torch.cuda.device_count()
        if found < needed:
            pytest.skip(f"needs {needed} CUDA devices; found {found}")


@pytest.hookimpl(trylast=True)  # after the selection by markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In a parallel run, begin with the files that may take longest: those with the longest timeout of a test, then
    those that start processes, then those of most tests. Otherwise one worker ends long after the others."""
    if not hasattr(config, "workerinput"):
        return
    num_tests = Counter(item.path for item in items)
    timeouts = dict.fromkeys(num_tests, DEFAULT_TIMEOUT)
    for item in items:
        if marker := item.get_closest_marker("timeout"):
            timeouts[item.path] = max(timeouts[item.path], *marker.args)
    order = {path: (-timeouts[path], not _starts_processes(path), -count, path) for path, count in num_tests.items()}
    items.sort(key=lambda item: order[item.path])


def pytest_itemcollected(item: pytest.Item) -> None:
    if item.get_closest_marker("first_case"):
        function = item.nodeid.partition("[")[0]
        cases = item.session.stash.setdefault(CASES_BEFORE, Counter())
        cases[function] += 1
        if cases[function] > 1:
            item.add_marker("full" if item.get_closest_marker("slow") else "slow")


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.freeze()
    gc.enable()


@functools.cache
def _starts_processes(file: Path) -> bool:
    return "pytest.mark.process" in file.read_text()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduler:
    return Scheduler(config, log)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--processes-in-turn", action="store_true", help="files with the marker `process` run one by one")
    parser.addoption("--cost", action="store_true", help="print the cost of files and tests, also of a short run")


def pytest_configure(config: pytest.Config) -> None:
    vars(config.option)["loadscopereorder"] = False  # ordered by `pytest_collection_modifyitems`
    if not hasattr(config, "workerinput"):  # not in xdist's workers
        budgets = tomllib.loads(BUDGETS.read_text())
        config.pluginmanager.register(CostReporter(budgets, bool(config.getoption("--cost"))), "cost_reporter")

"""Evaluations of benchmark suites: settings and tasks of each, checked before the first starts, and a summary table.

Each suite is a separate evaluation (`skyrl_gym.eval.runner`) in a separate folder, with its rows in tasks.jsonl.
"""

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from skyrl_gym.check import spec_of
from skyrl_gym.envs.registration import env_class_of
from skyrl_gym.envs.sql.env import DATABASE_FOLDERS
from skyrl_gym.error import Error, InfraError
from skyrl_gym.eval.records import group_successes_by_task, read_records
from skyrl_gym.eval.runner import evaluate
from skyrl_gym.eval.settings import EvalSettings, SettingsError
from skyrl_gym.eval.statistics import Estimate, estimate, mean_of_sets, pass_at_k
from skyrl_gym.eval.suite_data import DataOptions, tasks_of
from skyrl_gym.eval.suites import GROUPS, Suite, get_suites
from skyrl_gym.eval.summary import Summary
from skyrl_gym.suggestions import did_you_mean
from skyrl_gym.tools.search import DEFAULT_SEARCH_URL, call_search_api

PROBE_SECONDS = 10.0


@dataclass(frozen=True)
class PlannedSuite:
    """Suite with validated settings and written tasks."""

    name: str
    settings: EvalSettings
    source: str
    """Path or hub name of its tasks."""
    num_tasks: int
    num_left_out: int
    """Problems that cannot be played."""

    def run(self, *, progress: bool = False) -> Summary:
        """Play the missing episodes. Raises as `evaluate` does."""
        return evaluate(self.settings, progress=progress)


def plan_suites(
    names: Sequence[str], data: Sequence[str], output: Path, options: Mapping[str, object]
) -> list[PlannedSuite]:
    """Check settings and services, then find and write the tasks of each suite, without playing them.

    Args:
        names: suites and groups.
        data: values of `--data`.
        output: folder that gets a folder of each suite.
        options: fields of `EvalSettings` set by the user; they override the suites' settings. Each setting of
            `env_config` is passed to the suites with an environment that has it.

    Raises:
        Error: a setting, service or file is invalid; the text names it.
    """
    suites = get_suites(names)
    given: Any = options.get("env_config", {})
    configs = _build_env_configs(suites, given)
    for name, suite in suites.items():
        _check_databases(name, suite, configs[name])
    for url in {
        str(configs[name].get("search_url", DEFAULT_SEARCH_URL)) for name in suites if suites[name].needs_retrieval
    }:
        _check_retrieval(url)
    given_data = DataOptions.parse(data)
    return [
        _plan_suite(name, suite, given_data, output / name, options, configs[name]) for name, suite in suites.items()
    ]


def _build_env_configs(suites: Mapping[str, Suite], given: Mapping[str, object]) -> dict[str, dict[str, object]]:
    """Return the settings of each suite's environment."""
    known = {name: _build_settings(suite.env) for name, suite in suites.items()}
    everything = sorted(set().union(*known.values()))
    for setting in given:
        if setting not in everything:
            hint = did_you_mean(setting, everything)
            raise SettingsError(f"--env-config: no environment of these suites has a setting {setting!r}; {hint}")
    return {
        name: {**suite.env_config, **{setting: value for setting, value in given.items() if setting in known[name]}}
        for name, suite in suites.items()
    }


def _build_settings(env: str) -> set[str]:
    config_class: Any = getattr(env_class_of(spec_of(env)), "config_class", None)
    return set() if config_class is None else {each.name for each in fields(config_class)}


def _check_databases(name: str, suite: Suite, env_config: Mapping[str, object]) -> None:
    if suite.databases is None:
        return
    example = """--env-config '{"db_path": "DIR"}'"""
    if "db_path" not in env_config:
        raise SettingsError(f"suite {name} needs its database folder: {example}")
    folder = Path(str(env_config["db_path"])) / DATABASE_FOLDERS[suite.databases]
    if not folder.is_dir():
        raise SettingsError(f"suite {name}: no database folder {folder}; set its parent folder: {example}")


def _check_retrieval(url: str) -> None:
    """Ask the retrieval server once. Raises InfraError if it does not answer as one."""
    fix = """start it (`python -m skyrl_gym.tools.retrieval`), or set it with --env-config '{"search_url": "URL"}'"""
    try:
        _, error = call_search_api(url, "probe", topk=1, timeout=PROBE_SECONDS, log_requests=False, max_retries=1)
    except InfraError as failure:
        raise InfraError(f"the retrieval server at {url} does not respond: {failure}; {fix}") from failure
    if error is not None:
        raise InfraError(f"the server at {url} is not a retrieval server: {error}; {fix}")


def _plan_suite(
    name: str,
    suite: Suite,
    data: DataOptions,
    folder: Path,
    options: Mapping[str, object],
    env_config: Mapping[str, object],
) -> PlannedSuite:
    num_samples: Any = options.get("num_samples", suite.num_samples)
    chosen: dict[str, Any] = {
        "num_samples": num_samples,
        "pass_k": tuple(sorted({1, min(suite.k, num_samples)})),
        "temperature": suite.temperature,
        "top_p": suite.top_p,
        "max_tokens": suite.max_tokens,
        "max_turns": suite.max_turns,
        "stop": suite.stop,
        **options,
        "env": suite.env,
        "env_config": env_config,
        "data": folder / "tasks.jsonl",
        "output": folder,
    }
    try:
        settings = EvalSettings(**chosen)
    except SettingsError as failure:
        raise SettingsError(f"suite {name}: {failure}") from failure
    tasks = tasks_of(name, suite, data.source_of(name, env_config), env_config)
    _write_tasks(folder / "tasks.jsonl", tasks.text(), tasks.source)
    return PlannedSuite(name, settings, tasks.source, len(tasks.rows), tasks.num_left_out)


def _write_tasks(path: Path, text: str, source: str) -> None:
    """Write the rows. Raises Error if there are others already, which episodes may have been played on."""
    if path.exists():
        if path.read_text() != text:
            raise Error(f"{path} contains other tasks than {source}: set another --output")
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@dataclass(frozen=True)
class SuiteLine:
    """One line of the table: a suite, or the mean over a group's sets."""

    name: str
    num_tasks: int
    num_samples: int
    mean: Estimate | None
    """mean@n: the share of right answers, the mean over tasks of that over their n samples."""
    k: int
    passed: Estimate | None
    """pass@k."""
    num_failed: int


@dataclass(frozen=True)
class SuiteValues:
    """Values of a suite for each task, from which the table and the means of groups are computed."""

    plan: PlannedSuite
    shares: list[float]
    passes: list[float]
    num_failed: int

    @property
    def k(self) -> int:
        """The k of pass@k."""
        return max(self.plan.settings.pass_k)

    @classmethod
    def read(cls, plan: PlannedSuite) -> "SuiteValues":
        """Read the episodes that were played."""
        settings = plan.settings
        records, _ = read_records(settings.output / "episodes.jsonl")
        num_tasks = min(plan.num_tasks, settings.limit or plan.num_tasks)
        wanted = [each for each in records.values() if each.task < num_tasks and each.sample < settings.num_samples]
        tasks = list(group_successes_by_task(wanted).values())
        k = max(settings.pass_k)
        # A task with failed episodes may have fewer than k samples: pass@k is not defined for it.
        return cls(
            plan,
            [statistics.fmean(task) for task in tasks],
            [pass_at_k(len(task), sum(task), k) for task in tasks if len(task) >= k],
            sum(each.failure is not None for each in wanted),
        )

    def line(self) -> SuiteLine:
        """Return the suite's line of the table."""
        return SuiteLine(
            self.plan.name,
            len(self.shares),
            self.plan.settings.num_samples,
            estimate(self.shares),
            self.k,
            estimate(self.passes),
            self.num_failed,
        )


def lines_of(finished: Sequence[SuiteValues]) -> list[SuiteLine]:
    """Build the lines of the table: each suite, then each group with at least two played suites."""
    return [*(each.line() for each in finished), *_build_group_lines(finished)]


def _build_group_lines(finished: Sequence[SuiteValues]) -> Iterator[SuiteLine]:
    for group, members in GROUPS.items():
        sets = [each for each in finished if each.plan.name in members]
        if len(sets) < 2:
            continue
        part = "" if len(sets) == len(members) else f" ({len(sets)} of {len(members)} sets)"
        yield SuiteLine(
            f"mean of {group}{part}",
            sum(len(each.shares) for each in sets),
            max(each.plan.settings.num_samples for each in sets),
            mean_of_sets([each.shares for each in sets]),
            max(each.k for each in sets),
            mean_of_sets([each.passes for each in sets]),
            sum(each.num_failed for each in sets),
        )


def format_suites_table(lines: Sequence[SuiteLine]) -> str:
    """Format the lines for people."""
    rows = [("suite", "tasks", "mean@n", "95 % interval", "pass@k", "95 % interval", "failed")]
    for line in lines:
        mean, mean_interval = _format_cells(f"mean@{line.num_samples}", line.mean)
        passed, passed_interval = _format_cells(f"pass@{line.k}", line.passed)
        row = (line.name, str(line.num_tasks), mean, mean_interval, passed, passed_interval, str(line.num_failed))
        rows.append(row)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _format_cells(name: str, value: Estimate | None) -> tuple[str, str]:
    if value is None:
        return f"{name} -", "-"
    return f"{name} {value.mean:.4f}", f"[{value.low:.4f}, {value.high:.4f}]"


def write_lines(output: Path, lines: Sequence[SuiteLine]) -> None:
    """Write the table as suites.json."""
    (output / "suites.json").write_text(json.dumps([asdict(line) for line in lines], indent=2) + "\n")

"""`python -m skyrl_agent.validate TASKFILE ROWS`: try the rows of a task without a model.

A row is valid if its unchanged instance fails, its solution passes, and the tests that it names exist. Each is graded
like an agent's work: by the task file's task, in fresh runtimes. Exit status: 0 if all rows are good, 1 if some are bad
(a table names them), 2 if they could not be tried.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from skyrl_agent.config.task_file import TaskFile, load_task_file
from skyrl_agent.datasets import read_rows
from skyrl_agent.errors import AgentError, ConfigError, InfraError, TaskRowError
from skyrl_agent.finish import FINISH
from skyrl_agent.runner import make_instance, make_task
from skyrl_agent.runtimes import make_runtime, merge_spec
from skyrl_agent.tasks.base import BaseTask, Instance, Judgement
from skyrl_agent.types import Row, TrajectoryResult

_WIDTH_PIPED = 200


@dataclass(frozen=True)
class RowReport:
    """Findings about one row."""

    instance_id: str
    has_solution: bool
    problems: list[str]


class Validator:
    """
    Args:
        cfg: the task file; its model is not used.
        parallel: number of rows validated concurrently.

    Raises:
        ConfigError: the task is unknown, has no tests, or has invalid settings.
    """

    def __init__(self, cfg: TaskFile, parallel: int = 4) -> None:
        self.cfg, self.task = cfg, make_task(cfg)
        if type(self.task).evaluate_original is BaseTask.evaluate_original:
            raise ConfigError(f"task={cfg.task!r} grades final responses and has no tests to run without an agent")
        self._turns = asyncio.Semaphore(parallel)

    async def validate(self, rows: Sequence[Row]) -> list[RowReport]:
        """Try all rows. A row that the task refuses is a bad one."""
        return list(await asyncio.gather(*(self._validate_row(position, row) for position, row in enumerate(rows))))

    async def _validate_row(self, position: int, row: Row) -> RowReport:
        try:
            instance = make_instance(self.cfg, self.task, position, row)
        except TaskRowError as error:
            return RowReport(f"row {position}", False, [str(error)])
        solution = self.task.solution(instance)
        # Held until both judgements are done, because each of them starts a runtime: this bounds the runtimes that
        # exist at a time. A row's runtimes follow one another, so it never holds two.
        async with self._turns:
            problems = await self._run_row(instance, solution)
        return RowReport(instance.instance_id, solution is not None, problems)

    async def _run_row(self, instance: Instance, solution: object) -> list[str]:
        try:
            original = await self._grade(instance, None)
            problems = ["the original already passes"] if original.reward > 0 else []
            if solution is None:
                return problems + [f"not run on the original: {obstacle}" for obstacle in _format_obstacles(original)]
            solved = await self._grade(instance, solution)
        except (AgentError, InfraError) as error:
            return [f"{type(error).__name__}: {error}"]
        if solved.reward > original.reward or solved.reward == 1.0:
            return problems
        parts = ", ".join(f"{name} {value:.4g}" for name, value in solved.parts.items())
        return [*problems, *(_format_obstacles(solved) or [f"its reference solution fails: {parts}"])]

    async def _grade(self, instance: Instance, solution: object) -> Judgement:
        """Grade the solution, or the unchanged instance without one, in a fresh runtime."""
        spec = self.task.evaluation_runtime_spec(instance) or self.task.runtime_spec(instance)
        assert spec is not None, "a task with tests needs a runtime"
        runtime = make_runtime(merge_spec(self.cfg.runtime, spec))
        try:
            await runtime.start()
            if solution is None:
                return await self.task.evaluate_original(instance, runtime)
            solved = TrajectoryResult(instance.instance_id, finish_reason=FINISH, results=solution)
            judgement = await self.task.evaluate_result(solution, instance, solved, runtime)
            return judgement if isinstance(judgement, Judgement) else Judgement(float(judgement))
        finally:
            await runtime.close()


def _format_obstacles(judgement: Judgement) -> list[str]:
    return [f"{name}: {details}" for name, details in judgement.not_run.items()]


def report(console: Console, reports: Sequence[RowReport]) -> None:
    """Print a line for each problem, and a summary."""
    bad = [found for found in reports if found.problems]
    if bad:
        table = Table(Column("row", no_wrap=True), "problem", box=None, pad_edge=False)
        for found in bad:
            for problem in found.problems:
                table.add_row(escape(found.instance_id), escape(problem))
        console.print(table)
    unsolved = sum(not found.has_solution for found in reports)
    note = f"; {unsolved} have no solution: only their original was checked" if unsolved else ""
    console.print(f"{len(reports) - len(bad)} of {len(reports)} rows are good, {len(bad)} bad{note}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m skyrl_agent.validate",
        description="Validate rows of a task: the original must fail, the row's solution must pass, and named tests "
        "must exist.",
    )
    parser.add_argument("task", type=Path, help="task file")
    parser.add_argument("rows", type=Path, help="dataset rows: .parquet, .jsonl, .json (.gz)")
    parser.add_argument("--limit", type=int, help="maximum number of rows")
    parser.add_argument("--parallel", type=int, default=4, help="rows checked concurrently (default: %(default)s)")
    options = parser.parse_args(arguments)
    try:
        validator = Validator(load_task_file(options.task), options.parallel)
        reports = asyncio.run(validator.validate(read_rows(options.rows)[: options.limit]))
    except (AgentError, OSError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    report(Console(width=None if sys.stdout.isatty() else _WIDTH_PIPED, highlight=False), reports)
    return 1 if any(found.problems for found in reports) else 0


if __name__ == "__main__":
    sys.exit(main())

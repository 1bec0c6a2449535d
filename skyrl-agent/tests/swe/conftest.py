"""Fixtures of the tests of software tasks."""

import gzip
import json
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest

from skyrl_agent.runtimes import make_runtime
from skyrl_agent.tasks.base import BaseTask, Instance, Judgement
from skyrl_agent.types import Row, TrajectoryResult
from skyrl_gym.sandbox.testing import require_sandbox


@pytest.fixture(scope="session")
def rows(test_data) -> Callable[[str], list[dict[str, Any]]]:
    """Return a function that reads the rows of a file of the data folder, such as `swe/quixbugs`."""

    def read(name: str) -> list[dict[str, Any]]:
        with gzip.open(test_data / f"{name}.jsonl.gz", "rt") as file:
            return [json.loads(line) for line in file]

    return read


@pytest.fixture(scope="session")
def sandboxed() -> None:
    """Skips where untrusted code cannot be run."""
    require_sandbox("local")


@pytest.fixture
def play(sandboxed):
    """A task's whole life with an agent that is one shell script, whose output is its answer unless there is one:
    (what it left, its judgement)."""

    async def live(
        task: BaseTask, row: Row, script: str = "", answer: str | None = None, finish_reason: str = "FINISH_TOOL"
    ) -> tuple[Any, Judgement]:
        instance = Instance(row, "row", str(row.get("data_source", "default")))
        task.check_row(instance)
        spec = task.runtime_spec(instance)
        assert spec is not None
        async with make_runtime(spec) as runtime:
            await task.initialize_runtime(instance, runtime)
            said = (await runtime.exec(script)).stdout.strip()
            result = await task.complete_runtime(instance, runtime, said if answer is None else answer)
        trajectory = TrajectoryResult(finish_reason=finish_reason)
        fresh = task.evaluation_runtime_spec(instance)
        async with make_runtime(fresh) if fresh else nullcontext() as runtime:
            judgement = await task.evaluate_result(result, instance, trajectory, runtime)
        assert isinstance(judgement, Judgement)
        if judgement.not_run:
            async with make_runtime(fresh or spec) as runtime:
                judgement = await task.recheck(instance, judgement, runtime)
        return result, judgement

    return live

"""A hang of an agent is explained by its waits: which trajectory, which stage, which tool or command."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from skyrl_agent.config.task_file import DispatcherSection
from skyrl_agent.dispatcher.dispatch import Dispatch
from skyrl_agent.tasks.base import BaseTask
from skyrl_agent.tools.base import BaseTool, ToolContext
from skyrl_gym.sandbox.testing import require_sandbox
from skyrl_gym.waits import begin_run, end_run
from skyrl_inspect.explain.diagnosis import find_causes
from skyrl_inspect.explain.evidence import observe
from skyrl_inspect.explain.text import headline

from .agent_cases import call, tool
from .test_agent_trajectory import File, Sum, trajectory_of

SECONDS = 3.0


@tool
async def shell(self: BaseTool, context: ToolContext, command: str) -> str:
    """Runs a command."""
    assert context.runtime is not None
    return (await context.runtime.exec(command)).stdout


@pytest.fixture
def recorded(tmp_path: Path) -> Iterator[None]:
    begin_run(tmp_path / "waits", "evaluation", explainer=lambda _: f": {headline(find_causes(observe(tmp_path)))}")
    yield
    end_run()


@pytest.mark.parametrize(
    "task, name, script, cause",
    [
        (Sum(), "test_sleep", call("sleep", seconds=60), "does not finish tool sleep"),
        pytest.param(
            File(),
            "test_shell",
            call("shell", command="sleep 60"),
            "does not finish command 'sleep 60' in the runtime",
        ),
    ],
)
async def test_overdue_stage_names_trajectory_and_pending_wait(
    recorded: None, task: BaseTask, name: str, script: str, cause: str
):
    if isinstance(task, File):
        require_sandbox("local")
    trajectory = trajectory_of(task, [script], tools=[name, "finish"])
    limits = {"generate": {"timeout_seconds": SECONDS, "retries": 0}, "close_timeout_seconds": 5.0}
    section = DispatcherSection.model_validate({"type": "async_pipeline", **limits})
    async with asyncio.timeout(30):
        [ended] = [one async for one in Dispatch(section).run([trajectory])]
    assert ended.result.failure is not None
    message = ended.result.failure.message
    assert f"generate did not finish within {SECONDS:g} s" in message
    assert "trajectory one_0 (pid " in message and cause in message, message

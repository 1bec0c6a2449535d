import asyncio
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parent))  # for the helper beside this file; importlib mode does not

from skyrl_agent.agents.mapping import AGENT_GENERATOR_REGISTRY, AGENT_TRAJECTORY_REGISTRY
from skyrl_agent.auto import AutoAgentRunner
from skyrl_agent.integrations.base import BACKEND_REGISTRY, Backend, plain_rows, published_output, register_backend
from skyrl_agent.runner import AgentRunner
from skyrl_agent.testing import ScriptedModel, byte_tokenizer

AGENT = "runner_cases.OneQuestionAgent"


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    """The agent, and a backend whose engine is the model itself."""
    AGENT_TRAJECTORY_REGISTRY[AGENT] = "runner_cases.OneQuestion"
    AGENT_GENERATOR_REGISTRY[AGENT] = "skyrl_agent.agents.base.AgentRunner"
    register_backend("itself", Backend(lambda infer_engine, **_: infer_engine, plain_rows, published_output))
    yield
    del AGENT_TRAJECTORY_REGISTRY[AGENT], AGENT_GENERATOR_REGISTRY[AGENT], BACKEND_REGISTRY["itself"]


@pytest.fixture
def task_file(tmp_path: Path) -> Callable[..., Path]:
    """`task_file(key=value)`: a file with these keys over the usual ones; `generator={...}` adds to that section."""

    def write(**changes: Any) -> Path:
        content: dict[str, Any] = {
            "agent_cls": AGENT,
            "task": "runner_cases.Doubling",
            "generator": {"infer_backend": "itself", "num_trajectories": 2},
            "dispatcher": {"type": "async_pipeline", "initialize": {"retries": 0}, "evaluate": {"retries": 0}},
        }
        for key, value in changes.items():
            content[key] = content[key] | value if isinstance(content.get(key), dict) else value
        path = tmp_path / "task.yaml"
        path.write_text(yaml.safe_dump(content))
        return path

    return write


def doubled(prompt: str, turn: int) -> str:
    """Answer as a model that can double numbers."""
    return str(2 * int(prompt.split("double ")[1].split("<")[0]))


@pytest.fixture
def runner(task_file: Callable[..., Path]) -> Callable[..., AgentRunner]:
    """`runner(key=value)`: of such a file, with a model that can double."""

    def make(**changes: Any) -> AgentRunner:
        tokenizer = byte_tokenizer()
        return AutoAgentRunner.from_task(task_file(**changes), ScriptedModel(tokenizer, doubled), tokenizer)

    return make


@pytest.fixture
def numbers() -> Callable[..., list[dict[str, Any]]]:
    return lambda *values: [{"number": value} for value in values]


@pytest.fixture(autouse=True)
async def check_no_running_tasks() -> Any:
    before = asyncio.all_tasks()
    yield
    left = [task for task in asyncio.all_tasks() - before if task is not asyncio.current_task() and not task.done()]
    assert not left, left

"""Deep imports of the published package lead to what has their place here."""

import time
from importlib import import_module

import pytest

from skyrl_agent.dispatcher.async_utils import call_sync_from_async, wait_all


@pytest.mark.parametrize(
    "path, home",
    [
        ("skyrl_agent.agents.react.react_agent.ReActAgent", "skyrl_agent.agents.react.ReActAgent"),
        (
            "skyrl_agent.agents.react.react_runner.ReActTrajectory",
            "skyrl_agent.agents.agent_trajectory.AgentTrajectory",
        ),
        ("skyrl_agent.agents.oh_codeact.codeact_agent.OHCodeActAgent", "skyrl_agent.agents.codeact.CodeActAgent"),
        (
            "skyrl_agent.agents.oh_codeact.codeact_runner.CodeActTrajectory",
            "skyrl_agent.agents.agent_trajectory.AgentTrajectory",
        ),
        (
            "skyrl_agent.dispatcher.dispatchers.DISPATCHER_REGISTRY",
            "skyrl_agent.dispatcher.registry.DISPATCHER_REGISTRY",
        ),
        ("skyrl_agent.functional.utils.Transition", "skyrl_agent.chat.transitions.Transition"),
    ],
)
def test_published_path_resolves_to_same_object(path, home):
    first, second = (getattr(import_module(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in (path, home))
    assert first is second


async def test_published_wait_helpers():
    async def give(value: int) -> int:
        return value

    assert await wait_all([give(1), give(2)]) == [1, 2]
    assert await call_sync_from_async(lambda a, b: a + b, 1, b=2) == 3
    with pytest.raises(TimeoutError):
        await wait_all([call_sync_from_async(time.sleep, 0.2)], timeout=0.01)

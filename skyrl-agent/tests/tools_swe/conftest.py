"""A real runtime on this machine, and calls of tools in it."""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from skyrl_agent.runtimes import Limits, Runtime, RuntimeSpec, make_runtime
from skyrl_agent.tools.base import BaseTool, ToolContext, ToolOutput
from skyrl_gym.sandbox.testing import require_sandbox

Call = Callable[..., Awaitable[ToolOutput]]


@pytest.fixture
async def runtime() -> AsyncIterator[Runtime]:
    require_sandbox("local")
    made = make_runtime(RuntimeSpec(kind="local", limits=Limits(wall_seconds=60.0, cpu_seconds=60.0)))
    try:
        await made.start()
        yield made
    finally:
        await made.close()


@pytest.fixture
def call(runtime: Runtime) -> Call:
    """`call(tool, name=value, ...)` as an agent calls it, in one trajectory."""
    context = ToolContext("trajectory", {}, runtime)

    async def run(tool: BaseTool, **arguments: Any) -> ToolOutput:
        await tool.open(context)
        return await tool.call(context, arguments)

    return run

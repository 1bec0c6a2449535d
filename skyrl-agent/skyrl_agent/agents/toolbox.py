"""Tools of one agent: open_all, called within limits, closed. Independent of models and conversations."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

from skyrl_agent.agents.pending import Pending
from skyrl_agent.errors import InfraError
from skyrl_agent.runtimes.recorded import clip
from skyrl_agent.tools.base import BaseTool, ToolContext, ToolOutput
from skyrl_agent.types import ToolCallRecord
from skyrl_gym.chat.tool_calls import Invalid, ToolCall
from skyrl_gym.concurrency import gather_or_cancel
from skyrl_gym.tools.core import unknown_tool
from skyrl_gym.waits import waiting

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 10.0
TOO_MANY = "Not run: at most {} function call(s) in one turn."
PREVIEW_CHARS = 400
"""Length limit of an output in logs."""


class Toolbox:
    """Tools of one agent and the records of their calls.

    Args:
        timeout: default timeout of a tool call in seconds.
        max_chars: length limit of an output.
        max_parallel: maximum number of calls run per turn.
        log_level: level at which calls are logged.
    """

    def __init__(
        self,
        tools: Sequence[BaseTool],
        pending: Pending,
        *,
        timeout: float,
        max_chars: int,
        max_parallel: int,
        log_level: int = logging.DEBUG,
    ) -> None:
        self.pending, self.timeout, self.max_chars, self.max_parallel = pending, timeout, max_chars, max_parallel
        self.log_level = log_level
        self.tools = {tool.name: tool for tool in tools}
        self.schemas = [tool.schema() for tool in tools]
        self.records: list[ToolCallRecord] = []

    @property
    def has_finish(self) -> bool:
        return "finish" in self.tools

    def collect_system_prompt_prefixes(self) -> list[str]:
        """Collect the texts of tools before the system message."""
        return [prefix for tool in self.tools.values() if (prefix := tool.get_system_prompt_prefix())]

    @asynccontextmanager
    async def open_all(self, context: ToolContext) -> AsyncIterator[None]:
        """Open all tools, and close them at the end.

        Raises:
            InfraError: a tool could not be open_all.
        """
        try:
            for tool in self.tools.values():
                try:
                    with waiting(f"tool {tool.name} to open", deadline=self.timeout):
                        await self.pending.before(self.timeout, tool.open(context))
                except TimeoutError as error:
                    raise InfraError(f"tool {tool.name}: open() {error}") from error
            yield
        finally:
            await asyncio.gather(*(self._close(tool) for tool in self.tools.values()))

    async def _close(self, tool: BaseTool) -> None:
        try:
            await self.pending.before(CLOSE_SECONDS, tool.close())
        except Exception as error:  # user code may raise anything; the tool is not used any more
            logger.warning("tool %s was not closed: %s: %s", tool.name, type(error).__name__, error)

    async def run(self, calls: Sequence[ToolCall | Invalid], context: ToolContext, step: int) -> list[ToolOutput]:
        """Run the calls of one turn: concurrently, or one after another if they share a runtime. A call that ends the
        agent is the last.

        Raises:
            InfraError: raised by a tool.
        """
        calls = self._apply_call_limit(calls)
        if context.runtime is None:
            return await gather_or_cancel([self._call(call, context, step) for call in calls])
        outputs: list[ToolOutput] = []
        for call in calls:
            outputs.append(await self._call(call, context, step))
            if outputs[-1].ends:
                break
        return outputs

    def _apply_call_limit(self, calls: Sequence[ToolCall | Invalid]) -> list[ToolCall | Invalid]:
        allowed, count = [], 0
        for call in calls:
            count += isinstance(call, ToolCall)
            is_extra = isinstance(call, ToolCall) and count > self.max_parallel
            allowed.append(Invalid(TOO_MANY.format(self.max_parallel)) if is_extra else call)
        return allowed

    async def _call(self, call: ToolCall | Invalid, context: ToolContext, step: int) -> ToolOutput:
        if isinstance(call, Invalid):
            return ToolOutput(clip(call.reason, self.max_chars), failed=True)
        now = asyncio.get_running_loop().time
        started = now()
        output = await self._run_call(call, context)
        if not output.ends:
            output = replace(output, text=clip(output.text, self.max_chars))
        seconds = now() - started
        logger.log(self.log_level, "%s(%s) -> %s", call.name, call.arguments, clip(output.text, PREVIEW_CHARS))
        self.records.append(
            ToolCallRecord(call.name, call.arguments, output.text, seconds, step, not output.failed, call.id)
        )
        return output

    async def _run_call(self, call: ToolCall, context: ToolContext) -> ToolOutput:
        tool = self.tools.get(call.name)
        if tool is None:
            return ToolOutput(unknown_tool(call.name, list(self.tools)), failed=True)
        seconds = tool.timeout_seconds or self.timeout
        try:
            with waiting(f"tool {call.name}", deadline=seconds):
                return await self.pending.before(seconds, tool.call(context, call.arguments))
        except TimeoutError as error:
            return ToolOutput(f"Error: {call.name} {error} and was cancelled.", failed=True)
        except InterruptedError as error:
            return ToolOutput(f"Error: {call.name} {error}.", failed=True)

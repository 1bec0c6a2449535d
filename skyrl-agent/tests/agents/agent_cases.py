"""Tiny real tools and the words of a model, for tests of agents."""

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

from skyrl_agent.agents.react import ReActAgent
from skyrl_agent.config.task_file import GeneratorSection
from skyrl_agent.errors import InfraError
from skyrl_agent.testing import Script, ScriptedModel, byte_tokenizer
from skyrl_agent.tools.base import BaseTool, ToolContext, ToolOutput, register_tool
from skyrl_agent.types import Message

QUESTION: list[Message] = [{"role": "system", "content": "Do it."}, {"role": "user", "content": "What is 2 + 3?"}]


def call(name: str, **arguments: Any) -> str:
    """A call as `function_xml` has it."""
    parameters = "".join(f"<parameter={key}>{value}</parameter>\n" for key, value in arguments.items())
    return f"<function={name}>\n{parameters}</function>"


def finish(answer: str = "5") -> str:
    return call("finish", answer=answer)


def tool(run: Any, **attributes: Any) -> Any:
    """Register a tool `test_NAME` that is called NAME and does what the function of this name does."""
    name = run.__name__
    return register_tool(f"test_{name}")(type(name, (BaseTool,), {"name": name, "run": run, **attributes}))


@tool
async def add(self: BaseTool, context: ToolContext, a: int, b: int) -> str:
    """Adds.

    Args:
        a: a number.
        b: another.
    """
    return f"The sum is {a + b}."


@tool
async def long(self: BaseTool, context: ToolContext, size: int) -> str:
    """Gives a long text."""
    return "begin" + "x" * size + "end"


@tool
async def broken(self: BaseTool, context: ToolContext) -> str:
    """Breaks."""
    raise RuntimeError("the gears of this tool are jammed\nsecond line: 4711")


@tool
async def outage(self: BaseTool, context: ToolContext) -> str:
    """Stands on a server that is away."""
    raise InfraError("the server of this tool is away")


@register_tool("test_sleep")
class Sleep(BaseTool):
    """Tool that records the outcome of its calls, and how many were open at the same time."""

    name = "sleep"
    log: ClassVar[list[str]] = []
    now: ClassVar[int] = 0
    most: ClassVar[int] = 0

    async def open(self, context: ToolContext) -> None:
        self.log.append("opened")

    async def run(self, context: ToolContext, seconds: float) -> str:
        """Sleeps."""
        kind = type(self)
        kind.now += 1
        kind.most = max(kind.most, kind.now)
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            self.log.append("cancelled")
            raise
        finally:
            kind.now -= 1
        return f"Slept {seconds:g} s."

    async def close(self) -> None:
        self.log.append("closed")

    @classmethod
    def forget(cls) -> None:
        cls.log, cls.now, cls.most = [], 0, 0


@partial(tool, timeout_seconds=0.05)
async def nap(self: BaseTool, context: ToolContext) -> None:
    """Sleeps for too long."""
    await asyncio.sleep(60)


@tool
async def stubborn(self: BaseTool, context: ToolContext) -> str:
    """Does not heed a cancellation."""
    for _ in range(3):
        try:
            await asyncio.sleep(0.2)
        except asyncio.CancelledError:
            continue
    return "too late"


@tool
async def cancels_itself(self: BaseTool, context: ToolContext) -> str:
    """Loses track of a cancellation."""
    raise asyncio.CancelledError


@register_tool("test_turn_page")
class TurnPage(BaseTool):
    name = "turn_page"

    def get_system_prompt_prefix(self) -> str:
        return "You read a book page by page."

    async def run(self, context: ToolContext, memory: str) -> ToolOutput:
        """Forgets all but the memory."""
        page = context.memory["page"] = context.memory.get("page", 0) + 1
        return ToolOutput("", new_context=[{"role": "user", "content": f"Memory: {memory}. Page {page}."}])


@tool
async def ask(self: BaseTool, context: ToolContext, question: str) -> str:
    """Asks the model itself."""
    assert context.ask is not None
    return f"It said: {await context.ask([{'role': 'user', 'content': question}])}"


def agent_of(script: Script, tools: Sequence[Any] = ("test_add", "finish"), **settings: Any) -> ReActAgent:
    """A ReAct agent over a scripted model and the byte tokenizer. Keywords of the agent, and of `generator`; those of
    the model begin with `model_`."""
    own = {
        key: settings.pop(key) for key in ("runtime", "max_depth", "sub_agent_steps", "max_repeats") if key in settings
    }
    of_model = {key.removeprefix("model_"): settings.pop(key) for key in [*settings] if key.startswith("model_")}
    tokenizer = settings.pop("tokenizer", None) or byte_tokenizer()
    section = GeneratorSection(**{"max_prompt_length": 100_000, **settings})
    return ReActAgent(section, ScriptedModel(tokenizer, script, **of_model), tokenizer, tools=list(tools), **own)


async def ran(agent: ReActAgent, *expected: Any) -> ReActAgent:
    """The agent after the question; `expected`: its finish reason, and its answer."""
    assert (await agent.run(QUESTION))[: len(expected)] == expected
    return agent


def prompts_of(agent: ReActAgent) -> list[str]:
    """The texts that the model was asked with."""
    return [request.prompt for request in agent.infer_engine.requests]

"""The life of an agent at an instance: runtime, conversation, judgement; what is given back, whatever happens."""

import asyncio
from typing import Any

import pytest

from skyrl_agent.agents.agent_trajectory import AgentTrajectory
from skyrl_agent.agents.codeact import CodeActAgent, get_tools_of_flags
from skyrl_agent.agents.oh_codeact import CodeActTrajectory, OHCodeActAgent
from skyrl_agent.config.task_file import read_task
from skyrl_agent.errors import ConfigError, InfraError
from skyrl_agent.runtimes import RuntimeSpec, make_runtime
from skyrl_agent.tasks.base import BaseTask, Instance, Judgement
from skyrl_agent.testing import ScriptedModel, byte_tokenizer
from skyrl_agent.tools.base import BaseTool, ToolContext

from .agent_cases import QUESTION, Sleep, call, finish, tool


@tool
async def write(self: BaseTool, context: ToolContext, path: str, text: str) -> str:
    """Writes a file."""
    assert context.runtime is not None
    await context.runtime.write(path, text)
    return f"Wrote {path}."


class Sum(BaseTask):
    """Right if the answer is 5."""

    tools = ("test_add", "finish")

    def get_instruction(self, instance):
        return QUESTION

    async def evaluate_result(self, result, instance, trajectory, runtime=None):
        return Judgement(float(result == "5"), {"right": float(result == "5")})


class File(BaseTask):
    """Right if `answer.txt`, as it was when the agent ended, is 5 in a fresh runtime."""

    tools = ("test_write", "finish")
    fails: Any = None

    def get_instruction(self, instance):
        return QUESTION

    def runtime_spec(self, instance):
        return RuntimeSpec(kind="local", files={"question.txt": "2 + 3"})

    async def initialize_runtime(self, instance, runtime):
        if self.fails == "initialize":
            raise InfraError("no repository")
        assert await runtime.read("question.txt") == b"2 + 3"

    async def complete_runtime(self, instance, runtime, result):
        if self.fails == "complete":
            raise InfraError("no diff")
        try:
            return await runtime.read("answer.txt")
        except FileNotFoundError:
            return None

    def evaluation_runtime_spec(self, instance):
        return RuntimeSpec(kind="local")

    async def evaluate_result(self, result, instance, trajectory, runtime=None):
        if self.fails == "evaluate":
            raise InfraError("no tests")
        if result is None:
            return Judgement(0.0, finish_reason="no_git_patch")
        assert runtime is not None
        await runtime.write("answer.txt", result)
        judged = await runtime.exec("grep -qx 5 answer.txt")
        return float(judged.ok)


def trajectory_of(task: BaseTask, script: Any, model: Any = None, **content: Any) -> AgentTrajectory:
    generator = {"max_prompt_length": 100_000, **content.pop("generator", {})}
    cfg = read_task({"task": "somewhere.Task", "generator": generator, **content})
    AgentTrajectory.check(cfg, task)
    tokenizer = byte_tokenizer()
    model = model or ScriptedModel(tokenizer, script)
    return AgentTrajectory(cfg, Instance({"n": 1}, "one"), 0, model, tokenizer, task, {"temperature": 0.7})


async def play(trajectory: AgentTrajectory, *stages: str) -> None:
    for stage in stages:
        await getattr(trajectory, f"{stage}_trajectory")()


@pytest.fixture
def runtimes(monkeypatch, needs_local):
    """The runtimes that were made, in order."""
    from skyrl_agent.agents import agent_trajectory

    made = []

    def remembered(spec):
        made.append(make_runtime(spec))
        return made[-1]

    monkeypatch.setattr(agent_trajectory, "make_runtime", remembered)
    return made


async def is_closed(runtime) -> bool:
    try:
        await runtime.exec("true")
    except InfraError:
        return True
    return False


async def test_trajectory_runs_prompt_tool_call_and_grading():
    trajectory = trajectory_of(Sum(), [call("add", a=2, b=3), finish()], generator={"profile_tools": True})
    await play(trajectory, "initialize", "generate")
    assert trajectory.wants_evaluation
    await trajectory.evaluate_trajectory()
    await trajectory.close()
    result = trajectory.result
    assert (result.finish_reason, result.results, result.reward) == ("FINISH_TOOL", "5", 1.0)
    assert result.reward_parts == {"right": 1.0}
    assert (result.num_steps, len(result.transitions), len(result.tool_calls)) == (2, 2, 2)
    assert [message["role"] for message in result.messages][:3] == ["system", "user", "assistant"]
    assert trajectory.infer_engine.requests[0].sampling_params["temperature"] == 0.7


async def test_agent_and_grader_use_separate_runtimes_that_are_closed(runtimes):
    trajectory = trajectory_of(File(), [call("write", path="answer.txt", text="5"), finish("done")])
    await play(trajectory, "initialize", "generate")
    assert len(runtimes) == 1 and await is_closed(runtimes[0])
    await trajectory.evaluate_trajectory()
    await trajectory.close()
    assert (trajectory.result.results, trajectory.result.reward) == (b"5", 1.0)
    assert len(runtimes) == 2 and await is_closed(runtimes[1])
    [command] = trajectory.result.sandbox
    assert (command.stage, command.command, command.outcome) == ("evaluate", "grep -qx 5 answer.txt", "exited")
    without = trajectory_of(File(), [finish("done")])  # judging may find another ending
    await play(without, "initialize", "generate", "evaluate")
    assert (without.result.finish_reason, without.result.reward) == ("no_git_patch", 0.0)


@pytest.mark.parametrize("stage, number_made", [("initialize", 1), ("complete", 1), ("evaluate", 2)])
async def test_failed_trajectory_is_closed_and_keeps_its_messages(runtimes, stage, number_made):
    task = File()
    task.fails = stage
    trajectory = trajectory_of(task, [finish("done")])
    with pytest.raises(InfraError):
        await play(trajectory, "initialize", "generate", "evaluate")
    await trajectory.close()
    assert len(runtimes) == number_made
    assert all([await is_closed(runtime) for runtime in runtimes])
    assert bool(trajectory.result.messages) == (stage != "initialize")


async def test_restart_discards_previous_attempt(runtimes):
    class Recovering(ScriptedModel):
        async def async_generate_ids(self, **request):
            text, meta = await super().async_generate_ids(**request)
            if len(self.requests) == 2:
                raise InfraError("the engine is dead")
            return text, meta

    script = [call("write", path="answer.txt", text="5"), finish("done")]
    trajectory = trajectory_of(File(), None, model=Recovering(byte_tokenizer(), script))
    await trajectory.initialize_trajectory()
    with pytest.raises(InfraError):
        await trajectory.generate_trajectory()
    assert len(trajectory.result.transitions) == 1
    await trajectory.restart()
    assert trajectory.result.transitions == []
    await play(trajectory, "initialize", "generate")
    assert trajectory.result.results == b"5"
    assert len(trajectory.result.transitions) == 2
    assert all([await is_closed(runtime) for runtime in runtimes])


async def test_cancellation_closes_tools_and_runtime(runtimes):
    Sleep.forget()
    trajectory = trajectory_of(File(), [call("sleep", seconds=60)], tools=["test_sleep", "finish"])
    await trajectory.initialize_trajectory()
    task = asyncio.create_task(trajectory.generate_trajectory())
    while Sleep.now == 0:
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await trajectory.close()
    assert Sleep.log == ["opened", "cancelled", "closed"]
    assert await is_closed(runtimes[0])


async def test_close_stops_pending_wait():
    model = ScriptedModel(byte_tokenizer(), [finish()], seconds=60)
    trajectory = trajectory_of(Sum(), None, model=model)
    await trajectory.initialize_trajectory()
    task = asyncio.create_task(trajectory.generate_trajectory())
    while not model.requests:
        await asyncio.sleep(0.01)
    await trajectory.close()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 5)


class Lending(File):
    async def make_environment(self):
        runtime = make_runtime(RuntimeSpec(kind="local", files={"question.txt": "2 + 3"}))
        await runtime.start()
        return runtime


async def test_borrowed_environment_is_runtime_and_stays_open(runtimes):
    task = Lending()
    lent = await task.make_environment()
    trajectory = trajectory_of(task, [call("write", path="answer.txt", text="5"), finish("done")])
    trajectory.environment = lent
    await play(trajectory, "initialize", "generate")
    await trajectory.close()
    assert await lent.read("answer.txt") == b"5"
    assert runtimes == []
    await lent.close()
    trajectory = trajectory_of(File(), [finish("done")])
    trajectory.environment = 0
    await play(trajectory, "initialize", "generate")
    await trajectory.close()
    assert len(runtimes) == 1 and await is_closed(runtimes[0])


@pytest.mark.parametrize(
    "content, error",
    [
        ({"tools": ["finsh"]}, "finish"),
        ({"tools": {"enable_bash": True}}, "CodeActAgent takes flags"),
        ({"tools": ["finish", "em_finish"]}, "name 'finish'"),
        ({"agent_config": {"max_dept": 2}}, "agent_config.max_depth"),
        ({"agent_config": {"max_repeats": 1}}, "agent_config.max_repeats"),
        ({"agent_config": {"runtime": 2}}, "agent_config.runtime"),
        ({"generator": {"chat_template": "no_such_file.jinja2"}}, "no_such_file.jinja2"),
    ],
)
def test_task_file_errors_are_raised_before_start(content, error):
    with pytest.raises(ConfigError, match=error):
        trajectory_of(Sum(), [finish()], **content)


@pytest.mark.parametrize(
    "flags, tools",
    [
        ({}, ["bash", "finish"]),
        ({"enable_editor": True, "enable_search": True, "enable_think": True, "enable_browsing": False},
         ["bash", "finish", "str_replace_editor", "code_search", "think"]),
        ({"enable_bash": False, "enable_llm_editor": False}, ["finish"]),
    ],
)  # fmt: skip
def test_flags_select_tools(flags, tools):
    assert get_tools_of_flags(flags) == tools


@pytest.mark.parametrize(
    "flags, error",
    [
        ({"enable_edtor": True}, "enable_editor"),
        ({"enable_editor": "yes"}, "must be true or false; got 'yes'"),
        ({"enable_mcp": True}, "tools.enable_mcp"),
    ],
)
def test_invalid_flags_are_rejected(flags, error):
    with pytest.raises(ConfigError, match=error):
        get_tools_of_flags(flags)


def test_published_path_resolves_to_agent():
    assert OHCodeActAgent is CodeActAgent
    assert CodeActTrajectory is AgentTrajectory
    assert CodeActAgent.tool_entries(None, BaseTask()) == ["bash", "str_replace_editor", "finish"]

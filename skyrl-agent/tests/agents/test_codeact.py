"""The agent with shell and editor, over a real runtime and the real tools."""

import pytest

from skyrl_agent.agents.codeact import CodeActTrajectory
from skyrl_agent.config.task_file import read_task
from skyrl_agent.runtimes import RuntimeSpec
from skyrl_agent.tasks.base import BaseTask, Instance
from skyrl_agent.testing import ScriptedModel, byte_tokenizer

from .agent_cases import QUESTION, call, finish

BUGGY = "def add(a, b):\n    return a - b\n"


class MendAdd(BaseTask):
    def get_instruction(self, instance):
        return QUESTION

    def runtime_spec(self, instance):
        return RuntimeSpec(files={"add.py": BUGGY})

    async def complete_runtime(self, instance, runtime, result):
        return (await runtime.read("add.py")).decode()

    def evaluation_runtime_spec(self, instance):
        return RuntimeSpec()

    async def evaluate_result(self, result, instance, trajectory, runtime=None):
        assert runtime is not None
        await runtime.write("add.py", result)
        return float((await runtime.exec([runtime.python, "-c", "import add; assert add.add(2, 3) == 5"])).ok)


async def run(script, **content):
    content = {"task": "somewhere.Task", "agent_cls": "skyrl_agent.agents.oh_codeact.OHCodeActAgent", **content}
    cfg = read_task({**content, "generator": {"max_prompt_length": 100_000, "max_iterations": 9}})
    CodeActTrajectory.check(cfg, MendAdd())
    tokenizer = byte_tokenizer()
    model = ScriptedModel(tokenizer, script)
    trajectory = CodeActTrajectory(cfg, Instance({}, "add"), 0, model, tokenizer, MendAdd(), {})
    await trajectory.initialize_trajectory()
    await trajectory.generate_trajectory()
    await trajectory.evaluate_trajectory()
    await trajectory.close()
    return trajectory.result, [request.prompt for request in model.requests]


@pytest.mark.parametrize("tools", [None, {"enable_editor": True, "enable_prompt_extensions": False}])
@pytest.mark.usefixtures("needs_sandbox")
async def test_agent_fixes_file_with_editor_and_shell(tools):
    script = [
        "Let me look.",
        call("bash", command="cat add.py"),
        call("str_replace_editor", command="str_replace", path="add.py", old_str="a - b", new_str="a + b"),
        call("bash", command="cd / && export SEEN=yes"),
        call("bash", command="echo $PWD $SEEN"),
        finish("mended"),
    ]
    result, prompts = await run(script, **({"tools": tools} if tools else {}))
    assert (result.finish_reason, result.reward) == ("FINISH_TOOL", 1.0)
    assert result.results == BUGGY.replace("-", "+")
    assert "had no function call in it" in prompts[1]
    assert "return a - b" in prompts[2]
    assert "/ yes" in prompts[5]
    assert [record.name for record in result.tool_calls] == ["bash", "str_replace_editor", "bash", "bash", "finish"]


@pytest.mark.usefixtures("needs_sandbox")
async def test_agent_files_are_graded_at_step_limit():
    script = [call("bash", command=f"sed -i 's/a - b/a + b/' add.py; echo {n}") for n in range(9)]
    result, _ = await run(script)
    assert (result.finish_reason, result.reward) == ("max_iterations_reached", 1.0)

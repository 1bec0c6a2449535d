"""A memory agent reads a text section by section, in the real pipeline with a scripted model."""

import pytest

from skyrl_agent.errors import ConfigError
from skyrl_agent.tasks.base import Instance, TaskRowError
from skyrl_agent.tasks.memory import MemoryAgentTask
from skyrl_agent.types import TrajectoryResult

ROW = {
    "question": "What is the code?",
    "golden_answers": ["4711"],
    "context": "\n".join(
        f"Document {n}:\n" + ("The code is 4711. " if n == 2 else "Nothing. ") * 9 for n in range(1, 4)
    ),
}


@pytest.mark.parametrize(
    "grader, answer, expected",
    [
        ("em", "4711", 1.0),
        ("em", "The code is 4711", 0.0),
        ("subem", "The code is 4711", 1.0),
        ("f1", "code 4711", 2 / 3),
    ],
)
async def test_memory_graders(grader, answer, expected):
    task, instance = MemoryAgentTask(grader=grader), Instance(ROW, "i")
    task.check_row(instance)
    judgement = await task.evaluate_result(answer, instance, TrajectoryResult())
    assert judgement.reward == pytest.approx(expected)


@pytest.mark.parametrize("missing", ["question", "golden_answers", "context"])
def test_incomplete_rows_are_reported(missing):
    row = {name: value for name, value in ROW.items() if name != missing}
    with pytest.raises(TaskRowError, match="MemoryAgentTask, instance i: "):
        MemoryAgentTask().check_row(Instance(row, "i"))


def test_unknown_grader_is_rejected():
    with pytest.raises(ConfigError, match=r"task_config\.grader"):
        MemoryAgentTask(grader="exact")


def call(name: str, parameter: str, value: str) -> str:
    return f"<function={name}>\n<parameter={parameter}>{value}</parameter>\n</function>"


async def test_memory_agent_reads_all_sections_before_final_response():
    """One trajectory, a training row for each section and one for the beginning."""
    pytest.importorskip("transformers")
    from skyrl_agent.config.task_file import read_task
    from skyrl_agent.integrations.base import BACKEND_REGISTRY, Backend
    from skyrl_agent.runner import AgentRunner
    from skyrl_agent.testing import ScriptedModel, byte_tokenizer

    tokenizer = byte_tokenizer()
    script = [
        call("next_with_summary", "summary", "I look for a code."),
        call("next_with_summary", "summary", "No code so far."),
        call("next_with_summary", "summary", "The code is 4711."),
        call("next_with_summary", "summary", "The code is 4711, I am sure."),
        call("finish", "answer", "4711"),
    ]
    model = ScriptedModel(tokenizer, script)
    BACKEND_REGISTRY["scripted_memory"] = Backend(
        lambda infer_engine, **_: infer_engine, lambda rows: rows, lambda rows: rows
    )
    task = read_task(
        {
            "task": "skyrl_agent.tasks.memory.MemoryAgentTask",
            "tools": [{"next_with_summary": {"section_chars": 200}}, "finish"],
            "generator": {"infer_backend": "scripted_memory", "max_prompt_length": 8000, "max_iterations": 8},
        }
    )
    try:
        rows = await AgentRunner(task, model, tokenizer).run([ROW])
    finally:
        del BACKEND_REGISTRY["scripted_memory"]
    prompts = [request.prompt for request in model.requests]
    assert "Nothing." not in prompts[0] and "4711" not in prompts[0]
    assert "Section 1 of 3" in prompts[1] and "I look for a code." in prompts[1]
    assert "Section 2 of 3" in prompts[2] and "The code is 4711." in prompts[2] and "Nothing." not in prompts[2]
    assert "Section 3 of 3" in prompts[3] and prompts[3].count("4711") == 1
    assert "All sections have been read" in prompts[4]
    assert all(prompt.count("What is the code?") == 1 and prompt.count("You read a text") == 1 for prompt in prompts)
    assert rows.finish_reasons == ["FINISH_TOOL"] and rows.traj_rewards == [1.0]
    assert rows.episode_nums == [4] and rows.rewards == [1.0] * 4 and rows.is_last_episode == [False] * 3 + [True]

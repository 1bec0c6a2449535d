"""General questions: what an agent is told, and what its answers are worth."""

import json

import pytest

from skyrl_agent.errors import ConfigError, InfraError
from skyrl_agent.tasks.base import Instance, TaskRowError
from skyrl_agent.tasks.general_react.sources import KINDS, SOURCES
from skyrl_agent.tasks.general_react.utils import DummyReactTask, GeneralReactTask
from skyrl_agent.types import TrajectoryResult

from ..tools_general.agent_web_server import completion, web_server

np = pytest.importorskip("numpy")


@pytest.fixture(autouse=True)
def no_environment(monkeypatch):
    for name in ("STEM_LLM_JUDGE_URL", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)


def row(source="math", target="12", prompt="What is 3 * 4?", **fields):
    ground_truth = {"target": target} if not isinstance(target, dict) else target
    return {"data_source": source, "prompt": prompt, "reward_model": {"ground_truth": ground_truth}, **fields}


async def reward(result, task=None, **fields):
    instance = Instance(row(**fields), "i1")
    task = task or GeneralReactTask()
    task.check_row(instance)
    return (await task.evaluate_result(result, instance, TrajectoryResult())).reward


@pytest.mark.parametrize(
    "fields, answer, expected",
    [
        ({}, "\\boxed{12}", 1.0),
        ({}, "<think>\\boxed{1}</think> 12", 1.0),
        ({}, "It is \\boxed{13}", 0.0),
        ({}, None, 0.0),
        ({}, "", 0.0),
        ({"target": 12}, "12", 1.0),
        ({"source": "nq", "target": ["Paris", "Paname"]}, "the Paris", 1.0),
        ({"source": "hotpotqa_dev", "target": np.array(["Paris"], dtype=object)}, "\\boxed{Paris}", 1.0),
        ({"source": "searchR1_nq", "target": ["Paris"]}, "<answer>Paris</answer>", 1.0),
        ({"source": "triviaqa", "target": ["Paris"]}, "Rome", 0.0),
        ({"source": "2WikiMultihopQA", "target": ["no"]}, "No.", 1.0),
    ],
)
async def test_reward_of_response(fields, answer, expected):
    assert await reward(answer, **fields) == expected


@pytest.mark.usefixtures("needs_sandbox")
@pytest.mark.parametrize(
    "tests",
    [
        {"inputs": ["2 3\n"], "outputs": ["5\n"]},
        json.dumps({"tests": [{"input": "2 3", "output": "5"}]}),
        json.dumps({"inputs": ["2 3"], "outputs": ["5"]}),
    ],
)
async def test_programs_are_graded_by_tests(tests):
    program = "a, b = map(int, input().split())\nprint(a + b)"
    fields = {"source": "codegen", "reward_model": {"ground_truth": tests}}
    assert await reward(f"Here:\n```python\n{program}\n```", **fields) == 1.0
    assert await reward(program.replace("+", "-"), **fields) == 0.0


async def test_llm_judge_grades_sources_without_rule():
    def verdict(asked):
        right = "Paris" in asked.body["messages"][0]["content"].split("<student")[1]
        return 200, completion(f"### Final Score: {int(right)}")

    with web_server(verdict) as judge:
        task = GeneralReactTask(judge={"base_url": judge.url, "model": "j"})
        fields = {"source": "browsecomp_plus", "target": "Paris", "prompt": "Answer the given question: Which city?"}
        assert await reward("Paris, I am sure", task, **fields) == 1.0
        assert await reward("Rome", task, **fields) == 0.0
    asked = judge.asked[0].body["messages"][0]["content"]
    assert "Which city?" in asked and "Answer the given question" not in asked and "Paris" in asked


@pytest.mark.parametrize("answer", [(500, "down"), (200, completion("I cannot say")), (401, "no key")])
async def test_unavailable_judge_gives_no_reward(answer):
    with web_server(lambda asked: answer) as judge:
        task = GeneralReactTask(judge={"base_url": judge.url, "max_retries": 0})
        with pytest.raises(InfraError):
            await reward("Paris", task, source="ruler_hotpotqa", target="Paris")


@pytest.mark.parametrize(
    "fields, text",
    [
        ({"source": "mth"}, "math"),
        ({"source": "zzz"}, "'zzz' is unknown; known prefixes"),
        ({"prompt": None}, "raw_prompt"),
        ({"prompt": [{"role": "user"}]}, "must be a text or a list of messages"),
        ({"target": []}, "must hold an accepted answer"),
        ({"target": " "}, "must hold an accepted answer"),
        ({"source": "codegen", "target": {"target": "x"}}, "ground_truth"),
        ({"source": "codegen", "reward_model": {}}, "must contain tests; it is missing"),
        ({"source": "codegen", "target": {"inputs": ["1"], "outputs": []}}, "1 inputs and 0 outputs"),
    ],
)
def test_unusable_rows_are_reported_before_start(fields, text):
    with pytest.raises(TaskRowError, match=text):
        GeneralReactTask().check_row(Instance(row(**fields), "i7"))


def test_missing_judge_is_rejected_unless_environment_variable_is_set(monkeypatch):
    with pytest.raises(ConfigError, match=r"task_config\.judge: .*OPENAI_API_KEY.*STEM_LLM_JUDGE_URL"):
        GeneralReactTask().check_row(Instance(row(source="ruler", target="a"), "i"))
    monkeypatch.setenv("STEM_LLM_JUDGE_URL", "http://127.0.0.1:1/v1/")
    assert GeneralReactTask().judge.url == "http://127.0.0.1:1/v1/"


@pytest.mark.parametrize(
    "settings, text",
    [
        ({"judge": {"modle": "a"}}, "model"),
        ({"judge": {"base_url": "x"}}, "task_config.judge: "),
        ({"sources": {"mine": "maths"}}, "task_config.sources.mine"),
    ],
)
def test_task_file_errors_are_raised_on_construction(settings, text):
    with pytest.raises(ConfigError, match=text):
        GeneralReactTask(**settings)


async def test_sources_have_grader_and_task_file_adds_sources():
    task = GeneralReactTask(sources={"My_Set": "qa_f1"})
    assert await reward("red green", task, source="my_set_v2", target="red blue") == 0.5
    assert set(SOURCES.values()) <= set(KINDS)


PROMPT = [{"role": "user", "content": "Q"}]


@pytest.mark.parametrize("prompt", ["Q", PROMPT, PROMPT[0], np.array(PROMPT, dtype=object)])
@pytest.mark.parametrize("name", ["prompt", "raw_prompt"])
def test_prompt_formats_give_same_instruction(prompt, name):
    given = {k: v for k, v in row().items() if k != "prompt"} | {name: prompt}
    system, user = GeneralReactTask().get_instruction(Instance(given, "i"))
    assert user == PROMPT[0] and system["role"] == "system" and "finish" in system["content"]


def test_row_system_message_is_kept_and_row_unchanged():
    messages = [{"role": "system", "content": "S"}, *PROMPT]
    given = Instance(row(prompt=messages), "i")
    instruction = GeneralReactTask().get_instruction(given)
    assert instruction == messages
    instruction[0]["content"] = "changed"
    assert messages[0]["content"] == "S"
    assert DummyReactTask().get_instruction(Instance(row(prompt=PROMPT), "i")) == PROMPT

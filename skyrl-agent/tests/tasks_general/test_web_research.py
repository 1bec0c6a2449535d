"""Web research: the box, the reference, the judge."""

import json

import pytest

from skyrl_agent.errors import InfraError
from skyrl_agent.tasks.base import Instance, TaskRowError
from skyrl_agent.tasks.verifiers.web_search import stem_llm_judge
from skyrl_agent.tasks.web_research_task import WebResearchTask
from skyrl_agent.types import TrajectoryResult

from ..tools_general.agent_web_server import completion, web_server


@pytest.fixture
def judge():
    def verdict(asked):
        answer = asked.body["messages"][0]["content"].split("<student")[1]
        return 200, completion(f"### Final Score: {int('42' in answer)}")

    with web_server(verdict) as server:
        yield server


async def judged(task, row, result):
    instance = Instance(row, "i")
    task.check_row(instance)
    return (await task.evaluate_result(result, instance, TrajectoryResult())).reward


@pytest.mark.parametrize(
    "row",
    [
        {"Question": "Q?", "answer": "42"},
        {"prompt": {"role": "user", "content": "Q?"}, "instance": {"answer": "42"}},
        {"prompt": "Q?", "extra_info": json.dumps({"reference_answer": "42"})},
        {"prompt": "Q?", "reward_model": json.dumps({"ground_truth": "42"})},
        {"prompt": "Q?", "reward_model": {"ground_truth": {"target": ["42"]}}},
    ],
)
async def test_row_formats_give_same_instruction(row, judge):
    task = WebResearchTask(judge={"base_url": judge.url})
    assert await judged(task, row, "So \\boxed{42 of them}") == 1.0
    assert await judged(task, row, "So \\boxed{41}") == 0.0
    asked = judge.asked[0].body["messages"][0]["content"]
    assert "Q?" in asked and "42 of them" in asked and "So " not in asked


async def test_missing_boxed_answer_skips_judge(judge):
    task, row = WebResearchTask(judge={"base_url": judge.url}), {"prompt": "Q?", "answer": "42"}
    assert [await judged(task, row, result) for result in ("42", "", None, "\\boxed{}")] == [0.0] * 4
    assert not judge.asked


async def test_exact_answers_skip_judge(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    row = {"prompt": "Q?", "answer": "B", "extra_info": {"answer_type": "exactMatch"}}
    assert await judged(WebResearchTask(), row, "\\boxed{b}") == 1.0
    assert await judged(WebResearchTask(), row, "\\boxed{C}") == 0.0


@pytest.mark.parametrize("row, text", [({"prompt": "Q?"}, "instance.answer or answer"), ({"answer": "42"}, "Question")])
def test_ungradable_rows_are_rejected(row, text):
    with pytest.raises(TaskRowError, match=f"WebResearchTask, instance i: .*{text}"):
        WebResearchTask().check_row(Instance(row, "i"))


async def test_outage_gives_no_reward():
    with web_server(lambda asked: (503, "later")) as down:
        task = WebResearchTask(judge={"base_url": down.url, "max_retries": 0})
        with pytest.raises(InfraError):
            await judged(task, {"prompt": "Q?", "answer": "42"}, "\\boxed{42}")


def test_published_compute_score_asks_judge(judge, monkeypatch):
    monkeypatch.setenv("STEM_LLM_JUDGE_URL", f"{judge.url}/v1")
    assert stem_llm_judge.compute_score("hle", "\\boxed{42}", "42", {"question": "Q?"}) == 1.0
    assert judge.asked[0].path == "/v1/chat/completions"
    assert judge.asked[0].body["model"] == "openai/gpt-oss-20b"
    assert stem_llm_judge.compute_score("hle", "42", "42", {}) == 0.0

import asyncio

import pytest

from skyrl_gym.error import InfraError
from skyrl_gym.graders.results import Invalid, Score, Timeout
from skyrl_gym.rubrics import Part, Rubric


def is_correct(answer, ground_truth):
    return answer == ground_truth


def has_answer_tag(completion):
    return 1.0 if "<answer>" in completion else 0.0


def test_total_is_weighted_sum():
    rubric = Rubric({"correct": is_correct, "format": (has_answer_tag, 0.25)}, outcome="correct")
    result = rubric.score(completion="<answer>42</answer>", answer="42", ground_truth="42")
    assert result.total == 1.25
    assert result.parts == {"correct": 1.0, "format": 1.0}
    assert result.metrics() == {"reward/correct": 1.0, "reward/format": 1.0, "outcome_reward": 1.0}

    wrong = rubric.score(completion="<answer>41</answer>", answer="41", ground_truth="42")
    assert (wrong.total, wrong.outcome) == (0.25, 0.0)
    assert Rubric({"correct": is_correct}).score(completion="42", ground_truth="42").total == 1.0  # the default answer
    unasked = Rubric([Part("format", has_answer_tag, 2.0)]).score(completion="<answer>")
    assert unasked.metrics() == {"reward/format": 1.0}  # no outcome


@pytest.mark.parametrize(
    "grade, value", [(Score(0.5), 0.5), (Invalid("no code"), 0.0), (Timeout(3.0), 0.0), (True, 1.0), (2, 2.0)]
)
def test_grades_and_numbers_are_values(grade, value):
    result = Rubric({"part": lambda: grade}).score()
    assert result.total == value
    assert result.grades == {"part": grade}  # kept, for whoever asks why


@pytest.mark.parametrize("broken", ["returned", "raised"])
def test_judge_failure_is_not_scored_zero(broken):
    def judge():
        if broken == "raised":
            raise InfraError("the judge is down")
        return InfraError("the judge is down")

    with pytest.raises(InfraError, match="the judge is down"):
        Rubric({"judged": judge, "format": (has_answer_tag, 0.1)}).score(completion="<answer>")


def test_closed_gate_zeroes_other_parts_without_calling_them():
    asked = []

    def correct(answer):
        asked.append(answer)
        return 1.0

    rubric = Rubric({"correct": correct, "format": (has_answer_tag, 0.1)}, outcome="correct", gate="format")
    closed = rubric.score(completion="42")
    assert (closed.total, closed.parts, asked) == (0.0, {"correct": 0.0, "format": 0.0}, [])
    assert rubric.score(completion="<answer>42").total == pytest.approx(1.1)


def test_async_parts_run_concurrently():
    both_are_here = []

    async def meet(completion):
        both_are_here.append(completion)
        while len(both_are_here) < 2:  # one after the other would wait for ever
            await asyncio.sleep(0)
        return 1.0

    rubric = Rubric({"first": (meet, 1.0), "second": (meet, 2.0), "plain": lambda: 4.0})
    assert rubric.score(completion="x").total == 7.0


def test_async_parts_are_awaited_on_event_loop():
    async def judge(completion):
        await asyncio.sleep(0)
        return 0.5

    async def on_a_loop():
        rubric = Rubric({"judge": judge})
        assert (await rubric.score_async(completion="x")).total == 0.5
        with pytest.raises(RuntimeError, match=r"await rubric\.score_async"):
            rubric.score(completion="x")
        assert Rubric({"plain": lambda: 1.0}).score().total == 1.0  # plain parts need no loop of their own

    asyncio.run(on_a_loop())
    with pytest.raises(TypeError, match="'judge'"):
        Rubric({"judge": lambda: judge("x")}).score()


def test_functions_get_arguments_by_parameter_name():
    seen = {}

    def everything(**arguments):
        seen.update(arguments)
        return 0.0

    def with_default(completion, tolerance=0.5):
        return tolerance

    rubric = Rubric({"all": everything, "default": with_default}, arguments=["num_calls"])
    assert rubric.score(completion="x", extras={"level": 3}, num_calls=2).total == 0.5
    assert seen == {"completion": "x", "answer": "x", "extras": {"level": 3}, "num_calls": 2}


@pytest.mark.parametrize(
    "make, error, text",
    [
        (lambda: Rubric({}), ValueError, "at least one part"),
        (lambda: Rubric([Part("a", is_correct), Part("a", is_correct)]), ValueError, "different names"),
        (lambda: Rubric({"a": is_correct}, outcome="b"), ValueError, "outcome must be one of the parts a; got 'b'"),
        (lambda: Rubric({"a": is_correct}, gate="b"), ValueError, "gate must be one of the parts a"),
        (lambda: Rubric({"a": (is_correct, float("nan"))}), ValueError, "weight of rubric part 'a'"),
        (lambda: Rubric({"a": 1.0}), TypeError, "'a' must be a function"),  # type: ignore[dict-item]
        (lambda: Rubric({"a": lambda grund_truth: 1.0}), TypeError, "grund_truth"),
    ],
)
def test_invalid_parts_are_named_at_construction(make, error, text):
    with pytest.raises(error, match=text):
        make()


def test_mistakes_are_named_when_it_is_used():
    rubric = Rubric({"correct": is_correct})
    with pytest.raises(TypeError, match="ground_truth"):
        rubric.score(completion="42")
    with pytest.raises(TypeError, match="received response"):
        rubric.score(response="42")
    with pytest.raises(TypeError, match=r"'text' .*'good'"):
        Rubric({"text": lambda: "good"}).score()
    with pytest.raises(TypeError, match="'nan'"):
        Rubric({"nan": lambda: float("nan")}).score()

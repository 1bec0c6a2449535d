import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_agent.errors import BackendError
from skyrl_agent.finish import CONTEXT_WINDOW_EXCEEDED
from skyrl_agent.functional.utils import (
    NOT_WRITTEN,
    ContextWindowExceeded,
    NoToolCall,
    Observation,
    StepResult,
    TokensWithLogprobs,
    TrainingDatum,
    Transition,
    record_transition,
    transitions_to_training_data,
)


def turn(read, wrote, logprobs=None, versions=None):
    return Transition(Observation(read), TokensWithLogprobs(wrote, logprobs, weight_versions=versions))


def test_turns_that_go_on_are_one_row():
    turns = [turn([1, 2], [3], [-0.1], [7]), turn([1, 2, 3, 4, 5], [6, 7], [-0.2, -0.3], [7, 8])]
    assert transitions_to_training_data(turns) == [
        TrainingDatum([1, 2], [3, 4, 5, 6, 7], [-0.1, 0.0, 0.0, -0.2, -0.3], [1, 0, 0, 1, 1], [7, -1, -1, 7, 8])
    ]


def test_a_turn_that_read_something_else_begins_a_row():
    turns = [turn([1, 2], [3]), turn([1, 9], [3]), turn([1, 9, 3], [4])]
    assert transitions_to_training_data(turns) == [
        TrainingDatum([1, 2], [3], None, [1]),
        TrainingDatum([1, 9], [3, 4], None, [1, 1]),
    ]


def test_a_log_prob_that_is_missing_is_not_made_up():
    turns = [turn([1], [2], [-0.1], [0]), turn([1, 2, 3], [4], None, None)]
    (row,) = transitions_to_training_data(turns)
    assert row.response_logprobs is None and row.weight_versions is None


def test_the_response_begins_where_the_model_was_first_to_write_even_if_it_wrote_nothing():
    turns = [turn([1, 2], []), turn([1, 2, 3, 4], [5], [-0.5])]
    assert transitions_to_training_data(turns) == [TrainingDatum([1, 2], [3, 4, 5], [0.0, 0.0, -0.5], [0, 0, 1])]


def test_a_row_without_a_written_token_is_left_out():
    assert transitions_to_training_data([]) == []
    assert transitions_to_training_data([turn([1], []), turn([2], []), turn([3], [4])]) == [
        TrainingDatum([3], [4], None, [1])
    ]


@pytest.mark.parametrize(
    "bad, message",
    [
        (turn([1], None), "transition 1 has no token ids"),
        (turn([1], [2, 3], [-0.1]), "transition 1 has 1 logprobs for 2 tokens"),
        (turn([1], [2], None, [1, 2]), "transition 1 has 2 weight_versions for 1 tokens"),
    ],
)
def test_what_cannot_be_trained_on_is_named(bad, message):
    with pytest.raises(ValueError, match=message):
        transitions_to_training_data([turn([1], [2]), bad])


tokens = st.lists(st.integers(0, 3), max_size=4)


@st.composite
def trajectories(draw):
    """Turns that go on from the one before, or not."""
    turns, sequence = [], []
    for _ in range(draw(st.integers(0, 6))):
        read = [*(sequence if draw(st.booleans()) else []), *draw(tokens)]
        wrote = draw(tokens)
        logprobs = draw(st.none() | st.just([-1.0 - t for t in wrote]))
        turns.append(turn(read, wrote, logprobs, [t + 1 for t in wrote]))
        sequence = [*read, *wrote]
    return turns


@given(trajectories())
@settings(deadline=None)
def test_merging_loses_and_invents_nothing(turns):
    rows = transitions_to_training_data(turns)
    written = [token for t in turns for token in t.ac.token_ids]
    assert [t for row in rows for t, m in zip(row.response_tokens, row.response_mask, strict=True) if m] == written
    for row in rows:
        assert len(row.response_tokens) == len(row.response_mask) and any(row.response_mask)
        sequence = [*row.input_tokens, *row.response_tokens]
        mine = [t for t in turns if sequence[: len(t.ob.input_ids)] == t.ob.input_ids]
        assert mine
        assert row.weight_versions is not None
        for token, mask, version in zip(row.response_tokens, row.response_mask, row.weight_versions, strict=True):
            assert version == (token + 1 if mask else NOT_WRITTEN)
        if row.response_logprobs is not None:
            told = [-1.0 - t if m else 0.0 for t, m in zip(row.response_tokens, row.response_mask, strict=True)]
            assert row.response_logprobs == told
    if all(t.ac.logprobs is not None for t in turns):
        assert all(row.response_logprobs is not None for row in rows)


class Model:
    def __init__(self, answers):
        self.transitions, self.answers = [], iter(answers)

    @record_transition
    async def ask(self, *, input_ids):
        answer = next(self.answers)
        if isinstance(answer, Exception):
            raise answer
        return answer


async def test_each_answer_is_recorded_and_a_failure_is_not():
    told = {"output_tokens": [4], "finish_reason": "stop", "logprobs": [-0.5], "weight_versions": [3]}
    model = Model([("a", told), OSError(), ("b", {"output_tokens": None, "finish_reason": "length", "logprobs": None})])
    read = [1, 2]
    assert await model.ask(input_ids=read) == ("a", told)
    read.append(4)  # the caller goes on with its list
    with pytest.raises(OSError):
        await model.ask(input_ids=read)
    await model.ask(input_ids=read)
    assert model.transitions == [
        Transition(Observation([1, 2]), TokensWithLogprobs([4], [-0.5], "a", [3]), metrics={"finish_reason": "stop"}),
        Transition(Observation([1, 2, 4]), TokensWithLogprobs(None, None, "b"), metrics={"finish_reason": "length"}),
    ]


async def test_answers_that_cannot_be_recorded():
    model = Model([("a", {"output_tokens": [4], "finish_reason": "stop", "logprobs": [-0.5, -0.5]})])
    with pytest.raises(TypeError, match="keyword input_ids"):
        await model.ask([1])
    with pytest.raises(BackendError, match="told 2 log-probs for 1 tokens"):
        await model.ask(input_ids=[1])


def test_log_probs_that_are_told_in_part_are_none():
    written = TokensWithLogprobs.of_answer("ab", {"output_tokens": [1, 2], "logprobs": [None, -0.5]})
    assert written.logprobs is None


def test_how_a_step_ends():
    assert StepResult.continuing("x").to_tuple() == (False, None, "x")
    assert ContextWindowExceeded().step_result == StepResult.finished(CONTEXT_WINDOW_EXCEEDED)
    assert not NoToolCall().step_result.done

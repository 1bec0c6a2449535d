import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_agent.chat.transitions import (
    NO_VERSION,
    Observation,
    TokensWithLogprobs,
    TrainingDatum,
    Transition,
    transitions_to_training_data,
)


def turn(read, wrote, logprobs=None, versions=None):
    return Transition(Observation(read), TokensWithLogprobs(wrote, logprobs, weight_versions=versions))


GOES_ON = [turn([1, 2], [3], [-0.1], [7]), turn([1, 2, 3, 4, 5], [6, 7], [-0.2, -0.3], [7, 8])]


@pytest.mark.parametrize(
    "turns, rows",
    [
        ([], []),
        (GOES_ON, [([1, 2], [3, 4, 5, 6, 7], [-0.1, 0.0, 0.0, -0.2, -0.3], [1, 0, 0, 1, 1], [7, -1, -1, 7, 8])]),
        # One that read something else begins a row.
        (
            [turn([1, 2], [3]), turn([1, 9], [3]), turn([1, 9, 3], [4])],
            [([1, 2], [3], None, [1]), ([1, 9], [3, 4], None, [1, 1])],
        ),
        # What is missing is not made up.
        ([turn([1], [2], [-0.1], [0]), turn([1, 2, 3], [4], None, None)], [([1], [2, 3, 4], None, [1, 0, 1])]),
        # The response begins where the model was first to write, even if it wrote nothing.
        ([turn([1, 2], []), turn([1, 2, 3, 4], [5], [-0.5])], [([1, 2], [3, 4, 5], [0.0, 0.0, -0.5], [0, 0, 1])]),
        ([turn([1], []), turn([2], []), turn([3], [4])], [([3], [4], None, [1])]),  # rows of no written token go
    ],
)
def test_appending_turns_are_merged_into_one_row(turns, rows):
    assert transitions_to_training_data(turns) == [TrainingDatum(*row) for row in rows]


@pytest.mark.parametrize(
    "bad, message",
    [
        (turn([1], None), "transition 1 has no token ids"),
        (turn([1], [2, 3], [-0.1]), "transition 1 has 1 logprobs for 2 tokens"),
        (turn([1], [2], None, [1, 2]), "weight_versions"),
    ],
)
def test_malformed_transitions_are_reported(bad, message):
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
def test_merging_preserves_all_tokens(turns):
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
            assert version == (token + 1 if mask else NO_VERSION)
        if row.response_logprobs is not None:
            told = [-1.0 - t if m else 0.0 for t, m in zip(row.response_tokens, row.response_mask, strict=True)]
            assert row.response_logprobs == told
    if all(t.ac.logprobs is not None for t in turns):
        assert all(row.response_logprobs is not None for row in rows)


def test_partial_log_probs_become_null():
    written = TokensWithLogprobs.from_reply("ab", {"output_tokens": [1, 2], "logprobs": [None, -0.5]})
    assert written.logprobs is None

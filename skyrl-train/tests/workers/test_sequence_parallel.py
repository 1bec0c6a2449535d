"""Ranks that share sequences (and groups of them that share the batch) learn what one process does."""

import pytest
import torch


def steps_of(learners, config, batch, kind, layouts, **settings):
    """The same step on so many ranks, of which so many share each sequence."""
    return [
        learners.step(kind, config(**{kind: dict(sequence_parallel_size=size)}, **settings), batch, num_ranks)
        for num_ranks, size in layouts
    ]


def assert_same_steps(expected, others, batch):
    kept = batch.tensor("loss_mask") > 0
    assert expected.grad_norm > 0.01
    for step in others:
        assert step.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
        torch.testing.assert_close(step.before[kept], expected.before[kept], atol=1e-5, rtol=0)
        assert step.sums == {name: pytest.approx(value, rel=1e-5, abs=1e-5) for name, value in expected.sums.items()}
        for name, weight in expected.weights.items():
            # The first Adam step is lr * sign(g) where g is not tiny: compare what is not at that edge.
            assert (step.weights[name] - weight).abs().median() < 1e-5, name


@pytest.mark.parametrize("kind", ["policy", pytest.param("critic", marks=pytest.mark.full)])
def test_sequence_parallel_step_equals_data_parallel_step(learners, config, ragged_batch, kind):
    batch = ragged_batch()
    expected, *others = steps_of(learners, config, batch, kind, [(1, 1), (2, 1), (2, 2)])
    assert_same_steps(expected, others, batch)


@pytest.mark.full
def test_two_shards_of_two_ranks_take_same_step(learners, config, ragged_batch):
    """Two ranks (the number of key-value heads) share a sequence. 13 rows do not divide over 2 data-parallel ranks, 3
    rows of a micro-batch not evenly into 13, and the tokens of most micro-batches not over 2 ranks."""
    batch = ragged_batch(13)
    expected, *others = steps_of(learners, config, batch, "policy", [(1, 1), (4, 2)], micro_size=3)
    assert_same_steps(expected, others, batch)


@pytest.mark.parametrize("num_rows", [1, 3])
def test_single_row_of_odd_length_is_sharded(learners, config, ragged_batch, num_rows):
    batch = ragged_batch(num_rows)
    assert int(batch.tensor("attention_mask")[0].sum()) == 8 and int(batch.tensor("attention_mask").sum()) % 2 == 0
    batch["attention_mask"][0, 0] = 0  # 7 tokens
    expected, *others = steps_of(learners, config, batch, "policy", [(1, 1), (2, 2)], micro_size=1)
    assert_same_steps(expected, others, batch)


def test_mini_batch_level_loss_sees_each_row_once(learners, config, ragged_batch):
    batch = ragged_batch(columns=["token_noise", "shift"])
    batch["token_noise"] = batch.tensor("token_noise").sigmoid()
    batch["shift"] = batch.tensor("shift") / 5
    settings = dict(algorithm=dict(policy_loss_type="kl_cov"))
    expected, *others = steps_of(learners, config, batch, "policy", [(1, 1), (2, 2)], **settings)
    assert_same_steps(expected, others, batch)
    assert expected.selected.sum() > 0
    assert torch.equal(others[0].selected, expected.selected)

"""Log-probs over kept tokens, and the step on them, do not depend on ranks, micro-batches and packing."""

from typing import Any

import pytest
import torch

from skyrl_train.kept_tokens import KeptTokens, pad_kept_tokens
from skyrl_train.training_batch import TrainingInputBatch


def with_kept_tokens(batch: TrainingInputBatch) -> TrainingInputBatch:
    """Add sets of 1 to 6 tokens, the response's own among them; none for tokens of the environment."""
    generator = torch.Generator().manual_seed(1)
    num_response = batch.metadata["response_length"]
    rows = []
    for tokens, mask in zip(batch.tensor("sequences")[:, -num_response:], batch.tensor("loss_mask"), strict=True):
        sets = [{int(token), *torch.randint(64, (5,), generator=generator).tolist()} for token in tokens]
        kept = [sorted(each) if trains else [] for each, trains in zip(sets, mask.tolist(), strict=True)]
        rows.append(KeptTokens.of([torch.tensor(each, dtype=torch.int32).numpy() for each in kept]))
    full = TrainingInputBatch(dict(batch), metadata=batch.metadata)
    full["kept_counts"], full["kept_ids"] = pad_kept_tokens(rows, num_response)
    return full


LAYOUTS = [(1, 1, 3, True), (1, 1, 4, False), (2, 1, 2, True), (2, 1, 16, False), (2, 2, 4, True)]
"""Ranks, ranks that share a sequence, rows of a micro-batch, packing. Compared with one micro-batch on one rank."""


@pytest.mark.first_case
@pytest.mark.parametrize(
    "loss, layouts", [("regular", LAYOUTS), ("clip_cov", [(2, 1, 2, True)])], ids=["regular", "with a selector"]
)
def test_step_on_kept_tokens_is_independent_of_split(
    learners: Any, config: Any, ragged_batch: Any, loss: str, layouts: list[tuple[int, int, int, bool]]
):
    batch = with_kept_tokens(ragged_batch(13))  # no whole number of rows or tokens a rank

    def step_of(num_ranks: int, shared: int, micro_size: int, packing: bool) -> Any:
        cfg = config(
            micro_size,
            {"sequence_parallel_size": shared},
            algorithm={"policy_loss_type": loss},
            use_sample_packing=packing,
        )
        return learners.step("policy", cfg, batch, num_ranks)

    expected = step_of(1, 1, 13, True)
    trains = batch.tensor("loss_mask") > 0
    # Random weights: a token of six has about log 1/6, of one exactly 0; over 64 tokens it would be about log 1/64.
    assert -2.5 < expected.before[trains].mean() < -1.2
    assert expected.sums["max/ratio_deviation"] == 0
    assert 1.2 < expected.sums["token/policy_entropy"] / expected.sums["num_tokens"] < 1.8
    for layout in layouts:
        step = step_of(*layout)
        torch.testing.assert_close(step.before[trains], expected.before[trains], atol=1e-5, rtol=0)
        assert step.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
        for name, value in expected.sums.items():
            assert step.sums[name] == pytest.approx(value, rel=1e-5, abs=1e-5), name
        for name, weight in expected.weights.items():
            torch.testing.assert_close(step.weights[name], weight, atol=2e-4, rtol=0)

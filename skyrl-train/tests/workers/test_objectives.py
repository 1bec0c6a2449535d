"""Objectives are pure functions of scores and a micro-batch: every part of a loss by hand, without a model."""

import math
from typing import Any

import pytest
import torch

from skyrl_train.algorithms.losses import PolicyLossRegistry
from skyrl_train.config import SkyRLConfig
from skyrl_train.models.experts import RouterStatistics, compute_auxiliary_loss
from skyrl_train.training_backends.base import ParallelInfo, Scores, build_dummy, merge_metric_sums
from skyrl_train.training_batch import TrainingInputBatch
from skyrl_train.workers.objectives.critic import CriticObjective
from skyrl_train.workers.objectives.policy import PolicyObjective
from skyrl_train.workers.policy_worker import sum_over_ranks

MASK = torch.tensor([[1.0, 1.0, 0.0]])
WEIGHTS = torch.tensor([[0.5, 0.25, 0.0]])
LOG_PROBS = torch.tensor([[-1.0, -2.0, math.nan]])
OLD = torch.tensor([[-1.0, -2.0 - math.log(2.0), math.nan]])
"""Ratios 1 and 2, the latter clipped to 1.2."""
ENTROPY = torch.tensor([[0.5, 2.0, math.nan]])


def policy_objective(loss: str = "regular", **algorithm: Any) -> PolicyObjective:
    values = {"use_kl_loss": False, "policy_loss_type": loss, **algorithm}
    cfg = SkyRLConfig.from_dict({"trainer": {"algorithm": values}})
    return PolicyObjective(cfg.trainer.algorithm, PolicyLossRegistry.get(loss))


def micro_batch(**columns: torch.Tensor | None) -> TrainingInputBatch:
    given = dict(action_log_probs=OLD, advantages=torch.tensor([[2.0, -1.0, math.nan]]))
    return TrainingInputBatch({"loss_mask": MASK, "loss_weights": WEIGHTS, **given, **columns})


def test_policy_loss_is_weighted_sum_over_masked_tokens():
    """Tokens: -1 x 2 = -2, and -min(2 x -1, 1.2 x -1) = 2. Loss: 0.5 x -2 + 0.25 x 2."""
    loss, sums = policy_objective()(Scores(LOG_PROBS, ENTROPY), micro_batch())
    assert loss.item() == pytest.approx(-0.5)
    assert sums["loss/policy_loss"] == sums["loss/final_loss"] == pytest.approx(-0.5)
    assert (sums["num_tokens"], sums["token/policy_entropy"]) == (2.0, 2.5)
    assert sums["max/ratio_deviation"] == pytest.approx(1.0)


def test_off_policy_weights_multiply_only_policy_loss():
    """0.5 x 3 x -2 + 0.25 x 0.5 x 2 = -2.75; entropy -0.1 x (0.5 x 0.5 + 0.25 x 2) = -0.075."""
    objective = policy_objective(use_entropy_loss=True, entropy_loss_coef=0.1)
    weights = torch.tensor([[3.0, 0.5, math.nan]])
    loss, sums = objective(Scores(LOG_PROBS, ENTROPY), micro_batch(off_policy_weights=weights))
    assert sums["loss/policy_loss"] == pytest.approx(-2.75)
    assert sums["loss/entropy_loss"] == pytest.approx(-0.075)
    assert loss.item() == pytest.approx(-2.825)


def test_kl_term_is_estimate_times_coefficient():
    """k1: log-prob minus the reference's, 1 and -1. Loss 0.2 x (0.5 x 1 + 0.25 x -1) = 0.05."""
    base = torch.tensor([[-2.0, -1.0, math.nan]])
    kl = dict(use_kl_loss=True, kl_loss_coef=0.2, kl_estimator_type="k1")
    loss, sums = policy_objective(**kl)(Scores(LOG_PROBS, ENTROPY), micro_batch(base_action_log_probs=base))
    assert sums["loss/kl_loss"] == pytest.approx(0.05)
    assert sums["token/policy_kl"] == pytest.approx(0.0)
    assert loss.item() == pytest.approx(-0.5 + 0.05)
    without, _ = policy_objective()(Scores(LOG_PROBS, ENTROPY), micro_batch(base_action_log_probs=base))
    assert without.item() == pytest.approx(-0.5)


def test_missing_old_log_probs_give_ratio_1_and_policy_gradient():
    """d loss / d log-prob = -weight x advantage: -0.5 x 2 and -0.25 x -1."""
    log_probs = LOG_PROBS.clone().requires_grad_()
    loss, sums = policy_objective()(Scores(log_probs, ENTROPY), micro_batch(action_log_probs=None))
    loss.backward()
    assert sums["max/ratio_deviation"] == 0.0
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == [[pytest.approx(-1.0), pytest.approx(0.25), 0.0]]


def test_dummy_micro_batch_contributes_zero():
    dummy = build_dummy(micro_batch())
    assert dummy.tensor("loss_mask").sum() == dummy.tensor("loss_weights").sum() == 0
    loss, sums = policy_objective()(Scores(LOG_PROBS, ENTROPY), dummy)
    assert loss.item() == 0.0
    assert all(value == 0.0 for value in sums.values()), sums


def test_critic_loss_is_half_squared_error():
    """Errors 1 and -2: 0.5 x 1/2 + 0.25 x 4/2 = 0.75."""
    cfg = SkyRLConfig.from_dict({"trainer": {"algorithm": {"value_clip": 100.0}}})
    values = torch.tensor([[1.0, 0.0, math.nan]])
    batch = TrainingInputBatch(
        loss_mask=MASK,
        critic_loss_weights=WEIGHTS,
        values=values,
        returns=torch.tensor([[0.0, 2.0, math.nan]]),
    )
    loss, sums = CriticObjective(cfg.trainer.algorithm)(Scores(values), batch)
    assert loss.item() == sums["loss/critic_loss"] == pytest.approx(0.75)
    assert (sums["token/values"], sums["num_tokens"]) == (1.0, 2.0)


def test_router_statistics_cover_rank_rows_without_dummies():
    """Two experts, one layer, 4 tokens, all sent to the first with probability 0.75: 2 x (1 x 0.75) = 1.5."""
    own = RouterStatistics(torch.tensor([[4.0, 0.0]]), torch.tensor([[3.0, 1.0]]), 4)
    whole = sum_over_ranks(own + own.build_zeros(), ParallelInfo())
    assert (compute_auxiliary_loss(whole), whole.num_tokens) == (pytest.approx(1.5), 4)


def test_data_parallel_ranks_are_groups_of_consecutive_ranks():
    infos = [ParallelInfo(rank=rank, world_size=6, ranks_per_replica=2) for rank in range(6)]
    assert [info.data_parallel_rank for info in infos] == [0, 0, 1, 1, 2, 2]
    assert {info.data_parallel_size for info in infos} == {3}


def test_metric_sums_are_added_and_maxima_propagate_nan():
    parts = [{"token/a": 1.0, "max/b": 3.0}, {"token/a": 2.0, "max/b": -1.0, "loss/c": 4.0}]
    assert merge_metric_sums(parts) == {"token/a": 3.0, "max/b": 3.0, "loss/c": 4.0}
    merged = merge_metric_sums([{"max/b": math.nan}, {"max/b": 1.0}])
    assert math.isnan(merged["max/b"])

"""Sums of shards and steps become the numbers of a training step."""

import math

import pytest
from loguru import logger

from skyrl_train.orchestration.step_metrics import first_ratio_metrics, step_metrics


def test_losses_are_summed_over_shards_and_token_metrics_averaged():
    first = [
        {"loss/final_loss": 0.25, "token/policy_entropy": 3.0, "token/clip_ratio": 1.0, "num_tokens": 3.0},
        {"loss/final_loss": 0.5, "token/policy_entropy": 1.0, "token/clip_ratio": 0.0, "num_tokens": 1.0},
    ]
    second = [{"loss/final_loss": 0.25, "token/policy_entropy": 0.0, "token/clip_ratio": 0.0, "num_tokens": 0.0}] * 2
    metrics = step_metrics("policy", [first, second], [{"grad_norm": 1.0}, {"grad_norm": 3.0}])
    assert metrics["policy/final_loss"] == pytest.approx((0.75 + 0.5) / 2)
    assert metrics["policy/policy_entropy"] == pytest.approx((1.0 + 0.0) / 2)
    assert metrics["policy/loss_metrics/clip_ratio"] == pytest.approx((0.25 + 0.0) / 2)
    assert metrics["policy/grad_norm"] == 2.0


def test_critic_metrics_have_published_names():
    sums = [[{"loss/critic_loss": 0.5, "token/values": 2.0, "token/values_clipfrac": 1.0, "num_tokens": 4.0}]]
    metrics = step_metrics("critic", sums, [{"grad_norm": 1.0, "critic_lr": 1e-5}])
    assert metrics == {
        "critic/critic_loss": 0.5,
        "critic/values_mean": 0.5,
        "critic/values_clipfrac": 0.25,
        "critic/grad_norm": 1.0,
        "critic/critic_lr": 1e-5,
    }


def test_maxima_are_taken_over_shards_and_steps():
    steps = [[{"max/ratio_deviation": 0.1}, {"max/ratio_deviation": 0.3}], [{"max/ratio_deviation": 0.2}] * 2]
    assert step_metrics("policy", steps, [])["policy/ratio_deviation_max"] == 0.3


@pytest.mark.parametrize("deviation, alarms", [(0.0, 0), (1e-4, 0), (2e-4, 1), (math.inf, 1), (math.nan, 1)], ids=str)
def test_first_ratio_other_than_1_raises_alarm(deviation: float, alarms: int):
    said: list[str] = []
    sink = logger.add(said.append, format="{message}")
    try:
        metrics = first_ratio_metrics([{"max/ratio_deviation": 0.0}, {"max/ratio_deviation": deviation}], 1e-4)
    finally:
        logger.remove(sink)
    assert metrics["policy/ratio_alarms"] == alarms
    assert metrics["policy/first_ratio_max_deviation"] == (math.inf if math.isnan(deviation) else deviation)
    assert ("first_ratio_tolerance=0.0001" in "".join(said)) == bool(alarms)

"""Advice during asynchronous training: predicted utilisation, and a setting for the side that idles."""

import re

import pytest

from skyrl_train.rollouts.advice import Adviser
from skyrl_train.rollouts.groups import FinishedGroup
from skyrl_train.rollouts.schedule import ScheduleLimits
from skyrl_train.rollouts.types import TrajectoryGroup


def adviser(max_running: int, group_seconds: float, step_seconds: float, stale: float = 0.0) -> Adviser:
    limits = ScheduleLimits(
        groups_per_step=2, max_staleness_steps=2, max_running=max_running, groups_per_epoch=200, total_steps=100
    )
    adviser = Adviser(limits)
    groups = [
        FinishedGroup(ticket=i, group=TrajectoryGroup("a", []), metrics={}, version=0, seconds=group_seconds)
        for i in range(2)
    ]
    adviser.measured(groups, step_seconds, sync_seconds=0.0, stale_token_share=stale)
    return adviser


@pytest.mark.parametrize(
    ("max_running", "group_seconds", "utilisation"),
    [(6, 0.5, 1.0), (6, 12.0, 0.25), (2, 3.0, 0.33), (6, 3.0, 0.72)],
    ids=["training is slower", "generation is slower", "too few groups", "a slot is free only after a sync"],
)
def test_predicted_utilisation_is_that_of_the_slower_side(max_running: int, group_seconds: float, utilisation: float):
    """A step of 1 s trains 2 groups; `max_running` groups run at once, a group takes `group_seconds`."""
    predicted = adviser(max_running, group_seconds, step_seconds=1.0).predicted()
    assert predicted["async/predicted_trainer_utilisation"] == pytest.approx(utilisation, abs=0.1)


@pytest.mark.parametrize(
    ("max_running", "trainer", "slots", "setting"),
    [
        (6, 1.0, 1.0, "both sides are busy"),
        (6, 1.0, 0.2, "give some of their GPUs to training"),
        (6, 0.3, 0.4, "raise trainer.fully_async.max_staleness_steps"),
        (3, 0.3, 1.0, r"num_parallel_generation_workers \(at most 6\)"),
        (6, 0.3, 1.0, "add engines, or raise trainer.fully_async.max_staleness_steps"),
    ],
)
def test_advice_names_the_setting_for_the_idle_side(max_running: int, trainer: float, slots: float, setting: str):
    metrics = {
        "async/trainer_utilisation": trainer,
        "async/slot_utilisation": slots,
        "async/predicted_trainer_utilisation": 0.5,
    }
    assert re.search(setting, adviser(max_running, 1.0, 1.0).advice(metrics))


@pytest.mark.parametrize(("sample_size", "is_warned"), [(None, False), (0.95, False), (0.6, True)])
def test_advice_warns_of_a_policy_that_has_left_the_one_that_generated(sample_size: float | None, is_warned: bool):
    names = ("trainer_utilisation", "slot_utilisation", "predicted_trainer_utilisation")
    metrics: dict[str, float | None] = {f"async/{name}": 1.0 for name in names}
    metrics["policy/rollout_train_ess"] = sample_size
    advice = adviser(6, 1.0, 1.0).advice(metrics)
    assert ("lower trainer.fully_async.max_staleness_steps, the learning rate" in advice) == is_warned


@pytest.mark.parametrize(("shares", "warning"), [([0.0, 0.08], None), ([0.04, 0.08], "6% of the generated tokens")])
def test_advice_warns_of_tokens_that_are_too_old_to_be_trained(shares: list[float], warning: str | None):
    """The mean over the last steps decides, not the last step alone."""
    one = adviser(6, 1.0, 1.0, stale=shares[0])
    one.measured([], 1.0, 0.0, stale_token_share=shares[1])
    metrics = {f"async/{name}": 1.0 for name in ("trainer_utilisation", "slot_utilisation")}
    advice = one.advice(metrics | {"async/predicted_trainer_utilisation": 1.0})
    assert ("set on_stale=regenerate or order=exact" in advice) == (warning is not None)
    assert warning is None or warning in advice

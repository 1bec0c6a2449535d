"""Advice during asynchronous training: predicted utilisation, and a setting for the side that idles."""

import re

import pytest

from skyrl_inspect.simulate.advice import Adviser
from skyrl_train.rollouts.groups import FinishedGroup
from skyrl_train.rollouts.schedule import ScheduleLimits
from skyrl_train.rollouts.types import TrajectoryGroup

PREDICTED = {"async/predicted_trainer_utilisation": 0.5}
BUSY = {"async/trainer_utilisation": 1.0, "async/slot_utilisation": 1.0}


def adviser(max_running: int, group_seconds: float, step_seconds: float, **metrics: float | None) -> Adviser:
    limits = ScheduleLimits(
        groups_per_step=2, max_staleness_steps=2, max_running=max_running, groups_per_epoch=200, total_steps=100
    )
    adviser = Adviser(limits)
    groups = [
        FinishedGroup(ticket=i, group=TrajectoryGroup("a", []), metrics={}, version=0, seconds=group_seconds)
        for i in range(2)
    ]
    adviser.record(groups, step_seconds, sync_seconds=0.0, waited_seconds=0.0, metrics=metrics)
    return adviser


@pytest.mark.parametrize(
    ("max_running", "group_seconds", "utilisation"),
    [(6, 0.5, 1.0), (6, 12.0, 0.25), (2, 3.0, 0.33), (6, 3.0, 0.72)],
    ids=["training is slower", "generation is slower", "too few groups", "a slot is free only after a sync"],
)
def test_predicted_utilisation_follows_slower_side(max_running: int, group_seconds: float, utilisation: float):
    """A step of 1 s trains 2 groups; `max_running` groups run at once, a group takes `group_seconds`."""
    predicted = adviser(max_running, group_seconds, step_seconds=1.0).predict()
    assert predicted["async/predicted_trainer_utilisation"] == pytest.approx(utilisation, abs=0.1)


@pytest.mark.parametrize(
    ("max_running", "trainer", "slots", "setting"),
    [
        (6, 1.0, 1.0, "both sides are busy"),
        (6, 1.0, 0.2, "move some of their GPUs to training"),
        (6, 0.3, 0.4, "raise trainer.fully_async.max_staleness_steps"),
        (3, 0.3, 1.0, r"num_parallel_generation_workers \(at most 6\)"),
        (6, 0.3, 1.0, "add engines, or raise trainer.fully_async.max_staleness_steps"),
    ],
)
def test_advice_names_setting_for_idle_side(max_running: int, trainer: float, slots: float, setting: str):
    one = adviser(max_running, 1.0, 1.0, **{"async/trainer_utilisation": trainer, "async/slot_utilisation": slots})
    assert re.search(setting, one.advise(PREDICTED))


def test_advice_uses_window_average_not_last_step():
    """Nine steps of 4 s, busy for 1 s of them, and a last one that waits for nothing: busy 26 % of the time."""
    one = adviser(3, 1.0, 1.0, **BUSY)
    for _ in range(9):
        idle = {"async/trainer_utilisation": 0.25, "async/slot_utilisation": 1.0}
        one.record([], 1.0, 0.0, waited_seconds=3.0, metrics=idle)
    one.record([], 0.5, 0.0, waited_seconds=0.0, metrics=BUSY)
    advice = one.advise(PREDICTED)
    assert "trainer busy 26% of the last 10 steps" in advice and "num_parallel_generation_workers" in advice


@pytest.mark.parametrize(("sample_size", "is_warned"), [(None, False), (0.95, False), (0.6, True)])
def test_advice_warns_when_policy_diverges_from_sampling_policy(sample_size: float | None, is_warned: bool):
    advice = adviser(6, 1.0, 1.0, **BUSY, **{"policy/rollout_train_ess": sample_size}).advise(PREDICTED)
    assert ("lower trainer.fully_async.max_staleness_steps, the learning rate" in advice) == is_warned


@pytest.mark.parametrize(("shares", "warning"), [([0.0, 0.08], None), ([0.04, 0.08], "6% of the generated tokens")])
def test_advice_warns_of_stale_tokens(shares: list[float], warning: str | None):
    """The mean over the last steps decides, not the last step alone."""
    name = "async/stale_token_share"
    one = adviser(6, 1.0, 1.0, **BUSY, **{name: shares[0]})
    one.record([], 1.0, 0.0, waited_seconds=0.0, metrics=BUSY | {name: shares[1]})
    advice = one.advise(PREDICTED)
    assert ("set on_stale=regenerate or order=exact" in advice) == (warning is not None)
    assert warning is None or warning in advice

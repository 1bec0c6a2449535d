"""Simulation in virtual time: durations that can be computed by hand."""

import pytest

from skyrl_inspect.simulate.simulator import Costs, SampleCost, SimulatedRun, Simulation
from skyrl_inspect.simulate.workloads import compute_between_fraction
from skyrl_train.rollouts.schedule import OnStale, ScheduleLimits


def limits(**changes) -> ScheduleLimits:
    given = {
        "groups_per_step": 2,
        "max_staleness_steps": 0,
        "max_running": 2,
        "groups_per_epoch": 10,
        "total_steps": 10,
    }
    return ScheduleLimits(**{**given, "order": "exact", **changes})


def costs(**changes) -> Costs:
    return Costs(
        **{"num_engines": 1, "seconds_per_iteration": 0.5, "step_seconds": 3.0, "sync_seconds": 1.0, **changes}
    )


GROUP = [SampleCost(4), SampleCost(8)]


def test_synchronous_step_is_longest_sample_plus_training_and_sync():
    run = Simulation(limits(), [GROUP], costs()).simulate()
    assert run.seconds == pytest.approx(10 * (8 * 0.5 + 3 + 1))
    assert run.num_samples == [4] * 10
    assert run.samples_per_second == pytest.approx(4 / 8)
    assert (run.trainer_utilisation, run.engine_utilisation) == pytest.approx((3 / 8, 4 / 8))
    assert run.ages == {0: 20}
    assert (run.trainer_wait_seconds, run.queue_seconds) == pytest.approx((8 * 0.5, 0))


def test_in_order_simulation_uses_measured_groups():
    groups = [[SampleCost(1, wait_seconds=float(i))] for i in range(20)]
    run = Simulation(limits(), groups, costs(), in_order=True).simulate()
    assert run.seconds == pytest.approx(sum(2 * step + 1 for step in range(10)) + 10 * (0.5 + 3 + 1))


def test_sync_cost_is_paid_at_sync_interval():
    """The second of two steps that hold the groups of two versions finds its groups finished."""
    schedule = limits(max_staleness_steps=1, max_running=4)
    run = Simulation(schedule, [GROUP], costs(), sync_every_steps=2).simulate()
    assert run.seconds == pytest.approx(5 * (8 * 0.5 + 3 + 3 + 1))


def test_iteration_is_slower_with_more_sequences():
    run = Simulation(limits(), [GROUP], costs(seconds_per_sequence=0.25)).simulate()
    # four sequences for four tokens, then two for four more
    assert run.seconds == pytest.approx(10 * (4 * (0.5 + 4 * 0.25) + 4 * (0.5 + 2 * 0.25) + 3 + 1))


def test_sequences_over_engine_limit_wait():
    run = Simulation(limits(), [GROUP], costs(max_sequences=1)).simulate()
    assert run.seconds == pytest.approx(10 * (24 * 0.5 + 3 + 1))


def test_environment_wait_does_not_occupy_engine():
    group = [SampleCost(4, wait_seconds=10.0), SampleCost(8)]
    run = Simulation(limits(), [group], costs()).simulate()
    assert run.seconds == pytest.approx(10 * (4 * 0.5 + 10 + 3 + 1))


def test_generating_ahead_hides_shorter_side():
    """Generating a step's groups takes 4 s, training 3 s, the sync 1 s: in the long run generating and syncs remain."""
    run = Simulation(limits(max_staleness_steps=1, max_running=2, total_steps=200), [GROUP], costs()).simulate()
    assert run.seconds / 200 == pytest.approx(4 + 1, rel=0.05)
    assert run.ages[1] > 0 and max(run.ages) == 1


ONE_SLOW = [[SampleCost(100)], *[[SampleCost(1)]] * 7]
"""Group 0 takes 50 s, the others 0.5 s. The first four start at once; steps begin at 0.5, 5 and 9.5 s."""


def of_one_slow_group(on_stale: OnStale, slow: SampleCost = ONE_SLOW[0][0]) -> SimulatedRun:
    schedule = limits(max_staleness_steps=1, max_running=4, total_steps=4, order="finished", on_stale=on_stale)
    return Simulation(schedule, [[slow], *ONE_SLOW[1:]], costs(), in_order=True).simulate()


def test_masked_group_is_excluded_from_throughput():
    """Three syncs stop the slow group for 3 s: the last step begins at 53 s with it, which is 3 steps old."""
    run = of_one_slow_group("mask")
    assert run.step_ends == pytest.approx([4.5, 9, 13.5, 57])
    assert run.num_samples == [2, 2, 2, 1]
    assert run.ages == {0: 4, 1: 3, 3: 1}
    assert (run.num_masked, run.masked_share, run.num_restarted) == (1, 1 / 8, 0)
    assert run.trainer_wait_seconds == pytest.approx((0.5 + 0.5 + 0.5 + 39.5) / 4)
    assert run.queue_seconds == pytest.approx((4.5 + 4.5 + 43.5) / 8)


def test_fully_stale_masked_group_is_regenerated():
    """Its one token is there at 0.5 s, its environment answers at 50 s, after three steps, and again at 100 s."""
    run = of_one_slow_group("mask", SampleCost(1, wait_seconds=49.5))
    assert run.step_ends == pytest.approx([4.5, 9, 13.5, 104])
    assert run.num_samples == [2, 2, 2, 2]
    assert (run.num_masked, run.num_restarted, run.ages) == (0, 1, {0: 5, 1: 3})


def test_masked_group_with_only_duration_has_token_at_end():
    run = of_one_slow_group("mask", SampleCost(0, wait_seconds=50))
    assert run.step_ends == pytest.approx([4.5, 9, 13.5, 54])
    assert (run.num_masked, run.num_restarted, run.ages) == (1, 0, {0: 4, 1: 3, 3: 1})


def test_stale_group_is_regenerated_and_waited_for():
    """The group restarts at 9 s, with the weights of two steps, and is waited for until 60 s (a sync stops it for 1
    s).
    """
    run = of_one_slow_group("regenerate")
    assert run.step_ends == pytest.approx([4.5, 9, 13.5, 64])
    assert run.num_samples == [2, 2, 2, 2]
    assert run.ages == {0: 4, 1: 4}
    assert (run.num_masked, run.num_restarted, run.restarted_share) == (0, 1, 1 / 9)


@pytest.mark.parametrize("repeatability, is_slow_again", [(1.0, True), (0.0, False)])
def test_regenerated_group_duration_follows_repeatability(repeatability: float, is_slow_again: bool):
    schedule = limits(max_staleness_steps=1, max_running=4, order="finished", total_steps=40, groups_per_epoch=80)
    groups = [[SampleCost(200)], *[[SampleCost(4)]] * 79]
    run = Simulation(schedule, groups, costs(repeatability=repeatability), in_order=True).simulate()
    assert run.num_restarted > 0
    assert (run.seconds > 200) == is_slow_again


def test_between_group_variance_share_is_computed():
    assert compute_between_fraction([[1.0, 1.0], [5.0, 5.0]]) == 1.0
    assert compute_between_fraction([[1.0, 5.0], [1.0, 5.0]]) == 0.0
    # Mean squares: 2 * (1 + 1) / 1 between, (0.5 + 0.5) / 2 within; (4 - 0.5) / (4 + 0.5).
    assert compute_between_fraction([[0.0, 1.0], [2.0, 3.0]]) == pytest.approx(7 / 9)
    assert compute_between_fraction([[1.0], [2.0]]) == 1.0


@pytest.mark.parametrize("on_stale", ["drop", "regenerate", "mask"])
def test_rare_long_group_does_not_block_async_training(on_stale):
    groups = [[SampleCost(4), SampleCost(4)]] * 15 + [[SampleCost(4), SampleCost(40)]]
    synchronous = Simulation(limits(total_steps=200, groups_per_step=8, max_running=8), groups, costs()).simulate()
    bounds = limits(
        total_steps=200, groups_per_step=8, groups_per_epoch=80, max_running=24, max_staleness_steps=8,
        order="finished", on_stale=on_stale,
    )  # fmt: skip
    asynchronous = Simulation(bounds, groups, costs()).simulate()
    assert asynchronous.samples_per_second > 2 * synchronous.samples_per_second
    assert (asynchronous.num_restarted == 0) or on_stale != "mask"

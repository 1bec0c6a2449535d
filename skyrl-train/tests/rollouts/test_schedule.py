"""Scheduler of asynchronous rollouts: bound on staleness, slots, orders, liveness."""

import heapq
import random
from collections import Counter
from dataclasses import asdict
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_train.rollouts.schedule import GroupScheduler, ScheduleLimits, ScheduleState

M = 4


def limits(**changes) -> ScheduleLimits:
    given = {
        "groups_per_step": M,
        "max_staleness_steps": 2,
        "max_running": 8,
        "groups_per_epoch": 20,
        "total_steps": 50,
    }
    return ScheduleLimits(**{**given, **changes})


def start_all(scheduler: GroupScheduler) -> list[int]:
    tickets = []
    while scheduler.can_start():
        tickets.append(scheduler.start())
    return tickets


def test_slots_cover_staleness_plus_1_steps():
    scheduler = GroupScheduler(limits(max_running=100))
    assert start_all(scheduler) == list(range(3 * M))
    for ticket in range(M):
        scheduler.record_finished(ticket)
    batch = scheduler.get_next_batch()
    assert batch == [0, 1, 2, 3]
    scheduler.record_trained(batch)
    assert not scheduler.can_start()  # the engines still have the old weights: a new group could be 3 steps old
    scheduler.record_synced(1)
    assert start_all(scheduler) == list(range(3 * M, 4 * M))


def test_staleness_zero_alternates_between_generating_and_training():
    scheduler = GroupScheduler(limits(max_staleness_steps=0, order="exact"))
    for step in range(5):
        tickets = start_all(scheduler)
        assert tickets == list(range(step * M, (step + 1) * M))
        for ticket in reversed(tickets):
            assert scheduler.get_next_batch() is None
            scheduler.record_finished(ticket)
        assert scheduler.get_next_batch() == tickets
        scheduler.record_trained(tickets, version=step + 1)


@pytest.mark.parametrize(
    ("order", "expected"),
    [("finished", [7, 6, 5, 4]), ("oldest", [1, 4, 5, 6]), ("exact", None)],
)
def test_next_batch_follows_order_setting(order, expected):
    scheduler = GroupScheduler(limits(order=order))
    assert start_all(scheduler) == list(range(8))
    for ticket in (7, 6, 5, 4, 1):
        scheduler.record_finished(ticket)
    assert scheduler.get_next_batch() == expected


def test_exact_order_waits_for_group_to_restart():
    scheduler = GroupScheduler(
        limits(order="exact"), ScheduleState(next_ticket=5, finished={1: 0, 2: 0, 3: 0, 4: 0}, waiting=[0])
    )
    assert scheduler.get_next_batch() is None
    assert scheduler.start() == 0
    scheduler.record_finished(0)
    assert scheduler.get_next_batch() == [0, 1, 2, 3]


@pytest.mark.parametrize("end", ["failed", "filtered"])
def test_slot_of_failed_or_filtered_group_is_reused(end):
    scheduler = GroupScheduler(limits(max_staleness_steps=0))
    assert start_all(scheduler) == [0, 1, 2, 3]
    if end == "filtered":
        scheduler.record_finished(2)
    getattr(scheduler, f"record_{end}")(2)
    assert start_all(scheduler) == [4]
    with pytest.raises(KeyError):  # once
        getattr(scheduler, f"record_{end}")(2)


def train_others(scheduler: GroupScheduler, slow: int, steps: int) -> None:
    """Train `steps` steps in which every group but `slow` ends at once."""
    for _ in range(steps):
        start_all(scheduler)
        for ticket in scheduler.running:
            if ticket != slow:
                scheduler.record_finished(ticket)
        batch = scheduler.get_next_batch()
        assert batch is not None
        scheduler.record_trained(batch, version=scheduler.num_trained_steps + 1)


@pytest.mark.parametrize("on_stale", ["regenerate", "drop", "mask"])
def test_stale_group_is_handled_by_on_stale_setting(on_stale):
    scheduler = GroupScheduler(limits(on_stale=on_stale, groups_per_epoch=400))
    train_others(scheduler, slow=0, steps=3)
    assert scheduler.age(0) == 3
    assert scheduler.requeue_stale() == ([] if on_stale == "mask" else [0])
    assert scheduler.requeue_stale() == []
    if on_stale == "mask":  # its newest token decides
        scheduler.record_finished(0, version=1)
        assert scheduler.requeue_stale() == [] and 0 in scheduler.finished_groups
        return
    assert (scheduler.start() == 0) == (on_stale == "regenerate")


def test_fully_stale_group_is_restarted_under_mask_policy():
    scheduler = GroupScheduler(limits(on_stale="mask", groups_per_epoch=400))
    train_others(scheduler, slow=0, steps=3)
    scheduler.record_finished(0, version=0)
    assert scheduler.requeue_stale() == [0] and scheduler.requeue_stale() == []
    assert scheduler.start() == 0


def test_dropped_group_is_rescheduled_at_epoch_end():
    scheduler = GroupScheduler(limits(on_stale="drop", max_running=6))
    train_others(scheduler, slow=0, steps=3)
    scheduler.requeue_stale()
    tickets = []
    while 0 not in tickets:
        tickets += start_all(scheduler)
        for ticket in scheduler.running:
            scheduler.record_finished(ticket)
        scheduler.record_trained(scheduler.get_next_batch(), version=scheduler.num_trained_steps + 1)
    assert max(tickets[: tickets.index(0)]) == 19


def test_scheduler_waits_for_restarted_group():
    scheduler = GroupScheduler(limits(on_stale="regenerate"))
    train_others(scheduler, slow=0, steps=3)
    scheduler.requeue_stale()
    train_others(scheduler, slow=0, steps=2)
    start_all(scheduler)
    for ticket in scheduler.running:
        if ticket != 0:
            scheduler.record_finished(ticket)
    assert len(scheduler.finished_groups) > M and scheduler.get_next_batch() is None
    assert "waiting for group 0" in scheduler.describe_why_no_batch()
    scheduler.record_finished(0)
    assert scheduler.get_next_batch()[0] == 0


def test_groups_restarted_together_are_restarted_once():
    """Eight groups begin anew on version 3 and must be trained at the latest by the step after five others: that step
    has four places, so the one before takes the other four."""
    scheduler = GroupScheduler(limits(on_stale="regenerate", max_running=12))
    slow = set(range(8))

    def train(*, slow_that_finish: int) -> list[int] | None:
        start_all(scheduler)
        for ticket in scheduler.running:
            if ticket not in slow:
                scheduler.record_finished(ticket)
        for ticket in sorted(slow & set(scheduler.running))[:slow_that_finish]:
            scheduler.record_finished(ticket)
        batch = scheduler.get_next_batch()
        if batch is not None:
            scheduler.record_trained(batch, version=scheduler.num_trained_steps + 1)
        return batch

    for _ in range(3):
        assert set(train(slow_that_finish=0) or slow).isdisjoint(slow)
    assert scheduler.requeue_stale() == list(range(8))
    assert set(train(slow_that_finish=0) or slow).isdisjoint(slow)
    assert train(slow_that_finish=3) is None
    assert "waiting for group 3, 4, 5, 6" in scheduler.describe_why_no_batch()
    assert train(slow_that_finish=1) == [0, 1, 2, 3]
    assert scheduler.requeue_stale() == []
    assert train(slow_that_finish=3) is None
    assert train(slow_that_finish=1) == [4, 5, 6, 7]
    assert scheduler.requeue_stale() == [] and max(map(scheduler.age, scheduler.finished_groups), default=0) <= 2


def test_checkpoint_state_restarts_running_groups():
    scheduler = GroupScheduler(limits())
    start_all(scheduler)
    for ticket in (3, 1):
        scheduler.record_finished(ticket)
    resumed = GroupScheduler(limits(), ScheduleState(**asdict(scheduler.state())))
    assert resumed.finished_groups == [3, 1] and resumed.running == []
    assert start_all(resumed) == [0, 2, 4, 5, 6, 7, 8, 9]


# ---- simulated runs


def simulate(limits: ScheduleLimits, seed: int, *, p_fail: float = 0.0, p_filter: float = 0.0, sync_every: int = 1):
    """Run a schedule to its end in virtual time, with lengths that have no variance (Pareto, shape 1.2), and check its
    promises at every event. Returns: how often each ticket was trained, and the ages of trained groups."""
    draw, scheduler = random.Random(seed), GroupScheduler(limits)
    now, trainer_free, ends, generation = 0.0, 0.0, [], Counter()
    trained, restarts, ages, most_slots = Counter(), Counter(), [], 0
    while scheduler.num_trained_steps < limits.total_steps:
        for ticket in scheduler.requeue_stale():
            generation[ticket] += 1  # what still runs of it is aborted
            restarts[ticket] += 1
            assert restarts[ticket] == 1, "a group is restarted once"
        while scheduler.can_start():
            ticket = scheduler.start()
            heapq.heappush(ends, (now + draw.paretovariate(1.2), ticket, generation[ticket]))
        taken = len(scheduler.running) + len(scheduler.finished_groups)
        most_slots = max(most_slots, taken)
        assert len(scheduler.running) <= limits.max_running
        assert taken <= (limits.max_staleness_steps + 1) * limits.groups_per_step
        batch = scheduler.get_next_batch() if now >= trainer_free else None
        if batch is not None:
            assert len(set(batch)) == limits.groups_per_step
            ages += [scheduler.age(ticket) for ticket in batch]
            trained.update(batch)
            step = scheduler.num_trained_steps + 1
            scheduler.record_trained(batch, version=step if step % sync_every == 0 else None)
            trainer_free = now + 1.0
            continue
        assert ends or now < trainer_free, (
            f"stuck: {scheduler.describe_why_not_started()}; {scheduler.describe_why_no_batch()}"
        )
        if now < trainer_free and (not ends or trainer_free <= ends[0][0]):
            now = trainer_free
            continue
        now, ticket, number = heapq.heappop(ends)
        if number != generation[ticket]:
            continue
        if draw.random() < p_fail:
            scheduler.record_failed(ticket)
            generation[ticket] += 1
        else:
            scheduler.record_finished(ticket)
            if draw.random() < p_filter:
                scheduler.record_filtered(ticket)
    return trained, ages, most_slots


@pytest.mark.first_case
@pytest.mark.parametrize(
    ("order", "on_stale"), [("exact", "drop"), *product(["finished", "oldest"], ["drop", "regenerate", "mask"])]
)
def test_group_age_stays_within_bound_over_thousands_of_steps(order, on_stale):
    bounds = limits(order=order, on_stale=on_stale, total_steps=3_000, groups_per_epoch=400, max_running=12)
    trained, ages, _ = simulate(bounds, seed=0)
    assert max(ages) <= bounds.max_staleness_steps
    assert sum(trained.values()) == 3_000 * M and max(trained.values()) == 1


@given(
    staleness=st.integers(0, 5), running=st.integers(1, 24), order=st.sampled_from(["finished", "oldest", "exact"]),
    on_stale=st.sampled_from(["drop", "regenerate", "mask"]), seed=st.integers(0, 10**6), epochs=st.integers(1, 6),
    p_fail=st.sampled_from([0.0, 0.2]), p_filter=st.sampled_from([0.0, 0.3]),
)  # fmt: skip
@settings(max_examples=60)
def test_schedule_finishes_within_bounds_for_any_settings(
    staleness, running, order, on_stale, seed, epochs, p_fail, p_filter
):
    bounds = limits(
        max_staleness_steps=staleness, max_running=running, order=order, on_stale=on_stale, groups_per_epoch=epochs * M,
        total_steps=30,
    )  # fmt: skip
    sync_every = 1 + seed % (staleness + 1)
    trained, ages, _ = simulate(bounds, seed, p_fail=p_fail, p_filter=p_filter, sync_every=sync_every)
    assert sum(trained.values()) == 30 * M
    assert max(trained.values()) == 1  # no group twice
    assert max(ages) <= staleness


@pytest.mark.parametrize(
    ("order", "on_stale"), [("exact", "mask"), *product(["finished", "oldest"], ["drop", "regenerate", "mask"])]
)
def test_all_prompts_are_trained_equally_often(order, on_stale):
    """Groups that are unfinished at the end are the only exception: long responses are not trained less often."""
    bounds = limits(order=order, on_stale=on_stale, groups_per_epoch=40, total_steps=400)
    trained, _, most_slots = simulate(bounds, seed=3)
    missing = set(range(max(trained) + 1)) - set(trained)
    assert len(missing) <= most_slots + bounds.groups_per_epoch * (on_stale == "drop")
    assert max(trained) < 400 * M + most_slots + bounds.groups_per_epoch

"""Places of finished groups in the batch of a step whose other groups are generated."""

from skyrl_train.rollouts.arrivals import Arrivals
from skyrl_train.rollouts.schedule import GroupScheduler, ScheduleLimits
from skyrl_train.rollouts.types import TrainingSample, Trajectory, TrajectoryGroup, TrajectoryID


def group(uid: str, *rewards: float) -> TrajectoryGroup:
    samples = [TrainingSample([1], [2], [1], [reward]) for reward in rewards]
    return TrajectoryGroup(uid, [Trajectory(TrajectoryID(uid, n), [sample]) for n, sample in enumerate(samples)])


def test_group_position_equals_prompt_position():
    arrivals = Arrivals(None)
    arrivals.request("abc")
    arrivals.add(group("c", 0, 0))
    assert {place: each.uid for place, each in arrivals.compute_positions(3).items()} == {2: "c"}


def test_dynamic_sampling_shifts_or_keeps_group_positions():
    filtering, replacing = Arrivals("filter"), Arrivals("replace")
    for arrivals in (filtering, replacing):
        arrivals.request("abc")
        arrivals.add(group("b", 0, 1))
        arrivals.add(group("a", 1, 1))
    assert {place: each.uid for place, each in filtering.compute_positions(2).items()} == {0: "b"}, (
        "`a` teaches nothing"
    )
    assert {place: each.uid for place, each in replacing.compute_positions(3).items()} == {1: "b"}, (
        "a copy takes the place of `a`"
    )
    for arrivals in (filtering, replacing):
        arrivals.request("def")
        arrivals.add(group("d", 0, 1))
    assert {place: each.uid for place, each in filtering.compute_positions(2).items()} == {0: "b"}, (
        "`c` may come before `d`"
    )
    assert {place: each.uid for place, each in replacing.compute_positions(3).items()} == {0: "d"}, (
        "another batch is tried"
    )
    filtering.add(group("c", 1, 0))
    assert {place: each.uid for place, each in filtering.compute_positions(2).items()} == {0: "b", 1: "c"}, (
        "of two, `d` is none"
    )


def test_schedule_predicts_next_batch():
    limits = dict(groups_per_step=3, max_staleness_steps=1, max_running=6, groups_per_epoch=30, total_steps=10)
    foreseen: dict[str, dict[int, int]] = {}
    for order in ("finished", "exact", "oldest"):
        scheduler = GroupScheduler(ScheduleLimits(**limits, order=order))  # type: ignore[arg-type]
        tickets = [scheduler.start() for _ in range(6)]
        for ticket in (4, 2):
            scheduler.record_finished(tickets[ticket])
        foreseen[order] = scheduler.predict_next_batch()
        for ticket in (0, 1):
            scheduler.record_finished(tickets[ticket])
        batch = scheduler.get_next_batch()
        assert batch is not None and all(batch[place] == ticket for place, ticket in foreseen[order].items())
    assert foreseen == {"finished": {0: 4, 1: 2}, "exact": {2: 2}, "oldest": {}}

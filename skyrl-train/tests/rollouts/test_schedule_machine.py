"""The scheduler under any sequence of events: no slot is lost, no ticket is lost or twice, no group is trained too old
or begun anew twice, and whatever has happened, the run can go on to its end."""

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from skyrl_train.rollouts.schedule import GroupScheduler, ScheduleLimits, ScheduleState


class ScheduleMachine(RuleBasedStateMachine):
    """Trainer and pool without their work. Model: the place of each ticket, as it follows from the calls alone."""

    def __init__(self) -> None:
        super().__init__()
        self.running: dict[int, int] = {}  # ticket: version of its start
        self.finished, self.queued = set[int](), set[int]()
        self.trained, self.replaced, self.restarted = set[int](), set[int](), set[int]()

    @initialize(
        num=st.integers(1, 3), staleness=st.integers(0, 3), extra=st.integers(0, 9), epoch=st.integers(1, 3),
        order=st.sampled_from(["finished", "oldest", "exact"]),
        on_stale=st.sampled_from(["drop", "regenerate", "mask"]),
    )  # fmt: skip
    def begin(self, num: int, staleness: int, extra: int, epoch: int, order: Any, on_stale: Any) -> None:
        self.limits = ScheduleLimits(
            groups_per_step=num, max_staleness_steps=staleness, max_running=min(num + extra, num * (staleness + 1)),
            groups_per_epoch=num * epoch, total_steps=12, order=order, on_stale=on_stale,
        )  # fmt: skip
        self.scheduler = GroupScheduler(self.limits)

    # ---- rules

    def is_whole(self) -> bool:
        return self.scheduler.num_trained_steps == self.limits.total_steps

    @precondition(lambda self: self.scheduler.can_start())
    @rule(at_once=st.integers(1, 6))
    def start(self, at_once: int) -> None:
        for _ in range(at_once):
            if self.scheduler.can_start():
                ticket = self.scheduler.start()
                assert ticket in self.queued or ticket == self.num_tickets()
                self.queued.discard(ticket)
                self.running[ticket] = self.scheduler.version

    @precondition(lambda self: self.running)
    @rule(data=st.data(), end=st.sampled_from(["finished", "finished", "finished", "filtered", "failed"]))
    def end(self, data: st.DataObject, end: str) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.running)))
        started = self.running.pop(ticket)
        if end == "failed":
            self.scheduler.record_failed(ticket)
        else:
            version = data.draw(st.none() | st.integers(started, self.scheduler.version), label="version of a token")
            self.scheduler.record_finished(ticket, version)
        if end == "filtered":
            self.scheduler.record_filtered(ticket)
        if end == "finished":
            self.finished.add(ticket)
            self.take_stale()
        else:
            self.replaced.add(ticket)

    def can_train(self) -> bool:
        """Steps between syncs are at most S + 1, as the settings demand."""
        is_synced = self.scheduler.num_trained_steps - self.scheduler.version <= self.limits.max_staleness_steps
        return is_synced and not self.is_whole() and self.scheduler.get_next_batch() is not None

    @precondition(can_train)
    @rule()
    def train(self) -> None:
        batch = self.scheduler.get_next_batch()
        assert batch is not None and len(set(batch)) == self.limits.groups_per_step and self.finished.issuperset(batch)
        assert batch == self.scheduler.get_next_batch(), "asking changes nothing"
        if self.limits.order == "exact":
            assert batch == sorted(self.running.keys() | self.finished | self.queued)[: len(batch)]
        assert min(map(self.scheduler.age, batch)) >= 0
        assert max(map(self.scheduler.age, batch)) <= self.limits.max_staleness_steps
        self.scheduler.record_trained(batch)
        self.finished.difference_update(batch)
        self.trained.update(batch)
        self.take_stale()

    def take_stale(self) -> None:
        for ticket in self.scheduler.requeue_stale():
            assert ticket not in self.restarted, "begun anew a second time"
            assert ticket in self.finished or ticket in self.running
            self.restarted.add(ticket)
            self.finished.discard(ticket)
            self.running.pop(ticket, None)
            self.queued.add(ticket)

    @precondition(lambda self: self.scheduler.version < self.scheduler.num_trained_steps)
    @rule()
    def sync(self) -> None:
        self.scheduler.record_synced(self.scheduler.num_trained_steps)

    @precondition(lambda self: self.scheduler.version == self.scheduler.num_trained_steps)
    @rule()
    def resume_from_a_checkpoint(self) -> None:
        """Checkpoints are preceded by a sync. What runs is begun anew."""
        self.scheduler = GroupScheduler(self.limits, ScheduleState.from_json(self.scheduler.state().to_json()))
        self.queued.update(self.running)
        self.running.clear()

    # ---- invariants

    def num_tickets(self) -> int:
        places = self.running, self.finished, self.queued, self.trained, self.replaced
        return sum(map(len, places))

    @invariant()
    def each_ticket_is_in_one_place(self) -> None:
        state = self.scheduler.state()
        assert sorted(self.scheduler.running) == sorted(self.running)
        assert sorted(self.scheduler.finished_groups) == sorted(self.finished)
        assert sorted([*state.waiting, *state.deferred]) == sorted([*self.running, *self.queued])
        places = [*self.running, *self.finished, *self.queued, *self.trained, *self.replaced]
        assert sorted(places) == list(range(state.next_ticket))

    @invariant()
    def slots_are_conserved(self) -> None:
        steps = min(self.limits.max_staleness_steps + self.scheduler.version + 1, self.limits.total_steps)
        num_taken = len(self.trained) + len(self.running) + len(self.finished)
        assert self.scheduler.num_free_slots == steps * self.limits.groups_per_step - num_taken >= 0
        assert len(self.running) <= self.limits.max_running

    @invariant()
    def something_can_happen(self) -> None:
        is_behind = self.scheduler.version < self.scheduler.num_trained_steps
        can_go_on = self.running or self.scheduler.can_start() or is_behind or self.can_train() or self.is_whole()
        assert can_go_on, f"{self.scheduler.describe_why_not_started()}; {self.scheduler.describe_why_no_batch()}"

    def teardown(self) -> None:
        """Everything that is under way finishes, oldest last, and the run comes to its end."""
        if not hasattr(self, "scheduler"):
            return
        for _ in range(10 * self.limits.total_steps):
            if self.is_whole():
                break
            self.sync()
            self.start(100)
            for ticket in sorted(self.running, reverse=True):
                if self.scheduler.get_next_batch() is None:
                    self.running.pop(ticket)
                    self.scheduler.record_finished(ticket)
                    self.finished.add(ticket)
                    self.take_stale()
            if self.can_train():
                self.train()
            self.each_ticket_is_in_one_place()
        assert self.is_whole(), f"{self.scheduler.describe_why_not_started()}; {self.scheduler.describe_why_no_batch()}"


ScheduleMachine.TestCase.settings = settings(max_examples=50, stateful_step_count=60)
TestSchedule = ScheduleMachine.TestCase

"""Forward-only passes of a step (old log-probs, reference log-probs, values) that start before all groups of the step
are generated.

The results of a micro-batch depend only on its rows and their order, since padding is dropped before the model. A
predictable micro-batch of the step's schedule is computed as soon as its groups are finished; its result is used if the
complete batch has a micro-batch with the same tokens. The remaining micro-batches are computed in one call. A wrong
prediction therefore costs time but does not change results.
"""

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager

import torch

from skyrl_gym.concurrency import raise_first_error
from skyrl_train.orchestration.actor_group import ActorGroup
from skyrl_train.orchestration.batch_calls import forward, forward_inputs
from skyrl_train.orchestration.schedule import Schedule
from skyrl_train.rollouts.filters import set_uid
from skyrl_train.rollouts.types import RolloutBatch, TrajectoryGroup
from skyrl_train.training_batch import TrainingInputBatch

Divide = Callable[[ActorGroup, TrainingInputBatch], Schedule]
"""Schedule of a forward-only pass of a model over a batch."""

Collate = Callable[[RolloutBatch], TrainingInputBatch]

Row = tuple[int, int]
"""Place of a row's group in the batch of the step, and its number among the rows of the group."""

Tokens = tuple[bytes, ...]
"""Hash of all inputs of each row of a micro-batch."""


class ForwardPass:
    """Early part of the forward-only pass of one model over the batch of a step.

    Args:
        group: ranks of the model.
        divide: computes the schedule of the pass.
        collate: converts finished groups to tensors.
        num_prompts: prompts of the step.
        prompts_each: prompts of a mini-batch.
        rows_each: rows of a prompt, if rows are divided by number: then all micro-batches are known from the start.
            None: they depend on lengths, or prompts have varying numbers of rows; the micro-batches of a mini-batch are
            then known when all its groups are finished.
    """

    def __init__(
        self,
        group: ActorGroup,
        divide: Divide,
        collate: Collate,
        *,
        num_prompts: int,
        prompts_each: int,
        rows_each: int | None,
    ):
        self.group, self._divide, self._collate, self._rows_each = group, divide, collate, rows_each
        self._groups: dict[int, TrajectoryGroup] = {}
        self._pending: list[list[tuple[Row, ...]]] = [[] for _ in range(group.data_parallel_size)]
        self._mini_batches: list[range] = []  # mini-batches whose micro-batches are unknown
        if rows_each is None:
            starts = range(0, num_prompts, prompts_each)
            self._mini_batches = [range(start, min(start + prompts_each, num_prompts)) for start in starts]
        else:
            rows = [(place, number) for place in range(num_prompts) for number in range(rows_each)]
            self._update_predictions(_build_batch_without_tokens(rows), rows)
        self.computed: dict[Tokens, torch.Tensor] = {}
        """Outputs [b, R] of the micro-batches that were computed."""
        self.call: asyncio.Future[None] | None = None
        """The last call of the ranks."""
        self.seconds = 0.0
        """Time of calls while groups were generated."""
        self._changed = asyncio.Event()

    def offer(self, groups: Mapping[int, TrajectoryGroup]) -> None:
        """Set the finished groups, keyed by their predicted positions in the batch."""
        known, expected = self._groups, self._rows_each
        self._groups = {
            place: group
            for place, group in groups.items()
            # Another number of rows shifts all later groups: these are left for `finish`.
            if known.get(place) is group or expected in (None, _count_rows(group))
        }
        self._changed.set()

    async def run(self) -> None:
        """Compute ready micro-batches until cancelled. A running call then continues."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            # Micro-batches that become ready during a call are computed together in the next call.
            while any(ready := self._take_ready()):
                began = time.perf_counter()
                self.call = asyncio.ensure_future(self._compute(ready))
                self.call.add_done_callback(_read_error)
                try:
                    # Ranks cannot be interrupted: the end of generation ends only the wait; `finish` continues it.
                    await asyncio.shield(self.call)
                finally:
                    self.seconds += time.perf_counter() - began

    def _take_ready(self) -> list[list[tuple[Row, ...]]]:
        """Take the micro-batches whose groups are finished, the same number for each rank, since ranks synchronize in
        every forward."""
        arrived = self._groups.keys()
        for places in [each for each in self._mini_batches if arrived >= set(each)]:
            self._mini_batches.remove(places)
            self._update_predictions(*self._collated(places))
        ready = [[each for each in own if all(place in arrived for place, _ in each)] for own in self._pending]
        # Only the number of micro-batches must agree between ranks, not which are computed together.
        ready = [own[: min(map(len, ready))] for own in ready]
        for pending, own in zip(self._pending, ready, strict=True):
            # The others keep the schedule's order, since groups that start first tend to end first.
            taken = set(own)
            pending[:] = [each for each in pending if each not in taken]
        return ready

    def _update_predictions(self, batch: TrainingInputBatch, rows: Sequence[Row]) -> None:
        """Predict the micro-batches of a batch with these rows."""
        by_rank = self._divide(self.group, batch).rows_of_micro_batches()
        for pending, own in zip(self._pending, by_rank, strict=True):
            pending += [tuple(rows[index] for index in micro_batch) for micro_batch in own]

    def _collated(self, places: Sequence[int]) -> tuple[TrainingInputBatch, list[Row]]:
        # Identified by position, since two groups (of two epochs) may have the same prompt.
        groups = [set_uid(self._groups[place], str(place)) for place in places]
        rows = [(place, number) for place in places for number in range(_count_rows(self._groups[place]))]
        return self._collate(RolloutBatch(groups)), rows

    async def _compute(self, micro_batches: list[list[tuple[Row, ...]]]) -> None:
        batch, rows = self._collated(sorted({place for own in micro_batches for each in own for place, _ in each}))
        index = {row: number for number, row in enumerate(rows)}
        by_rank = [[tuple(index[row] for row in each) for each in own] for own in micro_batches]
        outputs = await forward(self.group, Schedule.of_micro_batches(by_rank, lengths_of(batch)), batch)
        tokens = _compute_row_hashes(self.group, batch)
        for own in by_rank:
            self.computed |= {tuple(tokens[row] for row in each): outputs[list(each)] for each in own}


class EarlyForwards:
    """Forward-only passes of one step that may start while its groups are generated.

    Args:
        passes: passes of the models whose workers may compute during generation.
    """

    def __init__(self, passes: Sequence[ForwardPass] = ()):
        self._passes = {each.group.name: each for each in passes}

    def __bool__(self) -> bool:
        return bool(self._passes)

    def offer(self, groups: Mapping[int, TrajectoryGroup]) -> None:
        """Set the finished groups, keyed by their predicted positions in the batch."""
        for each in self._passes.values():
            each.offer(groups)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Compute ready micro-batches while the block generates. A forward error cancels the block and is raised."""
        if not self:
            yield
            return
        try:
            with raise_first_error():
                async with asyncio.TaskGroup() as tasks:
                    running = [tasks.create_task(each.run()) for each in self._passes.values()]
                    yield
                    # The task group waits for its tasks, which do not end by themselves.
                    for task in running:
                        task.cancel()
        except BaseException:
            # The outputs are not needed, and the end of the run waits for calls: calls not started are dropped.
            for each in self._passes.values():
                if each.call is not None:
                    each.call.cancel()
            raise

    async def finish(self, group: ActorGroup, schedule: Schedule, batch: TrainingInputBatch) -> torch.Tensor:
        """Return the outputs [B, R] of a model for the whole batch, computing the missing micro-batches."""
        early = self._passes.get(group.name)
        # The call still running at the end of generation. Its error is raised here, as for a complete pass.
        if early is not None and early.call is not None:
            await early.call
        # Matched by tokens only, independent of which filter, replacement or order changed the prediction.
        computed = {} if early is None else early.computed
        tokens = _compute_row_hashes(group, batch) if computed else [b""] * len(batch)
        known: dict[tuple[int, ...], torch.Tensor] = {}
        missing: list[list[tuple[int, ...]]] = []
        for own in schedule.rows_of_micro_batches():
            keys = {rows: tuple(tokens[row] for row in rows) for rows in own}
            known |= {rows: computed[keys[rows]] for rows in own if keys[rows] in computed}
            missing.append([rows for rows in own if rows not in known])
        outputs = torch.zeros(len(batch), batch.metadata["response_length"])
        if any(missing):
            outputs = await forward(group, Schedule.of_micro_batches(missing, lengths_of(batch)), batch)
        for rows, own in known.items():
            width = min(own.shape[1], outputs.shape[1])  # after the last token of these rows both are 0
            outputs[list(rows), :width] = own[:, :width]
        return outputs

    def metrics(self) -> dict[str, float]:
        """Return `generate/forward_seconds`, the total time of forward passes during generation, summed over models;
        empty without early passes."""
        return {"generate/forward_seconds": sum(each.seconds for each in self._passes.values())} if self else {}


def lengths_of(batch: TrainingInputBatch) -> list[int]:
    """Return the number of tokens in each row."""
    return batch.tensor("attention_mask").sum(dim=-1).tolist()


def _build_batch_without_tokens(rows: Sequence[Row]) -> TrainingInputBatch:
    """Return a batch of rows of equal lengths, for schedules that do not depend on lengths."""
    # Dividing by number uses prompts and the number of rows, and lengths only if ranks get unequal numbers of rows:
    # then a prediction may be wrong.
    column = torch.ones(len(rows), 1, dtype=torch.int64)
    return TrainingInputBatch(attention_mask=column, metadata={"uids": [place for place, _ in rows]})


def _count_rows(group: TrajectoryGroup) -> int:
    return sum(len(trajectory.samples) for trajectory in group.trajectories)


def _read_error(call: "asyncio.Future[None]") -> None:
    """Retrieve the error of a call that may not be awaited, so that asyncio does not report it."""
    if not call.cancelled():
        call.exception()


def _compute_row_hashes(group: ActorGroup, batch: TrainingInputBatch) -> list[bytes]:
    """Return a hash of all forward inputs of each row, without padding."""
    inputs = forward_inputs(group, batch)
    columns = {name: inputs.tensor(name).numpy() for name in inputs}
    num_prompt = columns["attention_mask"].shape[1] - batch.metadata["response_length"]
    hashes = []
    for row, attention in enumerate(columns["attention_mask"] != 0):
        # Includes the number of prompt tokens, which determines the scored tokens.
        parts = [columns["sequences"][row][attention], attention[:num_prompt].sum()]
        if "expert_routes" in columns:
            parts.append(columns["expert_routes"][row][attention])
        if "kept_ids" in columns:
            # Rows of kept ids are as wide as the longest of their batch.
            counts = columns["kept_counts"][row][attention[num_prompt:]]
            parts += [counts, columns["kept_ids"][row][: counts.sum()]]
        hashes.append(hashlib.blake2b(b"".join(part.tobytes() for part in parts), digest_size=16).digest())
    return hashes

"""Group of the ranks of one model, used by the trainer. Worker classes compute; launchers start them."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any, TypeVar, TypeVarTuple

from skyrl_train.env_vars import scheduling_timeout_seconds
from skyrl_train.models.packing import PrefixOrder, compute_prefix_order
from skyrl_train.orchestration.launcher import Calls, Ranks
from skyrl_train.training_backends.base import ParallelInfo, RankInfo
from skyrl_train.training_batch import TrainingInputBatch

Args = TypeVarTuple("Args")
R = TypeVar("R")
DataParallelArgs = Sequence[tuple[Any, ...]]
"""Arguments of a call for each data-parallel rank, in order."""

_reservation: ContextVar[object] = ContextVar("reservation", default=None)
"""Reservation of the running task, which the tasks that it creates inherit."""


class ActorGroup:
    """Ranks 0..N-1 of one model. Ranks of the same data-parallel rank process the same rows; `ParallelInfo` describes
    the data-parallel rank of each, and whether it holds the outputs.

    Args:
        name: "policy", "critic" or "ref", for logs and errors.
        ranks: the started workers.
        device: "cpu" or "cuda".
        timeout_seconds: the deadline of every call.
        timeout_setting: setting of the deadline, for error messages.
    """

    def __init__(
        self,
        name: str,
        ranks: Ranks,
        *,
        device: str,
        timeout_seconds: float,
        timeout_setting: str = "trainer.worker_timeout_seconds",
    ):
        self.name = name
        self.ranks = ranks
        self.num_ranks = ranks.num_ranks
        self.parallel: list[ParallelInfo] = []  # of each rank, from `init_model` on
        self._device = device
        self._deadline = timeout_seconds, timeout_setting
        self._reservation: object = None
        self._reservation_end = asyncio.Event()

    async def init_model(self) -> None:
        """Wait until the workers have started, then form their process group and load the model."""
        start_deadline = scheduling_timeout_seconds(), "SKYRL_RAY_PG_TIMEOUT_IN_S"
        points = await self.ranks.call([[("rendezvous_point", ())]] * self.num_ranks, *start_deadline)
        [(address, port)], *_ = points
        calls: list[Calls] = []
        for rank in range(self.num_ranks):
            info = RankInfo(
                rank=rank,
                world_size=self.num_ranks,
                master_address=address,
                master_port=port,
                device="cuda:0" if self._device == "cuda" else "cpu",  # Ray shows each process one GPU
            )
            calls.append([("init_model", (info,))])
        self.parallel = [info for [info] in await self.ranks.call(calls, *self._deadline)]

    @property
    def data_parallel_size(self) -> int:
        """Number of data-parallel ranks."""
        return self.parallel[0].data_parallel_size

    @property
    def output_ranks(self) -> list[int]:
        """First rank of each data-parallel rank that holds outputs."""
        first: dict[int, int] = {}
        for rank, info in enumerate(self.parallel):
            if info.holds_outputs:
                first.setdefault(info.data_parallel_rank, rank)
        return [first[rank] for rank in range(self.data_parallel_size)]

    def token_budget(self, tokens_a_worker: int | None) -> int | None:
        """Return the token limit of a micro-batch for one replica, whose ranks may split sequences.

        Args:
            tokens_a_worker: limit of one worker; None: no limit.
        """
        return None if tokens_a_worker is None else tokens_a_worker * self.parallel[0].ranks_per_replica

    def prefix_order(self, batch: TrainingInputBatch) -> PrefixOrder | None:
        """Return the prefix order of a batch's rows; None if the models do not share prefixes between rows."""
        if not all(info.shares_prefixes for info in self.parallel):
            return None
        columns = batch.tensor("sequences"), batch.tensor("attention_mask")
        return compute_prefix_order(*columns, batch.metadata["response_length"])

    async def call_all(self, method: Callable[[Any, *Args], R], *args: *Args) -> list[R]:
        """Call a method on every rank. Returns the results in rank order."""
        answers = await self._call([[(method.__name__, args)]] * self.num_ranks)
        return [answer for [answer] in answers]

    async def call_data_parallel(self, method: Callable[..., R], args: DataParallelArgs) -> list[R]:
        """Call a method with separate arguments for each data-parallel rank. Returns one result for each."""
        [answers] = await self.call_sequence([(method, args)])
        return answers

    async def call_sequence(self, calls: Sequence[tuple[Callable[..., Any], DataParallelArgs]]) -> list[list[Any]]:
        """Call several methods in sequence. The ranks receive all calls at once and do not wait for the driver between
        them.

        Returns:
            for each call, the results in data-parallel order.
        """
        size = self.data_parallel_size
        for method, args in calls:
            if len(args) != size:
                raise ValueError(
                    f"{self.name} has {size} data-parallel ranks; {method.__name__} got arguments for {len(args)}"
                )
        sequences = [[(method.__name__, args[rank]) for method, args in calls] for rank in range(size)]
        answers = await self._call([sequences[info.data_parallel_rank] for info in self.parallel])
        return [list(of_call) for of_call in zip(*(answers[rank] for rank in self.output_ranks), strict=True)]

    async def _call(self, calls: Sequence[Calls]) -> list[list[Any]]:
        while self._reservation not in (None, _reservation.get()):
            await self._reservation_end.wait()
        return await self.ranks.call(calls, *self._deadline)

    @asynccontextmanager
    async def reserve(self) -> AsyncIterator[None]:
        """Delay the calls of other tasks until the block ends, for a sequence of calls between which the model must not
        change. (Earlier calls of others end first: ranks work in the order of calls.)"""
        while self._reservation is not None:
            await self._reservation_end.wait()
        self._reservation = own = object()
        self._reservation_end.clear()
        token = _reservation.set(own)
        try:
            yield
        finally:
            _reservation.reset(token)
            self._reservation = None
            self._reservation_end.set()

    async def shutdown(self) -> None:
        """Stop the workers, gracefully if they respond."""
        await self.ranks.shutdown()

    def kill(self) -> None:
        """Terminate the workers immediately."""
        self.ranks.kill()

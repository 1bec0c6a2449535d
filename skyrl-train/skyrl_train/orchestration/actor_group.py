"""The ranks of one model, as the trainer calls them. What they compute is in the worker classes; where they run, in the
launchers."""

from collections.abc import Sequence
from typing import Any

from skyrl_train.env_vars import scheduling_timeout_seconds
from skyrl_train.orchestration.launcher import Calls, Ranks
from skyrl_train.training_backends.base import ParallelInfo, RankInfo

ShardArgs = Sequence[tuple[Any, ...]]
"""The arguments of a call on every shard, in shard order."""


class ActorGroup:
    """Ranks 0..N-1 of one model. Those of one data-parallel rank are a shard: they take the same rows. The workers say
    which ranks these are, and which of them hold the outputs (`ParallelInfo`).

    Args:
        name: "policy", "critic", "ref": in logs and errors.
        ranks: the workers, started.
        device: "cpu" or "cuda".
        timeout_seconds: the deadline of every call.
        timeout_setting: where that comes from, for the text of an error.
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

    async def init_model(self) -> None:
        """Waits until the workers are there, and makes them one group with a model."""
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
    def num_shards(self) -> int:
        """Number of data-parallel ranks."""
        return self.parallel[0].data_parallel_size

    @property
    def output_ranks(self) -> list[int]:
        """First rank of each data-parallel rank that holds outputs."""
        first: dict[int, int] = {}
        for rank, info in enumerate(self.parallel):
            if info.holds_outputs:
                first.setdefault(info.data_parallel_rank, rank)
        return [first[shard] for shard in range(self.num_shards)]

    def token_budget(self, tokens_a_worker: int | None) -> int | None:
        """Tokens of a micro-batch, which the ranks of a shard share, from the most that one worker may hold."""
        return None if tokens_a_worker is None else tokens_a_worker * self.parallel[0].ranks_per_replica

    async def call_all(self, method: str, *args: Any) -> list[Any]:
        """Call a method on every rank. Returns: the answers in rank order."""
        answers = await self.ranks.call([[(method, args)]] * self.num_ranks, *self._deadline)
        return [answer for [answer] in answers]

    async def call_shards(self, method: str, args: ShardArgs) -> list[Any]:
        """A call with each shard's own arguments on all its ranks; the answer of each shard."""
        [answers] = await self.call_in_turn([(method, args)])
        return answers

    async def call_in_turn(self, calls: Sequence[tuple[str, ShardArgs]]) -> list[list[Any]]:
        """Several calls as of `call_shards`, handed over at once: the ranks go through them without waiting for us.

        Returns:
            for each call, the answers in shard order.
        """
        for method, args in calls:
            if len(args) != self.num_shards:
                raise ValueError(f"{self.name} has {self.num_shards} shards; {method} got arguments for {len(args)}")
        of_shards = [[(method, args[shard]) for method, args in calls] for shard in range(self.num_shards)]
        of_ranks = await self.ranks.call(
            [of_shards[info.data_parallel_rank] for info in self.parallel], *self._deadline
        )
        return [list(of_call) for of_call in zip(*(of_ranks[rank] for rank in self.output_ranks), strict=True)]

    async def shutdown(self) -> None:
        """End the workers, in order where they answer."""
        await self.ranks.shutdown()

    def kill(self) -> None:
        """End the workers at once."""
        self.ranks.kill()

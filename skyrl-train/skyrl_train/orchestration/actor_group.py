"""The ranks of one model, as the trainer calls them. What they compute is in the worker classes; where they run, in the
launchers."""

from collections.abc import Sequence
from typing import Any

from skyrl_train.env_vars import scheduling_timeout_seconds
from skyrl_train.orchestration.launcher import Calls, Ranks
from skyrl_train.training_backends.base import RankInfo

ShardArgs = Sequence[tuple[Any, ...]]
"""The arguments of a call on every shard, in shard order."""


class ActorGroup:
    """Ranks 0..N-1 of one model. Consecutive ranks that share sequences are a shard: they take the same rows and
    compute the same answer.

    Args:
        name: "policy", "critic", "ref": in logs and errors.
        ranks: the workers, started.
        ranks_per_shard: how many of them share each sequence.
        device: "cpu" or "cuda".
        timeout_seconds: the deadline of every call.
        timeout_setting: where that comes from, for the text of an error.
    """

    def __init__(
        self,
        name: str,
        ranks: Ranks,
        *,
        ranks_per_shard: int = 1,
        device: str,
        timeout_seconds: float,
        timeout_setting: str = "trainer.worker_timeout_seconds",
    ):
        if ranks.num_ranks % ranks_per_shard:
            raise ValueError(f"{ranks.num_ranks} ranks of {name} cannot form shards of {ranks_per_shard}")
        self.name = name
        self.ranks = ranks
        self.num_ranks = ranks.num_ranks
        self.num_shards = self.num_ranks // ranks_per_shard
        self.ranks_per_shard = ranks_per_shard
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
        await self.ranks.call(calls, *self._deadline)

    def token_budget(self, tokens_a_worker: int | None) -> int | None:
        """Tokens of a micro-batch, which the ranks of a shard share, from the most that one worker may hold."""
        return None if tokens_a_worker is None else tokens_a_worker * self.ranks_per_shard

    async def call_all(self, method: str, *args: Any) -> list[Any]:
        """The same call on every rank; the answers in rank order."""
        answers = await self.ranks.call([[(method, args)]] * self.num_ranks, *self._deadline)
        return [answer for [answer] in answers]

    async def call_shards(self, method: str, args: ShardArgs) -> list[Any]:
        """A call with each shard's own arguments on all its ranks; the answer of each shard (its first rank's)."""
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
            [of_shards[rank // self.ranks_per_shard] for rank in range(self.num_ranks)], *self._deadline
        )
        return [list(of_call) for of_call in zip(*of_ranks[:: self.ranks_per_shard], strict=True)]

    async def shutdown(self) -> None:
        """End the workers, in order where they answer."""
        await self.ranks.shutdown()

    def kill(self) -> None:
        """End the workers at once."""
        self.ranks.kill()

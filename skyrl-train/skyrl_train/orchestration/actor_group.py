"""The ranks of one model, each in a Ray process of its own. What they compute is in the worker classes."""

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
import torch
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from skyrl_train.env_vars import scheduling_timeout_seconds
from skyrl_train.orchestration.bundles import nodes_of_bundles, order_by_node, reserve_bundles
from skyrl_train.utils.process_log import capture_output, configure_logging
from skyrl_train.utils.ray_calls import Call, answers_of, end_actors, errors_for_caller
from skyrl_train.workers.model_worker import ModelWorker, RankInfo

ShardArgs = Sequence[tuple[Any, ...]]
"""The arguments of a call on every shard, in shard order."""


class WorkerProcess:
    """A worker in a process: its output goes to its log file, and it computes on one thread (of a CPU)."""

    def __init__(self, worker_class: type[ModelWorker], args: tuple[Any, ...], log_file: str):
        prepare_process(log_file)
        with errors_for_caller():
            self._worker = worker_class(*args)

    def pid(self) -> int:
        return os.getpid()

    def call(self, method: str, *args: Any) -> Any:
        """`worker.method(*args)`. Groups call this; `ActorGroup`'s own methods name the method."""
        with errors_for_caller():
            return getattr(self._worker, method)(*args)

    def call_in_turn(self, calls: Sequence[tuple[str, tuple[Any, ...]]]) -> list[Any]:
        """Several calls; the first that fails ends it."""
        return [self.call(method, *args) for method, args in calls]


def prepare_process(log_file: str) -> None:
    """What every process of a run does first."""
    capture_output(log_file)
    configure_logging()
    # Two threads of one process fight over two cores; two processes of one thread do not.
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


class ActorGroup:
    """Ranks 0..N-1 of one worker class. Consecutive ranks that share sequences are a shard: they take the same rows and
    compute the same answer.

    Args:
        name: "policy", "critic", "ref": in logs and errors.
        worker_class, args: what each process makes.
        num_ranks: how many processes.
        ranks_per_shard: how many of them share each sequence.
        device: "cpu" or "cuda".
        log_folder: each rank writes `<name>_<rank>.log` there.
        timeout_seconds: the deadline of every call.
        timeout_setting: where that comes from, for the text of an error.
        gpu_share: on CUDA, the part of a GPU each rank takes (less than 1 when it is shared).
        placement_group: the GPUs that are shared, a bundle each. None: places of the group's own are reserved, all at
            once. Either way the ranks take them node by node (see `bundles.py`).

    Raises:
        WorkerError: the cluster could not give all places in time.
    """

    nodes: list[str]
    """The node of each rank, by its id."""

    def __init__(
        self,
        name: str,
        worker_class: type[ModelWorker],
        args: tuple[Any, ...],
        *,
        num_ranks: int,
        ranks_per_shard: int = 1,
        device: str,
        log_folder: Path,
        timeout_seconds: float,
        timeout_setting: str = "trainer.worker_timeout_seconds",
        gpu_share: float = 1.0,
        placement_group: PlacementGroup | None = None,
    ):
        if num_ranks % ranks_per_shard:
            raise ValueError(f"{num_ranks} ranks of {name} cannot form shards of {ranks_per_shard}")
        self.name = name
        self.num_ranks = num_ranks
        self.num_shards = num_ranks // ranks_per_shard
        self.ranks_per_shard = ranks_per_shard
        self._device = device
        self._deadline = timeout_seconds, timeout_setting
        self._log_files = [str(log_folder / f"{name}_{rank}.log") for rank in range(num_ranks)]
        self._own_places = None
        if placement_group is None:
            placement_group = self._own_places = reserve_bundles(num_ranks, device, purpose=f"the ranks of {name}")
        nodes = nodes_of_bundles(placement_group)
        bundles = order_by_node(nodes)[:num_ranks]
        self.nodes = [nodes[bundle] for bundle in bundles]
        self._actors = []
        for bundle, log_file in zip(bundles, self._log_files, strict=True):
            options = actor_options(device, gpu_share, placement_group, bundle)
            self._actors.append(ray.remote(WorkerProcess).options(**options).remote(worker_class, args, log_file))

    async def init_model(self) -> None:
        """Waits until the processes run, and makes them one group with a model."""
        points = self._calls("rendezvous_point")
        (address, port), *_ = await answers_of(points, scheduling_timeout_seconds(), "SKYRL_RAY_PG_TIMEOUT_IN_S")
        infos = [
            RankInfo(
                rank=rank,
                world_size=self.num_ranks,
                master_address=address,
                master_port=port,
                device="cuda:0" if self._device == "cuda" else "cpu",  # Ray shows each process one GPU
            )
            for rank in range(self.num_ranks)
        ]
        calls = [self._call(rank, "init_model", info) for rank, info in enumerate(infos)]
        await answers_of(calls, *self._deadline)

    def token_budget(self, tokens_a_worker: int | None) -> int | None:
        """Tokens of a micro-batch, which the ranks of a shard share, from the most that one worker may hold."""
        return None if tokens_a_worker is None else tokens_a_worker * self.ranks_per_shard

    async def call_all(self, method: str, *args: Any) -> list[Any]:
        """The same call on every rank; the answers in rank order."""
        return await answers_of(self._calls(method, *args), *self._deadline)

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
        references = [
            actor.call_in_turn.remote(of_shards[rank // self.ranks_per_shard])
            for rank, actor in enumerate(self._actors)
        ]
        of_ranks = await answers_of([self._named(*pair) for pair in enumerate(references)], *self._deadline)
        return [list(of_call) for of_call in zip(*of_ranks[:: self.ranks_per_shard], strict=True)]

    def _calls(self, method: str, *args: Any) -> list[Call]:
        return [self._call(rank, method, *args) for rank in range(self.num_ranks)]

    def _call(self, rank: int, method: str, *args: Any) -> Call:
        return self._named(rank, self._actors[rank].call.remote(method, *args))

    def _named(self, rank: int, reference: Any) -> Call:
        return Call(reference, f"{self.name} worker {rank}", self._log_files[rank])

    def pids(self) -> list[int]:
        """Process ids on their machines, for whoever must look at or stop one."""
        return ray.get([actor.pid.remote() for actor in self._actors], timeout=scheduling_timeout_seconds())

    async def shutdown(self) -> None:
        """End the processes: in order where they answer, else by force. Their places are given back."""
        await asyncio.to_thread(end_actors, self._actors)
        self._give_places_back()

    def kill(self) -> None:
        """End the processes at once, and give their places back."""
        for actor in self._actors:
            ray.kill(actor)
        self._give_places_back()

    def _give_places_back(self) -> None:
        if self._own_places is not None:
            remove_placement_group(self._own_places)


def actor_options(
    device: str, gpu_share: float, placement_group: PlacementGroup | None, bundle_index: int
) -> dict[str, Any]:
    """Ray's options for one process of ours: a CPU, and on CUDA its share of a GPU."""
    options: dict[str, Any] = {"num_cpus": 1, "max_restarts": 0}
    if device == "cuda":
        options |= {"num_gpus": gpu_share}
    if placement_group is not None:
        options["num_cpus"] = min(1.0, gpu_share)  # a bundle has one, whoever shares it and however many GPUs it has
        options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
            placement_group=placement_group, placement_group_bundle_index=bundle_index
        )
    return options

"""`trainer.placement.launcher=ray`: one Ray process per rank and engine, on one machine or a cluster."""

import asyncio
import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from loguru import logger
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from skyrl_gym.waits import waiting
from skyrl_train.config import SkyRLConfig
from skyrl_train.env_vars import scheduling_timeout_seconds
from skyrl_train.errors import WorkerError
from skyrl_train.inference_engines.engine_handle import MakeEngine
from skyrl_train.inference_engines.ray_wrapped_inference_engine import RayWrappedInferenceEngine, build_engine_actor
from skyrl_train.orchestration.bundles import groups_across_nodes, nodes_of_bundles, order_by_node, reserve_bundles
from skyrl_train.orchestration.launcher import Calls, MakeWorker
from skyrl_train.orchestration.node_check import check_nodes
from skyrl_train.utils.call_errors import record_rank_wait
from skyrl_train.utils.ray_calls import Call, gather_results, prepare_errors_for_caller, stop_actors
from skyrl_train.utils.ray_process import prepare_process
from skyrl_train.utils.run_folder import RunFolder

SHARE_OF_SHARED_GPU = 0.2  # policy, critic, ref and engine fit on one GPU, with capacity for one more process


class WorkerProcess:
    """Ray process of one worker, with a log file and one CPU thread.

    Args:
        name: name of the rank, for records of its waits.
    """

    def __init__(self, make_worker: MakeWorker, args: tuple[Any, ...], log_file: str, name: str = "a worker"):
        prepare_process(log_file, name)
        with prepare_errors_for_caller():
            self._worker = make_worker(*args)

    def pid(self) -> int:
        """Return the process id."""
        return os.getpid()

    def call_sequence(self, calls: Calls) -> list[object]:
        """Run several calls in sequence; the first failure ends it."""
        with prepare_errors_for_caller():
            return [self._call(method, args) for method, args in calls]

    def _call(self, method: str, args: tuple[Any, ...]) -> object:
        with waiting(method):
            return getattr(self._worker, method)(*args)


class RayRanks:
    """Ranks 0..N-1 of one worker class, each in a Ray process.

    Args:
        name: name of the group, for logs and errors.
        make_worker, args: builder of each worker and its arguments.
        log_folder: each rank writes `<name>_<rank>.log` there.
        gpu_share: on CUDA, the fraction of a GPU for each rank (less than 1 if shared).
        placement_group: the shared GPUs, one bundle each. None: the group reserves separate bundles, all together. In
            both cases the ranks use them ordered by node (see `bundles.py`).

    Raises:
        WorkerError: the cluster could not provide all bundles in time.
    """

    nodes: list[str]
    """The node of each rank, by its id."""

    def __init__(
        self,
        name: str,
        make_worker: MakeWorker,
        args: tuple[Any, ...],
        *,
        num_ranks: int,
        device: str,
        log_folder: Path,
        gpu_share: float = 1.0,
        placement_group: PlacementGroup | None = None,
    ):
        self.name = name
        self.num_ranks = num_ranks
        self._log_files = [str(log_folder / f"{name}_{rank}.log") for rank in range(num_ranks)]
        self._own_bundles = None
        if placement_group is None:
            placement_group = self._own_bundles = reserve_bundles(num_ranks, device, purpose=f"the ranks of {name}")
        nodes = nodes_of_bundles(placement_group)
        bundles = order_by_node(nodes)[:num_ranks]
        self.nodes = [nodes[bundle] for bundle in bundles]
        self._actors = []
        for rank, (bundle, log_file) in enumerate(zip(bundles, self._log_files, strict=True)):
            options = actor_options(device, gpu_share, placement_group, bundle)
            worker = ray.remote(WorkerProcess).options(**options)
            self._actors.append(worker.remote(make_worker, args, log_file, f"{name} worker {rank}"))

    async def call(self, calls: Sequence[Calls], timeout_seconds: float, timeout_setting: str) -> list[list[Any]]:
        with record_rank_wait(self.name, calls, timeout_seconds):
            return await gather_results(
                [
                    Call(actor.call_sequence.remote(own), f"{self.name} worker {rank}", self._log_files[rank])
                    for rank, (actor, own) in enumerate(zip(self._actors, calls, strict=True))
                ],
                timeout_seconds,
                timeout_setting,
            )

    def pids(self) -> list[int]:
        """Return the process ids of the ranks, each on its machine."""
        return ray.get([actor.pid.remote() for actor in self._actors], timeout=scheduling_timeout_seconds())

    async def shutdown(self) -> None:
        """Stop the processes, gracefully if they respond, and release their bundles."""
        await asyncio.to_thread(stop_actors, self._actors)
        self._release_bundles()

    def kill(self) -> None:
        """Kill the processes immediately and release their bundles."""
        for actor in self._actors:
            ray.kill(actor)
        self._release_bundles()

    def _release_bundles(self) -> None:
        if self._own_bundles is not None:
            remove_placement_group(self._own_bundles)


class RayLauncher:
    """Launcher of Ray processes.

    Args:
        shared: on CUDA, the GPUs that workers and engines share.
    """

    def __init__(self, cfg: SkyRLConfig, shared: PlacementGroup | None):
        self._cfg = cfg
        self._shared = shared
        self._engines: EngineBundles | None = None
        self._num_engine_starts = itertools.count()

    def start_ranks(
        self,
        name: str,
        make_worker: MakeWorker,
        args: tuple[object, ...],
        *,
        num_ranks: int,
        device: str,
        log_folder: Path,
    ) -> RayRanks:
        ranks = RayRanks(
            name,
            make_worker,
            args,
            num_ranks=num_ranks,
            device=device,
            log_folder=log_folder,
            gpu_share=1.0 if self._shared is None else SHARE_OF_SHARED_GPU,
            placement_group=self._shared,
        )
        model = getattr(self._cfg.trainer, name)
        _log_groups_across_nodes(ranks, f"trainer.{name}.sequence_parallel_size", model.sequence_parallel_size)
        _log_groups_across_nodes(ranks, f"trainer.{name}.fsdp_config.fsdp_size", model.fsdp_config.fsdp_size)
        return ranks

    def start_engine(self, index: int, make_engine: MakeEngine) -> RayWrappedInferenceEngine:
        """Start an engine process. It logs to `engine_<index>.log` of the run, with suffix `_start_<number>` after a
        restart."""
        if self._engines is None:
            self._engines = EngineBundles(self._cfg, self._shared)
        generator = self._cfg.generator
        number = next(self._num_engine_starts)
        again = f"_start_{number}" if number >= generator.num_inference_engines else ""
        log_file = str(RunFolder(self._cfg.trainer.run_dir).logs_folder / f"engine_{index}{again}.log")
        return RayWrappedInferenceEngine(
            build_engine_actor(**self._engines.options(index)).remote(make_engine, log_file, f"engine {index}"),
            f"engine {index}",
            log_file,
            generator.request_timeout_seconds,
            control_timeout_seconds=generator.engine_control_timeout_seconds,
            start_timeout_seconds=generator.engine_start_timeout_seconds,
        )

    async def check_files(self, cfg: SkyRLConfig, data: Sequence[str], log_folder: Path) -> None:
        await check_nodes(cfg, data, log_folder)


def _log_groups_across_nodes(ranks: RayRanks, setting: str, size: int) -> None:
    across = groups_across_nodes(ranks.nodes, size) if size > 1 else []
    if across:
        logger.warning(
            f"{len(across)} of {ranks.num_ranks // size} groups of {setting}={size} ranks span several nodes (for "
            f"example ranks {across[0].start} to {across[0].stop - 1}), where communication is slow: the number of "
            "free GPUs per node should be a multiple of it"
        )


# ---- bundles of engines


class EngineBundles:
    """Reserved CPU and GPUs of each engine.

    Args:
        shared: on CUDA, the GPUs that workers and engines share.

    Raises:
        WorkerError: the cluster could not provide them in time.
    """

    def __init__(self, cfg: SkyRLConfig, shared: PlacementGroup | None):
        self._shared = shared
        self._device = cfg.trainer.placement.resolve_device()
        self._num_gpus = cfg.generator.engine_world_size
        self._gpus = gpus_of_engines(cfg, shared)
        self._group, self._bundles = bundles_of_engines(cfg, shared)

    def options(self, index: int) -> dict[str, Any]:
        """Return Ray's options for an engine. An engine that shares several GPUs with workers selects them by number,
        since Ray can assign a fraction of one GPU or several whole GPUs to a process, but not fractions of several."""
        shared_by_number = self._shared is not None and self._num_gpus > 1
        share = self._num_gpus if self._shared is None else 0 if shared_by_number else SHARE_OF_SHARED_GPU
        bundle, gpu_ids = self._gpus[index] if self._gpus else (self._bundles[index], [])
        options = actor_options(self._device, share, self._group, bundle)
        if shared_by_number:
            options["runtime_env"] = {
                "env_vars": {
                    "CUDA_VISIBLE_DEVICES": ",".join(gpu_ids),
                    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
                }
            }
        return options


def actor_options(
    device: str, gpu_share: float, placement_group: PlacementGroup | None, bundle_index: int
) -> dict[str, object]:
    """Return Ray's options for one process: one CPU, and on CUDA `gpu_share` of a GPU."""
    options: dict[str, Any] = {"num_cpus": 1, "max_restarts": 0}
    if device == "cuda":
        options |= {"num_gpus": gpu_share}
    if placement_group is not None:
        options["num_cpus"] = min(1.0, gpu_share)  # a bundle has one CPU, for any number of processes and GPUs
        options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
            placement_group=placement_group, placement_group_bundle_index=bundle_index
        )
    return options


def reserve_shared_gpus(cfg: SkyRLConfig, timeout_seconds: float | None = None) -> PlacementGroup | None:
    """Reserve the GPUs that workers and engines share. None if nothing is shared or without GPUs.

    Raises:
        WorkerError: the cluster could not provide them in time.
    """
    if not cfg.trainer.placement.colocate_all or cfg.trainer.placement.resolve_device() == "cpu":
        return None
    num_gpus = cfg.generator.num_inference_engines * cfg.generator.engine_world_size
    purpose = "workers and engines (generator.num_inference_engines x GPUs of each)"
    return reserve_bundles(num_gpus, "cuda", purpose=purpose, timeout_seconds=timeout_seconds)


def bundles_of_engines(cfg: SkyRLConfig, shared: PlacementGroup | None) -> tuple[PlacementGroup | None, list[int]]:
    """Return the placement group of the engines, and the bundle of each single-bundle engine: in a group shared with
    workers the bundle of the rank with its number, else a bundle of a separate group. None on CPU, where an engine is
    one process without a reservation.

    Raises:
        WorkerError: the cluster could not provide them in time.
    """
    if shared is not None:
        return shared, order_by_node(nodes_of_bundles(shared))
    count = cfg.generator.num_inference_engines
    if cfg.trainer.placement.resolve_device() == "cpu":
        return None, list(range(count))
    purpose = "the engines (generator.num_inference_engines x GPUs of each)"
    own = reserve_bundles(count, "cuda", num_devices=cfg.generator.engine_world_size, purpose=purpose)
    return own, list(range(count))


def gpus_of_engines(cfg: SkyRLConfig, shared: PlacementGroup | None) -> list[tuple[int, list[str]]]:
    """Return for each engine that shares several GPUs with workers the bundle of its process and the numbers of its
    GPUs on that node. Empty if engines share no GPUs, or one GPU each (which Ray divides).

    Raises:
        WorkerError: the GPUs of an engine span several nodes.
    """
    size = cfg.generator.engine_world_size
    if shared is None or size == 1:
        return []
    where = ray.get(
        [
            _get_node_and_gpu.options(
                scheduling_strategy=PlacementGroupSchedulingStrategy(shared, placement_group_bundle_index=bundle)
            ).remote()
            for bundle in range(shared.bundle_count)
        ],
        timeout=scheduling_timeout_seconds(),
    )
    node_order = list(dict.fromkeys(node for node, _ in where))  # in the order of ranks
    order = sorted(
        range(shared.bundle_count), key=lambda bundle: (node_order.index(where[bundle][0]), where[bundle][1])
    )
    engines = []
    for first in range(0, len(order), size):
        bundles = order[first : first + size]
        nodes = {where[bundle][0] for bundle in bundles}
        if len(nodes) > 1:
            raise WorkerError(
                f"an engine of {size} GPUs (generator.inference_engine_*_parallel_size) would span {len(nodes)} "
                "nodes; use nodes whose number of free GPUs is a multiple of it"
            )
        engines.append((bundles[0], [where[bundle][1] for bundle in bundles]))
    return engines


@ray.remote(num_cpus=0, num_gpus=0.01)
def _get_node_and_gpu() -> tuple[str, str]:
    return ray.get_runtime_context().get_node_id(), str(ray.get_gpu_ids()[0])

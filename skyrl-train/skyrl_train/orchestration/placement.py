"""Who runs where. On a CPU a count of "GPUs" is a count of processes. Who holds a shared device when is
`colocation.py`'s."""

from typing import Any, Literal

import ray
from loguru import logger
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from skyrl_train.config import SkyRLConfig
from skyrl_train.env_vars import scheduling_timeout_seconds
from skyrl_train.errors import WorkerError
from skyrl_train.orchestration.actor_group import ActorGroup
from skyrl_train.orchestration.bundles import groups_across_nodes, nodes_of_bundles, order_by_node, reserve_bundles
from skyrl_train.utils.run_folder import RunFolder
from skyrl_train.workers.model_worker import ModelWorker

SHARE_OF_SHARED_GPU = 0.2  # four kinds of process (policy, critic, ref, engine) fit on one GPU, with room for one more


def make_shared_placement_group(cfg: SkyRLConfig, timeout_seconds: float | None = None) -> PlacementGroup | None:
    """The GPUs that workers and engines share, or None where nothing is shared or there are no GPUs.

    Raises:
        WorkerError: the cluster could not give them in time.
    """
    if not cfg.trainer.placement.colocate_all or cfg.trainer.placement.resolved_device() == "cpu":
        return None
    num_gpus = cfg.generator.num_inference_engines * cfg.generator.engine_world_size
    purpose = "workers and engines (generator.num_inference_engines x GPUs of each)"
    return reserve_bundles(num_gpus, "cuda", purpose=purpose, timeout_seconds=timeout_seconds)


def bundles_of_engines(cfg: SkyRLConfig, shared: PlacementGroup | None) -> tuple[PlacementGroup | None, list[int]]:
    """Return the placement group of the engines, and for each engine of one bundle the bundle that it takes: in a group
    shared with workers that of the rank with its number, else one of a group of the engines' own. None on a CPU, where
    an engine is one process and waits for nobody.

    Raises:
        WorkerError: the cluster could not give them in time.
    """
    if shared is not None:
        return shared, order_by_node(nodes_of_bundles(shared))
    count = cfg.generator.num_inference_engines
    if cfg.trainer.placement.resolved_device() == "cpu":
        return None, list(range(count))
    purpose = "the engines (generator.num_inference_engines x GPUs of each)"
    own = reserve_bundles(count, "cuda", num_devices=cfg.generator.engine_world_size, purpose=purpose)
    return own, list(range(count))


def gpus_of_engines(cfg: SkyRLConfig, shared: PlacementGroup | None) -> list[tuple[int, list[str]]]:
    """For each engine that shares several GPUs with workers: the bundle that its process belongs to, and the numbers of
    its GPUs on that node. Empty where engines share nothing, or one GPU each (Ray divides that itself).

    Raises:
        WorkerError: the GPUs of an engine lie on several nodes.
    """
    size = cfg.generator.engine_world_size
    if shared is None or size == 1:
        return []
    where = ray.get(
        [
            _node_and_gpu.options(
                scheduling_strategy=PlacementGroupSchedulingStrategy(shared, placement_group_bundle_index=bundle)
            ).remote()
            for bundle in range(shared.bundle_count)
        ],
        timeout=scheduling_timeout_seconds(),
    )
    in_order = list(dict.fromkeys(node for node, _ in where))  # as ranks take them
    order = sorted(range(shared.bundle_count), key=lambda bundle: (in_order.index(where[bundle][0]), where[bundle][1]))
    engines = []
    for first in range(0, len(order), size):
        bundles = order[first : first + size]
        nodes = {where[bundle][0] for bundle in bundles}
        if len(nodes) > 1:
            raise WorkerError(
                f"an engine of {size} GPUs (generator.inference_engine_*_parallel_size) would lie on {len(nodes)} "
                "nodes; give nodes whose number of free GPUs it divides"
            )
        engines.append((bundles[0], [where[bundle][1] for bundle in bundles]))
    return engines


@ray.remote(num_cpus=0, num_gpus=0.01)
def _node_and_gpu() -> tuple[str, str]:
    return ray.get_runtime_context().get_node_id(), str(ray.get_gpu_ids()[0])


class Placement:
    """Starts worker groups on their devices."""

    def __init__(self, cfg: SkyRLConfig, shared: PlacementGroup | None):
        self._cfg = cfg
        self._shared = shared

    def start_group(
        self,
        name: Literal["policy", "critic", "ref"],
        worker_class: type[ModelWorker],
        args: tuple[Any, ...],
        run_folder: RunFolder,
    ) -> ActorGroup:
        """The processes of one model; `init_model` then waits for them."""
        trainer = self._cfg.trainer
        num_ranks, model = {
            "policy": (trainer.placement.policy_world_size, trainer.policy),
            "critic": (trainer.placement.critic_world_size, trainer.critic),
            "ref": (trainer.placement.ref_world_size, trainer.ref),
        }[name]
        group = ActorGroup(
            name,
            worker_class,
            args,
            num_ranks=num_ranks,
            ranks_per_shard=model.sequence_parallel_size,
            device=trainer.placement.resolved_device(),
            log_folder=run_folder.logs_folder,
            timeout_seconds=trainer.worker_timeout_seconds,
            gpu_share=1.0 if self._shared is None else SHARE_OF_SHARED_GPU,
            placement_group=self._shared,
        )
        _warn_of_groups_across_nodes(group, f"trainer.{name}.sequence_parallel_size", model.sequence_parallel_size)
        _warn_of_groups_across_nodes(group, f"trainer.{name}.fsdp_config.fsdp_size", model.fsdp_config.fsdp_size)
        return group


def _warn_of_groups_across_nodes(group: ActorGroup, setting: str, size: int) -> None:
    across = groups_across_nodes(group.nodes, size) if size > 1 else []
    if across:
        logger.warning(
            f"{len(across)} of {group.num_ranks // size} groups of {setting}={size} ranks lie on several nodes (ranks "
            f"{across[0].start} to {across[0].stop - 1}, for one), and traffic between nodes is slow: the number of "
            "free places of each node should be a multiple of it"
        )

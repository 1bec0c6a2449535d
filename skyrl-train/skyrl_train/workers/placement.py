"""Who runs where, and who holds the device when. The only place that knows whether processes share one.

On a CPU a count of "GPUs" is a count of processes. With `colocate_all` the engines and the workers take turns: engines
sleep while the workers learn, workers are offloaded while the engines write, and weights go through shared memory.
Without it both keep their devices and weights are broadcast.
"""

from typing import Any, Literal

import ray
from ray.util.placement_group import PlacementGroup, placement_group

from skyrl_train.config import SkyRLConfig
from skyrl_train.env_vars import scheduling_timeout_seconds
from skyrl_train.errors import WorkerError
from skyrl_train.inference_engines.inference_engine_client import InferenceEngineClient
from skyrl_train.inference_engines.ray_wrapped_inference_engine import RayEngines, RayWrappedInferenceEngine
from skyrl_train.utils.run_folder import RunFolder
from skyrl_train.weight_sync.base import WeightSyncInitInfo
from skyrl_train.workers.actor_group import ActorGroup
from skyrl_train.workers.model_worker import ModelWorker

SHARE_OF_SHARED_GPU = 0.2  # four kinds of process (policy, critic, ref, engine) fit on one GPU, with room for one more


def make_shared_placement_group(cfg: SkyRLConfig, timeout_seconds: float | None = None) -> PlacementGroup | None:
    """The GPUs that workers and engines share, or None where nothing is shared or there are no GPUs.

    Raises:
        WorkerError: the cluster could not give them in time.
    """
    if not cfg.trainer.placement.colocate_all or cfg.trainer.placement.resolved_device() == "cpu":
        return None
    timeout = scheduling_timeout_seconds() if timeout_seconds is None else timeout_seconds
    num_gpus = cfg.generator.num_inference_engines
    group = placement_group([{"GPU": 1, "CPU": 1}] * num_gpus, strategy="PACK")
    if not group.wait(timeout):
        raise WorkerError(
            f"{num_gpus} GPUs (generator.num_inference_engines) did not become free within {timeout:g} s "
            f"(SKYRL_RAY_PG_TIMEOUT_IN_S); the cluster has {ray.cluster_resources().get('GPU', 0):g}"
        )
    return group


class Placement:
    """Starts worker groups on their devices and hands shared devices back and forth."""

    def __init__(self, cfg: SkyRLConfig, shared: PlacementGroup | None):
        self._cfg = cfg
        self._shared = shared
        self._takes_turns = cfg.trainer.placement.colocate_all
        self._ref_shares_with_policy = cfg.trainer.placement.colocate_policy_ref

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
        return ActorGroup(
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

    async def init_weight_sync(self, policy: ActorGroup, client: InferenceEngineClient) -> None:
        """Policy rank 0 and the engines meet."""
        engines = [engine for engine in client.engines if isinstance(engine, RayWrappedInferenceEngine)]
        infos = [WeightSyncInitInfo(strategy="shared_memory")] * (len(engines) + 1)
        if not self._takes_turns:
            (address, port), *_ = await policy.call_all("rendezvous_point")
            device = self._cfg.trainer.placement.resolved_device()
            backend = self._cfg.generator.resolved_weight_sync_backend(device)
            infos = [
                WeightSyncInitInfo(
                    strategy="broadcast",
                    backend=backend,
                    master_address=address,
                    master_port=port,
                    rank=rank,
                    world_size=len(engines) + 1,
                )
                for rank in range(len(engines) + 1)
            ]
        await policy.call_all("init_weight_sync", RayEngines(engines), infos)

    async def wake_engines(self, client: InferenceEngineClient, tags: list[str]) -> None:
        if self._takes_turns:
            await client.wake_up(tags)

    async def put_engines_to_sleep(self, client: InferenceEngineClient) -> None:
        if self._takes_turns:
            await client.sleep()

    async def offload(self, group: ActorGroup) -> None:
        """`group` gives its device up to the engines."""
        if self._takes_turns:
            await group.call_all("offload_to_cpu")

    async def backload(self, group: ActorGroup) -> None:
        if self._takes_turns:
            await group.call_all("backload_to_gpu")

    async def swap(self, *, out: ActorGroup, into: ActorGroup) -> None:
        """One group makes room on the device for another, if both are on the same."""
        if self._takes_turns or (self._ref_shares_with_policy and {out.name, into.name} == {"policy", "ref"}):
            await out.call_all("offload_to_cpu")
            await into.call_all("backload_to_gpu")

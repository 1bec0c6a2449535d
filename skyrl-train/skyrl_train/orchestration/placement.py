"""Placement of a run: creates the configured launcher and starts worker groups. On CPU, a number of "GPUs" is a number
of processes. `colocation.py` moves groups onto and off a shared device."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from skyrl_train.config import SkyRLConfig
from skyrl_train.orchestration.actor_group import ActorGroup
from skyrl_train.orchestration.launcher import Launcher, MakeWorker
from skyrl_train.utils.run_folder import RunFolder

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup


def make_shared_placement_group(cfg: SkyRLConfig, timeout_seconds: float | None = None) -> "PlacementGroup | None":
    """Reserve the GPUs that workers and engines share. None if nothing is shared, or without GPUs or Ray.

    Raises:
        WorkerError: the cluster could not provide them in time.
    """
    if cfg.trainer.placement.launcher == "inline":
        return None
    from skyrl_train.orchestration.ray_launcher import reserve_shared_gpus  # Ray: heavy, and here only

    return reserve_shared_gpus(cfg, timeout_seconds)


def make_launcher(cfg: SkyRLConfig, shared: "PlacementGroup | None" = None) -> Launcher:
    """Create the launcher of the run's workers and engines (`trainer.placement.launcher`).

    Args:
        shared: on CUDA, the GPUs that workers and engines share.
    """
    if cfg.trainer.placement.launcher == "inline":
        from skyrl_train.orchestration.inline_launcher import InlineLauncher  # torch's sharded tensors: heavy

        return InlineLauncher(cfg)
    from skyrl_train.orchestration.ray_launcher import RayLauncher  # Ray: heavy, and here only

    return RayLauncher(cfg, shared)


class Placement:
    """Starter of worker groups on their devices."""

    def __init__(self, cfg: SkyRLConfig, shared: "PlacementGroup | None"):
        self._cfg = cfg
        self.launcher = make_launcher(cfg, shared)

    def start_group(
        self,
        name: Literal["policy", "critic", "ref"],
        make_worker: MakeWorker,
        args: tuple[object, ...],
        run_folder: RunFolder,
    ) -> ActorGroup:
        """Start the workers of one model; `ActorGroup.init_model` then waits for them."""
        trainer = self._cfg.trainer
        num_ranks: int = getattr(trainer.placement, f"{name}_world_size")
        device = trainer.placement.resolve_device()
        ranks = self.launcher.start_ranks(
            name, make_worker, args, num_ranks=num_ranks, device=device, log_folder=run_folder.logs_folder
        )
        return ActorGroup(
            name,
            ranks,
            device=device,
            timeout_seconds=trainer.worker_timeout_seconds,
        )

    async def check_files(self, data: Sequence[str], run_folder: RunFolder) -> None:
        """Raise ConfigError unless all machines of the run see the same files (run folder, models, `data`)."""
        await self.launcher.check_files(self._cfg, data, run_folder.logs_folder)

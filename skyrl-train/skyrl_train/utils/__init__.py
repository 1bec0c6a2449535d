"""Utilities for all layers."""

import sys
from typing import Any


def initialize_ray(cfg: Any) -> None:
    """Start Ray for a run with these settings (typed, or from Hydra), or join the cluster of RAY_ADDRESS. With
    `trainer.placement.launcher=inline` Ray is not started.

    Raises:
        ConfigError: `trainer.placement.device=cuda`, and the cluster has no GPUs.
    """
    from skyrl_train.config import SkyRLConfig

    typed = cfg if isinstance(cfg, SkyRLConfig) else SkyRLConfig.from_dict(cfg)
    if typed.trainer.placement.launcher == "ray":
        from skyrl_train.utils.ray_cluster import start_ray

        start_ray(typed)
    elif typed.trainer.placement.device == "cuda":
        from skyrl_train.utils.gpus import check_local_gpus

        check_local_gpus()


def shutdown_ray() -> None:
    """Disconnect from Ray, if this process is connected."""
    if "ray" in sys.modules:
        import ray

        ray.shutdown()

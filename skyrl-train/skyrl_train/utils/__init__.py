"""Small things that every layer may use."""

import sys
from typing import Any


def initialize_ray(cfg: Any) -> None:
    """Start Ray for a run with these settings (typed, or as Hydra gives them), or join the cluster of RAY_ADDRESS. With
    `trainer.placement.launcher=inline` no Ray is started.

    Raises:
        ConfigError: `trainer.placement.device=cuda`, and there are no GPUs.
    """
    from skyrl_train.config import SkyRLConfig

    typed = cfg if isinstance(cfg, SkyRLConfig) else SkyRLConfig.from_dict(cfg)
    if typed.trainer.placement.launcher == "ray":
        from skyrl_train.utils.ray_cluster import start_ray

        start_ray(typed)
    elif typed.trainer.placement.device == "cuda":
        from skyrl_train.utils.gpus import check_gpus_here

        check_gpus_here()


def shutdown_ray() -> None:
    """Leave Ray, if this process has anything to do with it."""
    if "ray" in sys.modules:
        import ray

        ray.shutdown()

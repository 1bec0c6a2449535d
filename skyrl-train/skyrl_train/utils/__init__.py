"""Small things that every layer may use."""

from typing import Any


def initialize_ray(cfg: Any) -> None:
    """Starts Ray for a run with these settings (typed, or as Hydra gives them), or joins the cluster of RAY_ADDRESS."""
    from skyrl_train.config import SkyRLConfig
    from skyrl_train.utils.ray_cluster import start_ray

    start_ray(cfg if isinstance(cfg, SkyRLConfig) else SkyRLConfig.from_dict(cfg))

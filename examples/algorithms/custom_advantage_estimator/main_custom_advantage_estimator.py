"""Training with a custom advantage estimator: registered before the settings are checked, and looked up by the trainer,
which is the only process that needs it.
"""

import multiprocessing
from typing import Any

import hydra
import torch
from omegaconf import DictConfig

from skyrl_train.entrypoints.main_base import config_dir, run_experiment
from skyrl_train.utils.ppo_utils import register_advantage_estimator


@register_advantage_estimator("simple_baseline")
def simple_baseline(
    *, token_level_rewards: torch.Tensor, response_mask: torch.Tensor, **_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Score minus the mean score of the batch, whatever the prompt. [B, T] in and out, 0 outside `response_mask`."""
    scores_B = torch.where(response_mask != 0, token_level_rewards, 0.0).sum(dim=-1)
    advantages = torch.where(response_mask != 0, (scores_B - scores_B.mean())[:, None], 0.0)
    return advantages, advantages


@hydra.main(config_path=config_dir, config_name="ppo_base_config", version_base=None)
def main(cfg: DictConfig) -> None:
    run_experiment(cfg)


if __name__ == "__main__":
    multiprocessing.set_start_method("spawn", force=True)
    main()

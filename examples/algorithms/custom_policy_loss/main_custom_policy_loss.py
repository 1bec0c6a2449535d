"""Training with a custom policy loss: registered before the settings are checked, and shipped to the workers by value,
so it may use whatever this file imports.
"""

import multiprocessing

import hydra
import torch
from omegaconf import DictConfig

from skyrl_train.config import AlgorithmConfig
from skyrl_train.entrypoints.main_base import config_dir, run_experiment
from skyrl_train.utils.ppo_utils import register_policy_loss


@register_policy_loss("reinforce")
def reinforce(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    config: AlgorithmConfig,
    loss_mask: torch.Tensor | None = None,
    rollout_logprobs: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss of every token, -A * log pi [B, T]; the trainer reduces it (`loss_reduction`). Metrics are [B, T], too,
    and are averaged over the tokens that train."""
    return -advantages * log_probs, {"log_prob": log_probs.detach()}


@hydra.main(config_path=config_dir, config_name="ppo_base_config", version_base=None)
def main(cfg: DictConfig) -> None:
    run_experiment(cfg)


if __name__ == "__main__":
    multiprocessing.set_start_method("spawn", force=True)
    main()

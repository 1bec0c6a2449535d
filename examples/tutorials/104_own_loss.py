"""Tutorial 104: a custom policy loss and advantage estimator.

python examples/tutorials/104_own_loss.py
"""

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from tiny_run import digit_rows, prepare, print_curve, settings, write_rows

from skyrl_train.algorithms.masking import apply_mask
from skyrl_train.config import AlgorithmConfig
from skyrl_train.entrypoints.main_base import run_experiment
from skyrl_train.utils.ppo_utils import (
    EstimatorRequirements,
    register_advantage_estimator,
    register_policy_loss,
)
from skyrl_train.utils.run_folder import RunFolder
from skyrl_train_testing.estimator_checks import check_advantage_estimator
from skyrl_train_testing.loss_checks import check_policy_loss


# An estimator turns rewards into advantages: how much better than expected a token was. Shapes: B answers, T tokens;
# `index` names the prompt of each answer. Here: 1 for the best answers to a prompt, 0 for the others.
@register_advantage_estimator("best_of_prompt", requires=EstimatorRequirements(critic=False, groups=True))
def best_of_prompt(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: Sequence[Hashable], **_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return advantages and returns [B, T], 0 outside of `response_mask`."""
    scores = torch.where(response_mask != 0, token_level_rewards, 0.0).sum(-1).tolist()
    best = {name: max(s for s, other in zip(scores, index, strict=True) if other == name) for name in index}
    is_best = torch.tensor([float(score == best[name]) for score, name in zip(scores, index, strict=True)])
    advantages = torch.where(response_mask != 0, is_best[:, None], 0.0)
    return advantages, advantages


# A loss gives a number for each token [B, T]; the trainer reduces it, whatever micro-batches and ranks there are. This
# one is REINFORCE. What it returns beside the loss becomes curves, `policy/loss_metrics/...`.
@register_policy_loss("plain_reinforce")
def plain_reinforce(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    config: AlgorithmConfig,
    loss_mask: torch.Tensor | None = None,
    rollout_logprobs: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """-A log pi [B, T]."""
    log_probs, advantages = apply_mask(loss_mask, log_probs, advantages)  # masked positions may hold anything, NaN too
    return -advantages * log_probs, {"share_of_best": advantages}


# The kits find what is wrong with a loss before an hour of training does: padding that changes the result, a gradient
# that is not finite, rows that depend on each other.
check_advantage_estimator(best_of_prompt, AlgorithmConfig())
check_policy_loss(plain_reinforce, AlgorithmConfig())

folder = prepare("104")
write_rows(folder, digit_rows())
chosen = [
    "trainer.algorithm.advantage_estimator=best_of_prompt",
    "trainer.algorithm.policy_loss_type=plain_reinforce",
]
cfg = settings(folder, "environment.env_class=digits", "trainer.max_training_steps=15", *chosen)
run_experiment(cfg)

rewards = print_curve(cfg.trainer.run_dir)
metrics = RunFolder(cfg.trainer.run_dir).read_metrics()
shares = [row["policy/loss_metrics/share_of_best"] for row in metrics]
print("share of tokens of best answers:", [round(share, 2) for share in shares])

"""Losses for preference pairs.

Shapes: B sequences (pairs in adjacent rows), T response tokens, P = B / 2 pairs.
"""

from dataclasses import dataclass
from typing import Annotated

import torch

from skyrl_train.algorithms.losses.contract import LossRequirements, register_policy_loss
from skyrl_train.algorithms.masking import apply_mask
from skyrl_train.config import AlgorithmConfig, BaseConfig
from skyrl_train.config.bounds import Above


@dataclass(kw_only=True)
class DPOConfig(BaseConfig):
    """The `dpo` loss (preference pairs)."""

    beta: Annotated[float, Above(0)] = 0.1
    """Weight of the regularization towards the reference model."""


@register_policy_loss(
    "dpo", settings=DPOConfig, requires=LossRequirements(advantages=False, pairs=True, reference_model=True)
)
def dpo_loss(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor | None,
    config: AlgorithmConfig,
    loss_mask: torch.Tensor | None = None,
    rollout_logprobs: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Compute the loss of direct preference optimization (https://arxiv.org/abs/2305.18290, eq. 7). With s_b = sum_t
    log(pi / pi_ref):

        margin = dpo.beta * (s_chosen - s_rejected)
        loss   = -log sigmoid(margin)

    Every token of both rows has the loss of their pair, so `loss_reduction=sequence_mean` is the mean over pairs. A
    pair in which a row has no tokens has loss 0.

    Args:
        log_probs: [B, T]; rows 2k are chosen, rows 2k + 1 are rejected.
        old_log_probs: [B, T], of the reference model.
        loss_mask: [B, T], 1 on response tokens; None: on all.

    Returns:
        loss [B, T]; pair metrics `dpo_accuracy` (1 if the chosen response has the higher implicit reward) and
        `dpo_margin`.

    Raises:
        ValueError: an odd number of rows.
    """
    if len(log_probs) % 2:
        raise ValueError(f"dpo needs pairs of rows (chosen, rejected); got {len(log_probs)} rows")
    mask = torch.ones_like(log_probs) if loss_mask is None else loss_mask
    log_probs, old_log_probs = apply_mask(mask, log_probs, old_log_probs)
    # Rows 2k and 2k + 1 become columns. Masked positions are 0 in both terms and add nothing to the sums.
    chosen_P, rejected_P = (log_probs - old_log_probs).sum(-1).view(-1, 2).unbind(-1)
    complete_P = (mask != 0).any(-1).view(-1, 2).all(-1)
    margin_P = config.section(DPOConfig).beta * (chosen_P - rejected_P)
    # logsigmoid, not log(sigmoid): the latter is -inf where the margin is very negative.
    loss_P = torch.where(complete_P, -torch.nn.functional.logsigmoid(margin_P), 0.0)

    def expand_to_tokens(value_P: torch.Tensor) -> torch.Tensor:
        # The reduction divides by tokens or sequences, so each token carries the whole loss of its pair.
        return torch.where(mask != 0, value_P.repeat_interleave(2).unsqueeze(-1), 0.0)

    margin_P = margin_P.detach()
    return expand_to_tokens(loss_P), {
        "dpo_accuracy": expand_to_tokens((margin_P > 0).float()),
        "dpo_margin": expand_to_tokens(margin_P),
    }

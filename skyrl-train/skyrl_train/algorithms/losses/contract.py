"""Signatures of policy losses and of token selectors over the whole mini-batch.

A loss is computed per token, and only `reduction.py` reduces it over a mini-batch, so that splits into micro-batches or
over ranks cannot change it. A loss of sequences or pairs assigns their value to each of their tokens: weights that sum
to 1 over a sequence then count it once.
"""

from collections.abc import Callable, Mapping

import torch

from skyrl_train.algorithms.masking import apply_mask
from skyrl_train.config.requirements import (
    LossRequirements,
    PolicyLossRegistry,
    TokenSelectorRegistry,
    register_policy_loss,
    register_token_selector,
)

PolicyLoss = Callable[..., tuple[torch.Tensor, Mapping[str, torch.Tensor]]]
"""Called with `log_probs, old_log_probs, advantages, config, loss_mask, rollout_logprobs`, all tensors [B, T] except
for the AlgorithmConfig; returns the loss of every token [B, T] and metrics by name, each a tensor [B, T] that is
averaged over the tokens of the mini-batch. `rollout_logprobs` is None if the engine reported none, `advantages` if the
loss is registered with `LossRequirements(advantages=False)`. A loss with a token selector of the same name also gets
the keyword `selected_tokens` [B, T] bool."""

TokenSelector = Callable[..., torch.Tensor]
"""Called with `log_probs, old_log_probs, advantages, loss_mask, noise, config`, all tensors [B, T] except for the
AlgorithmConfig, over all rows of a mini-batch on all ranks, before its gradient is computed; returns the tokens that
the loss of the same name treats specially, [B, T] bool. `noise` is uniform in (0, 1), for random draws and ties, and
stays with its row, so that the choice does not depend on the order of rows. Values outside `loss_mask` may be anything.
"""

__all__ = [
    "LOG_RATIO_BOUND",
    "LossRequirements",
    "PolicyLoss",
    "PolicyLossRegistry",
    "TokenSelector",
    "TokenSelectorRegistry",
    "get_required_rollout_logprobs",
    "importance_ratio",
    "register_policy_loss",
    "register_token_selector",
]

LOG_RATIO_BOUND = 20.0
"""Log-ratios are clamped to +- this before exp: e^20 is large enough. Beyond it a ratio is constant and has no
gradient."""


def importance_ratio(log_probs: torch.Tensor, old_log_probs: torch.Tensor) -> torch.Tensor:
    """Compute pi / pi_old per token [B, T], in float32 (float64 for float64 inputs), between e^-20 and e^20."""
    log_probs, old_log_probs = apply_mask(None, log_probs, old_log_probs)
    return (log_probs - old_log_probs).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def get_required_rollout_logprobs(rollout_logprobs: torch.Tensor | None, loss: str) -> torch.Tensor:
    """Return the engine's log-probs. Raises ValueError if they are None; settings rules reject such runs before they
    start."""
    if rollout_logprobs is None:
        raise ValueError(f"the policy loss '{loss}' needs log-probs of the rollout engine; the batch has none")
    return rollout_logprobs

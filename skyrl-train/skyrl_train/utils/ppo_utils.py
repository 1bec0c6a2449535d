"""Public API of `skyrl_train.algorithms`: names under which users import losses, estimators and their registries."""

from skyrl_train.algorithms.advantages import (
    AdvantageEstimatorRegistry,
    EstimatorRequirements,
    normalize_advantages,
    register_advantage_estimator,
)
from skyrl_train.algorithms.critic_loss import critic_loss
from skyrl_train.algorithms.kl import AdaptiveKLController, FixedKLController, compute_approx_kl
from skyrl_train.algorithms.losses import (
    LossRequirements,
    PolicyLossRegistry,
    TokenSelectorRegistry,
    importance_ratio,
    ppo_policy_loss,
    register_policy_loss,
    register_token_selector,
)
from skyrl_train.algorithms.off_policy import Correction, correct_off_policy, mismatch_metrics
from skyrl_train.algorithms.reduction import masked_mean, reduce_loss, token_weights, weighted_sum

__all__ = [
    "AdaptiveKLController",
    "AdvantageEstimatorRegistry",
    "Correction",
    "EstimatorRequirements",
    "FixedKLController",
    "LossRequirements",
    "PolicyLossRegistry",
    "TokenSelectorRegistry",
    "compute_approx_kl",
    "correct_off_policy",
    "critic_loss",
    "importance_ratio",
    "masked_mean",
    "mismatch_metrics",
    "normalize_advantages",
    "ppo_policy_loss",
    "reduce_loss",
    "register_advantage_estimator",
    "register_policy_loss",
    "register_token_selector",
    "token_weights",
    "weighted_sum",
]

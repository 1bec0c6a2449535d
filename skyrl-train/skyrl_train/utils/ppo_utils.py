"""The public door to `skyrl_train.algorithms`: the names under which users import losses, estimators and their
registries."""

from skyrl_train.algorithms.advantages import (
    AdvantageEstimatorRegistry,
    normalize_advantages,
    register_advantage_estimator,
)
from skyrl_train.algorithms.kl import AdaptiveKLController, FixedKLController, compute_approx_kl
from skyrl_train.algorithms.losses import PolicyLossRegistry, ppo_policy_loss, register_policy_loss
from skyrl_train.algorithms.reduction import masked_mean, reduce_loss

__all__ = [
    "AdaptiveKLController",
    "AdvantageEstimatorRegistry",
    "FixedKLController",
    "PolicyLossRegistry",
    "compute_approx_kl",
    "masked_mean",
    "normalize_advantages",
    "ppo_policy_loss",
    "reduce_loss",
    "register_advantage_estimator",
    "register_policy_loss",
]

"""Policy losses. Importing this package registers them with their requirements.

Modules: `surrogates` (importance-weighted policy gradients), `covariance` (special treatment of selected tokens),
`rollout` (relative to the rollout policy), `supervised` and `preference` (without rewards).
"""

from skyrl_train.algorithms.losses.contract import (
    LossRequirements,
    PolicyLoss,
    PolicyLossRegistry,
    TokenSelector,
    TokenSelectorRegistry,
    importance_ratio,
    register_policy_loss,
    register_token_selector,
)
from skyrl_train.algorithms.losses.covariance import clip_cov_policy_loss, kl_cov_policy_loss
from skyrl_train.algorithms.losses.preference import dpo_loss
from skyrl_train.algorithms.losses.rollout import (
    decoupled_ppo_policy_loss,
    dppo_policy_loss,
    rollout_is_policy_loss,
)
from skyrl_train.algorithms.losses.supervised import cross_entropy_loss
from skyrl_train.algorithms.losses.surrogates import (
    cispo_policy_loss,
    dual_clip_policy_loss,
    gspo_policy_loss,
    importance_sampling_policy_loss,
    ppo_policy_loss,
    sapo_policy_loss,
)

__all__ = [
    "LossRequirements",
    "PolicyLoss",
    "PolicyLossRegistry",
    "TokenSelector",
    "TokenSelectorRegistry",
    "cispo_policy_loss",
    "clip_cov_policy_loss",
    "cross_entropy_loss",
    "decoupled_ppo_policy_loss",
    "dpo_loss",
    "dppo_policy_loss",
    "dual_clip_policy_loss",
    "gspo_policy_loss",
    "importance_ratio",
    "importance_sampling_policy_loss",
    "kl_cov_policy_loss",
    "ppo_policy_loss",
    "register_policy_loss",
    "register_token_selector",
    "rollout_is_policy_loss",
    "sapo_policy_loss",
]

"""Requirements of policy losses and advantage estimators, and their registries.

Requirements are data of a registration, so that rules, step plan and trainer need no names of losses or estimators. The
functions are in `skyrl_train.algorithms`, which registers them here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from skyrl_train.config.registry import Registry


@dataclass(frozen=True, kw_only=True)
class LossRequirements:
    """Requirements of a policy loss beyond log-probs and advantages."""

    rollout_log_probs: bool = False
    """Uses the engine's log-probs itself: requires them, and excludes a second correction."""

    rollout_log_probs_with: tuple[str, str] | None = None
    """(setting of `trainer.algorithm`, its choice for which `rollout_log_probs` applies)."""

    advantages: bool = True
    """Reads advantages. False: rewards cannot train with it."""

    pairs: bool = False
    """Rows 2k (chosen) and 2k + 1 (rejected) of every micro-batch belong together."""

    reference_model: bool = False
    """`old_log_probs` are the reference model's."""

    loss_reductions: tuple[str, ...] | None = None
    """Supported choices of `loss_reduction`; None: all."""

    above: tuple[tuple[str, float], ...] = ()
    """(setting of `trainer.algorithm`, the number that it must be above)."""


@dataclass(frozen=True, kw_only=True)
class EstimatorRequirements:
    """Requirements of an advantage estimator."""

    critic: bool | None = None
    """True: requires the critic's `values`. False: ignores them, so that training a critic is useless. None:
    optional."""

    groups: bool = False
    """True if it compares samples of a prompt: a single sample has no baseline or no advantage."""

    whole_trajectories: bool = False
    """True if the advantage of a token depends on later rewards: a row must be a whole trajectory, not one of its
    steps."""

    single_turns: bool = False
    """True if it compares turns with turns: a row must not merge several."""

    single_tokens: bool = False
    """True if the advantage of a token depends only on its own reward."""

    nonnegative_scores: bool = False
    """Divides by the mean score of a prompt: scores must not be negative. Groups with a negative mean are counted
    (`loss/<name>_negative_groups`)."""


PolicyLossRegistry: Registry[Callable[..., Any], LossRequirements] = Registry(
    "policy loss", LossRequirements, ("skyrl_train.algorithms.losses",)
)
TokenSelectorRegistry: Registry[Callable[..., Any], None] = Registry(
    "token selector", lambda: None, ("skyrl_train.algorithms.losses",)
)
AdvantageEstimatorRegistry: Registry[Callable[..., Any], EstimatorRequirements] = Registry(
    "advantage estimator", EstimatorRequirements, ("skyrl_train.algorithms.advantages",)
)

register_policy_loss = PolicyLossRegistry.build_decorator
register_token_selector = TokenSelectorRegistry.build_decorator
register_advantage_estimator = AdvantageEstimatorRegistry.build_decorator

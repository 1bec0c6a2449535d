"""Invariance checks of losses, estimators, reductions and KL estimates.

    from skyrl_train_testing.invariances import check_policy_loss

    check_policy_loss(my_loss)

runs every rule that applies and raises one InvarianceError with all violations, their numbers and the usual cause.
`check_everything_registered` checks all registered functions, built-in and custom.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import get_args

from skyrl_train.algorithms.advantages import AdvantageEstimatorRegistry
from skyrl_train.algorithms.critic_loss import critic_loss
from skyrl_train.algorithms.kl import KLEstimator, compute_approx_kl
from skyrl_train.algorithms.losses import (
    PolicyLossRegistry,
    TokenSelectorRegistry,
)
from skyrl_train.algorithms.reduction import LossReduction, token_weights
from skyrl_train.config import AlgorithmConfig
from skyrl_train_testing.estimator_checks import check_advantage_estimator
from skyrl_train_testing.findings import INVARIANCES, InvarianceError, Violation
from skyrl_train_testing.loss_checks import check_critic_loss, check_kl_estimator, check_policy_loss
from skyrl_train_testing.model_checks import check_model_forward
from skyrl_train_testing.reduction_checks import check_reduction

__all__ = [
    "INVARIANCES",
    "NOT_MEANT_TO_HOLD",
    "InvarianceError",
    "Violation",
    "check_advantage_estimator",
    "check_critic_loss",
    "check_everything_registered",
    "check_kl_estimator",
    "check_model_forward",
    "check_policy_loss",
    "check_reduction",
]

_OF_THE_BATCH = "its mean and standard deviation are those of the whole batch"

NOT_MEANT_TO_HOLD: Mapping[str, Mapping[str, str]] = {
    "gae": {"group_constant": "its baseline is the critic", "other_groups": _OF_THE_BATCH},
    "maxrl": {"group_constant": "it divides by the group's mean, which a constant moves"},
    "reinforce++": {"group_constant": "its baseline is the mean of the batch", "other_groups": _OF_THE_BATCH},
    "reinforce++_baseline": {"other_groups": _OF_THE_BATCH},
    "token_reward": {"group_constant": "it has no baseline"},
    "seq_mean_token_sum_norm": {"sums_to_one": "it divides by a constant in place of the number of tokens"},
}
"""Invariances that are not meant to hold, each with the reason, by registered name."""


def check_everything_registered(
    config: AlgorithmConfig | None = None, exempt: Mapping[str, Mapping[str, str]] | None = None
) -> None:
    """Check every registered policy loss, estimator, reduction, KL estimate and critic loss, built-in and custom.

    Args:
        config: the settings they are run with. None: the defaults.
        exempt: of custom functions, by registered name: invariances that do not apply, with reasons.

    Raises:
        InvarianceError: lists all violations of all functions.
    """
    excused = {**NOT_MEANT_TO_HOLD, **(exempt or {})}
    violations: list[Violation] = []

    def run(name: str, check: Callable[..., None]) -> None:
        try:
            check(name=name, exempt=excused.get(name))
        except InvarianceError as error:
            violations.extend(error.violations)

    selectors = TokenSelectorRegistry.list_available()
    for name in PolicyLossRegistry.list_available():
        check = partial(
            check_policy_loss,
            PolicyLossRegistry.get(name),
            config,
            TokenSelectorRegistry.get(name) if name in selectors else None,
            reads_advantages=PolicyLossRegistry.get_requirements(name).advantages,
            rows_per_unit=2 if PolicyLossRegistry.get_requirements(name).pairs else 1,
        )
        run(name, check)
    for name in AdvantageEstimatorRegistry.list_available():
        run(name, partial(check_advantage_estimator, AdvantageEstimatorRegistry.get(name), config))
    for reduction in get_args(LossReduction):
        run(reduction, partial(check_reduction, partial(token_weights, reduction=reduction)))
    for kind in get_args(KLEstimator):
        run(kind, partial(check_kl_estimator, partial(compute_approx_kl, kl_estimator_type=kind)))
    run("critic_loss", partial(check_critic_loss, critic_loss, config))
    if violations:
        raise InvarianceError(violations)

"""Metrics of a training step, from the sums counted by its workers."""

import math
from collections.abc import Sequence

from loguru import logger

from skyrl_train.training_backends.base import MetricSums, merge_metric_sums

_OWN_NAMES = frozenset({"policy_entropy", "policy_kl", "teacher_kl", "values_clipfrac", "router_auxiliary_loss"})
_RENAMED = {"values": "values_mean"}


def step_metrics(
    name: str, losses: Sequence[Sequence[MetricSums]], steps: Sequence[dict[str, float]]
) -> dict[str, float]:
    """Compute means over the optimizer steps of a training step, under `<name>/`.

    Loss components are sums over a mini-batch, other numbers are means over its tokens (metrics of the loss function
    under `<name>/loss_metrics/`), maxima are over all steps.

    Args:
        losses: [optimizer step][data-parallel rank] metric sums.
        steps: return value of `optim_step` for each optimizer step.
    """
    totals: dict[str, float] = {}
    for ranks in losses:
        sums = merge_metric_sums(ranks)
        num_tokens = max(1.0, sums.pop("num_tokens", 0.0))
        for key, value in sums.items():
            kind, metric = key.split("/", 1)
            metric = _RENAMED.get(metric, metric)
            if kind == "max":
                own = f"{name}/{metric}_max"
                totals[own] = max(totals.get(own, 0.0), value)
            elif kind == "loss" or metric in _OWN_NAMES or metric in _RENAMED.values():
                own = f"{name}/{metric}"
                totals[own] = totals.get(own, 0.0) + (value if kind == "loss" else value / num_tokens) / len(losses)
            else:
                own = f"{name}/loss_metrics/{metric}"
                totals[own] = totals.get(own, 0.0) + value / num_tokens / len(losses)
    for step in steps:
        for key, value in step.items():
            own = f"{name}/{key}"
            totals[own] = totals.get(own, 0.0) + value / len(steps)
    return totals


def first_ratio_metrics(ranks: Sequence[MetricSums], tolerance: float) -> dict[str, float]:
    """Compute the largest deviation of a token's probability ratio from 1 in the first optimizer step of a training
    step, and raise an alarm if it exceeds rounding, since no weight had changed before.

    Args:
        ranks: metric sums of the first optimizer step.
        tolerance: `trainer.algorithm.first_ratio_tolerance`.
    """
    deviations = [sums.get("max/ratio_deviation", 0.0) for sums in ranks]
    deviation = math.nan if any(map(math.isnan, deviations)) else max(deviations)  # max() may ignore NaN
    is_off = not deviation <= tolerance  # NaN is off as well
    if is_off:
        logger.warning(
            "ALARM: before the first update of this step, the probability ratio of a token differs from 1 by "
            f"{deviation:.3g}, more than trainer.algorithm.first_ratio_tolerance={tolerance:g}. The log-probs at the "
            "start of the step are computed differently from those in training: check dropout, layers that depend on "
            "other rows of the batch, weights that changed in between, and low precision (then raise the tolerance)"
        )
    value = deviation if math.isfinite(deviation) else math.inf
    return {"policy/first_ratio_max_deviation": value, "policy/ratio_alarms": float(is_off)}

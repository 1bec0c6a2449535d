"""Merges the results of a request's micro-batches by the rules that clients use for chunks."""

from collections.abc import Callable, Sequence

import numpy as np

from tx.tinker.types import PassOutput

REDUCTIONS: dict[str, Callable[[Sequence[float], Sequence[float]], float]] = {
    "sum": lambda values, weights: float(sum(values)),
    "mean": lambda values, weights: float(np.average(values, weights=weights)),
    "min": lambda values, weights: min(values),
    "max": lambda values, weights: max(values),
}
"""Reductions by the suffix of a metric's name after `:`: values and weights of the parts -> one number."""


def merge_outputs(outputs: Sequence[PassOutput], weights: Sequence[float] | None = None) -> PassOutput:
    """Concatenate log-probs, and reduce metrics by the suffix of their names.

    Args:
        outputs: at least one; a metric may be missing in some
        weights: for means; None: the number of data
    """
    weights = [len(output.logprobs) for output in outputs] if weights is None else weights
    if len(outputs) == 1:
        return outputs[0]
    names = dict.fromkeys(name for output in outputs for name in output.metrics)
    metrics = {}
    for name in names:
        parts = [(o.metrics[name], w) for o, w in zip(outputs, weights, strict=True) if name in o.metrics]
        reduce = REDUCTIONS[name.rpartition(":")[2]]
        metrics[name] = reduce([value for value, _ in parts], [weight for _, weight in parts])
    return PassOutput(logprobs=[array for output in outputs for array in output.logprobs], metrics=metrics)

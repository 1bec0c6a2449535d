"""Invariances of reductions: weights that depend on the loss mask (and on the prompts of the rows) alone.

Shapes: B sequences of a mini-batch, R response columns.
"""

from collections.abc import Callable, Mapping

import torch

from skyrl_train.algorithms.reduction import weighted_sum
from skyrl_train.training_batch import TensorBatch
from skyrl_train_testing.findings import Findings
from skyrl_train_testing.float64 import in_float64
from skyrl_train_testing.loss_checks import make_policy_batch
from skyrl_train_testing.variants import iter_variants, split_rows


def check_reduction(
    weights_of: Callable[..., torch.Tensor],
    max_seq_len: int = 20,
    *,
    name: str | None = None,
    exempt: Mapping[str, str] | None = None,
) -> None:
    """Run every invariance of reductions: `weights_of(loss_mask, max_seq_len=..., index=...)` gives weights [B, R], and
    the reduced loss is the sum of weights * loss.

    Args:
        max_seq_len: the constant that it may divide by, in tokens.
        name: what to call it in the error. None: the function's own name.
        exempt: invariances that are not meant to hold for this reduction, each with the reason.

    Raises:
        InvarianceError: lists all that is violated, with the numbers.
    """
    findings = Findings(f"the reduction {name or getattr(weights_of, '__name__', repr(weights_of))}", exempt)
    policy = make_policy_batch()
    mask, losses = policy.tensor("loss_mask"), policy.tensor("advantages")
    batch = TensorBatch(losses=losses, loss_mask=mask)
    names = ["b", "a", "a", "c", "b", "d", "a", "c", "a", "b", "c", "a"]  # all of d is masked out
    kept = mask != 0

    def weights(batch: TensorBatch, names: list[str]) -> torch.Tensor:
        given = batch.tensor("loss_mask")
        weights = weights_of(given, max_seq_len=max_seq_len, index=names)
        if not isinstance(weights, torch.Tensor) or weights.shape != given.shape:
            raise ValueError(f"it must give weights {tuple(given.shape)}, one a token")
        return weights

    with findings.attempt("form", "on an ordinary mini-batch"):
        expected = weights(batch, names)
    if findings.has("form"):
        findings.finish()
    findings.check_finite("on an ordinary mini-batch", "the weight", expected, torch.ones_like(kept))
    nothing = torch.zeros_like(expected)
    findings.compare("masked_output", "where the mask is 0", "the weight", nothing, expected, ~kept, absolute=0)
    total, one = expected.sum(), torch.ones(())
    findings.compare("sums_to_one", "on an ordinary mini-batch", "the sum of all weights", one, total)
    if not (expected[kept] > 0).all():
        findings.add("gradient", f"the weight of {int((expected[kept] <= 0).sum())} tokens of the mask is not above 0")
    given, version = batch.tensor("loss_mask"), batch.tensor("loss_mask")._version
    with findings.attempt("deterministic", "the second time"):
        findings.compare("deterministic", "the second time", "the weight", expected, weights(batch, names), absolute=0)
    if given._version != version:
        findings.add("inputs_unchanged", "the loss mask was changed in place")
    for variant in iter_variants(batch, {"losses": "loss_mask"}):
        with findings.attempt(variant.invariance, variant.words):
            own = weights(variant.batch, [names[row] for row in variant.order.tolist()])
            findings.compare(variant.invariance, variant.words, "the weight", expected, variant.back(own))
            reduced, got = weighted_sum(losses, expected), weighted_sum(variant.batch.tensor("losses"), own)
            findings.compare(variant.invariance, variant.words, "the reduced loss", reduced, got)
    for invariance, words, parts in split_rows(len(batch)):
        got = torch.stack([weighted_sum(losses[rows], expected[rows]) for rows in parts]).sum()
        findings.compare(invariance, words, "the reduced loss", weighted_sum(losses, expected), got)
    with findings.attempt("empty_rows", "without the rows that are masked out"):
        full = kept.any(dim=1)
        own = weights(batch.rows(full), [name for name, is_full in zip(names, full.tolist(), strict=True) if is_full])
        words = "without the rows that are masked out"
        findings.compare("empty_rows", words, "the weight", expected[full], own)
    with findings.attempt("finite", "on a mini-batch that is masked out"):
        empty = weights(TensorBatch(losses=losses, loss_mask=torch.zeros_like(mask)), names)
        findings.compare("finite", "on a mini-batch that is masked out", "the weight", nothing, empty, absolute=0)
    with findings.attempt("group_names", "with other names"):
        renamed = weights(batch, [{"a": "d", "b": "a", "c": "b", "d": "c"}[name] for name in names])
        findings.compare("group_names", "with each other's names", "the weight", expected, renamed)
    with findings.attempt("float64", "in float64"):
        exact = in_float64(lambda: weights(TensorBatch(loss_mask=mask.double()), names))
        findings.compare("float64", "in float64", "the weight", exact.to(expected.dtype), expected)
    findings.finish()

"""Invariances of per-token losses: policy losses (alone or with a token selector), the critic's loss, KL estimates.

A loss is run as a worker runs it: on some rows of a mini-batch at a time, reduced by weights of the whole mini-batch,
    with a gradient in `log_probs`. Masked tokens hold garbage, which must not affect the unmasked ones.

Shapes: B rows of a mini-batch, R response columns.
"""

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

import torch

from skyrl_train.algorithms.reduction import token_weights, weighted_sum
from skyrl_train.config import AlgorithmConfig
from skyrl_train.training_batch import TensorBatch
from skyrl_train_testing.findings import Findings
from skyrl_train_testing.float64 import in_float64
from skyrl_train_testing.variants import iter_variants, split_rows

Outputs = dict[str, torch.Tensor]
"""Outputs of a function for each token [B, R], by a descriptive name: the loss, the gradient, each metric."""

PerTokenLoss = Callable[[TensorBatch, torch.Tensor], tuple[torch.Tensor, Mapping[str, torch.Tensor]]]
"""Common form of all losses: (rows of a batch, their variable [b, R]) -> loss and metrics."""

_SELECTOR_COLUMNS = ("log_probs", "old_log_probs", "advantages", "loss_mask", "noise")
_POLICY_COLUMNS = ("log_probs", "old_log_probs", "advantages", "rollout_logprobs", "noise")


def check_policy_loss(
    loss: Callable[..., Any],
    config: AlgorithmConfig | None = None,
    selector: Callable[..., torch.Tensor] | None = None,
    *,
    name: str | None = None,
    reads_advantages: bool = True,
    rows_per_unit: int = 1,
    exempt: Mapping[str, str] | None = None,
) -> None:
    """Run every invariance of policy losses: `loss(log_probs, old_log_probs, advantages, config, loss_mask,
    rollout_logprobs)`, tensors [B, R], gives the loss of every token and metrics by name, all [B, R].

    Args:
        config: the settings it is run with. None: the defaults.
        selector: what `register_token_selector` has under the loss's name, if anything: `selector(log_probs,
            old_log_probs, advantages, loss_mask, noise, config)`, over the whole mini-batch; the loss then gets
            `selected_tokens`.
        name: what to call it in the error. None: the function's own name.
        reads_advantages: False for a loss that learns without any, such as cross entropy.
        rows_per_unit: 2 for a loss of pairs (rows 2k, 2k + 1): pairs then stay together.
        exempt: invariances that are not meant to hold for this loss, each with the reason.

    Raises:
        InvarianceError: lists all that is violated, with the numbers.
    """
    config = AlgorithmConfig() if config is None else deepcopy(config)
    findings = Findings(f"the policy loss {name or _get_name(loss)}", exempt)
    batch = make_policy_batch(rows_per_unit)

    def select(batch: TensorBatch) -> TensorBatch:
        if selector is None:
            return batch
        columns = [batch.tensor(name) for name in _SELECTOR_COLUMNS]
        selected = selector(*columns, config)
        if selected.shape != columns[0].shape or selected.dtype != torch.bool:
            raise ValueError(f"the selector must give bools {tuple(columns[0].shape)}; got {_looks(selected)}")
        return TensorBatch(dict(batch), selected_tokens=selected)

    def per_token(rows: TensorBatch, log_probs: torch.Tensor) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        more = {} if selector is None else {"selected_tokens": rows.tensor("selected_tokens")}
        old, advantages, mask = (rows.tensor(name) for name in ("old_log_probs", "advantages", "loss_mask"))
        return loss(log_probs, old, advantages, config, mask, rows.tensor("rollout_logprobs"), **more)

    masks = {column: "loss_mask" for column in _POLICY_COLUMNS}
    _check(findings, per_token, batch, "log_probs", masks, config, select, rows_per_unit)
    with findings.attempt("gradient", "at the first optimizer step, where all ratios are 1"):
        now = batch.tensor("log_probs")
        first = TensorBatch(dict(batch), old_log_probs=now, rollout_logprobs=now)
        _check_gradient_of_first_step(findings, per_token, select(first), reads_advantages)
    findings.finish()


def check_critic_loss(
    loss: Callable[..., Any],
    config: AlgorithmConfig | None = None,
    *,
    name: str | None = None,
    exempt: Mapping[str, str] | None = None,
) -> None:
    """Run every invariance of critic losses: `loss(values, old_values, returns, config)`, tensors [B, R], gives the
    loss of every token and metrics by name, all [B, R]. Arguments and errors: see `check_policy_loss`."""
    config = AlgorithmConfig() if config is None else deepcopy(config)
    findings = Findings(f"the critic loss {name or _get_name(loss)}", exempt)
    policy = make_policy_batch()
    mask, returns = policy.tensor("loss_mask"), policy.tensor("advantages")
    values = torch.where(mask != 0, returns + policy.tensor("noise") - 0.5, 0.0)
    old_values = torch.where(mask != 0, values + 0.3 * policy.tensor("noise"), 0.0)
    batch = TensorBatch(values=values, old_values=old_values, returns=returns, loss_mask=mask)

    def per_token(rows: TensorBatch, values: torch.Tensor) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        return loss(values, rows.tensor("old_values"), rows.tensor("returns"), config)

    masks = {column: "loss_mask" for column in ("values", "old_values", "returns")}
    _check(findings, per_token, batch, "values", masks, config)
    with findings.attempt("gradient", "at the first optimizer step, where values are the old ones"):
        first = TensorBatch(dict(batch), old_values=values)
        gradient = _compute_outputs(per_token, first, "values")["the gradient"]
        _check_slope(findings, "from the value towards the return", gradient, values - returns, mask != 0)
    findings.finish()


def check_kl_estimator(
    estimator: Callable[..., torch.Tensor], *, name: str | None = None, exempt: Mapping[str, str] | None = None
) -> None:
    """Run every invariance of KL estimates: `estimator(log_probs, log_probs_base, loss_mask)`, tensors [B, R], gives
    one number a token, 0 outside the mask. Arguments and errors: see `check_policy_loss`."""
    findings = Findings(f"the KL estimator {name or _get_name(estimator)}", exempt)
    policy = make_policy_batch()
    mask, log_probs = policy.tensor("loss_mask"), policy.tensor("log_probs")
    batch = TensorBatch(log_probs=log_probs, log_probs_base=policy.tensor("old_log_probs"), loss_mask=mask)

    def per_token(rows: TensorBatch, log_probs: torch.Tensor) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        return estimator(log_probs, rows.tensor("log_probs_base"), rows.tensor("loss_mask")), {}

    masks = {column: "loss_mask" for column in ("log_probs", "log_probs_base")}
    _check(findings, per_token, batch, "log_probs", masks, None)
    with findings.attempt("masked_output", "with ordinary numbers everywhere"):
        everywhere = _fill(batch, masks)
        kl = _compute_outputs(per_token, everywhere, "log_probs")["the loss"]
        findings.compare("masked_output", "where the mask is 0", "the estimate", torch.zeros_like(kl), kl, mask == 0)
    with findings.attempt("gradient", "where the policy is not the reference"):
        gradient = _compute_outputs(per_token, batch, "log_probs")["the gradient"]
        _check_slope(findings, "where the policy is not the reference", gradient, None, mask != 0)
    findings.finish()


def make_policy_batch(rows_per_unit: int = 1) -> TensorBatch:
    """A mini-batch [12, 7] as workers get it: ragged rows, an environment's words inside some, failed ones, ratios of
    1/4 to 4; 0 where the loss mask is 0."""
    draw = torch.Generator().manual_seed(0)
    size = (12, 7)
    lengths = torch.tensor([7, 5, 6, 3, 4, 4, 7, 2, 1, 6, 5, 7])
    mask = (torch.arange(size[1]) < lengths[:, None]).float()
    mask[0, 2:4] = mask[6, 1] = mask[9, 0] = 0  # the environment spoke, in row 9 first
    mask[4:6] = 0  # failed
    if rows_per_unit == 1:
        mask[7] = 0
    log_probs = -0.2 - 2 * torch.rand(size, generator=draw)
    old_log_probs = log_probs + 0.3 * torch.randn(size, generator=draw)
    old_log_probs[1, :4] = log_probs[1, :4] + torch.tensor([1.4, -1.4, 1.0, -1.0])
    rollout_logprobs = old_log_probs + 0.1 * torch.randn(size, generator=draw)
    advantages = torch.randn(size, generator=draw) * 1.5
    advantages[1, :4] = torch.tensor([1.0, -1.0, -1.0, 1.0])
    noise = torch.rand(size, generator=draw)
    columns = zip(_POLICY_COLUMNS, (log_probs, old_log_probs, advantages, rollout_logprobs, noise), strict=True)
    return TensorBatch({name: torch.where(mask != 0, column, 0.0) for name, column in columns}, loss_mask=mask)


# ---- what is the same for all kinds


def _check(
    findings: Findings,
    per_token: PerTokenLoss,
    batch: TensorBatch,
    variable: str,
    masks: Mapping[str, str],
    config: AlgorithmConfig | None,
    select: Callable[[TensorBatch], TensorBatch] = lambda batch: batch,
    unit: int = 1,
) -> None:
    """Run the invariances of any function of tokens. Stops early where its form is wrong."""
    kept = batch.tensor("loss_mask") != 0
    config_before = deepcopy(config)
    with findings.attempt("form", "on an ordinary mini-batch"):
        expected = _compute_outputs(per_token, select(batch), variable)
    if findings.has("form"):
        findings.finish()

    def compare(invariance: str, words: str, outputs: Callable[[], Outputs]) -> None:
        with findings.attempt(invariance, words):
            got = outputs()
            for what, value in expected.items():
                findings.compare(invariance, words, what, value, got[what], kept)

    for what, value in expected.items():
        findings.check_finite("on an ordinary mini-batch", what, value, kept)
    findings.check_deterministic(
        "twice on the same mini-batch", lambda: _compute_outputs(per_token, select(batch), variable)
    )
    _check_inputs(findings, per_token, select(batch), variable)
    for variant in iter_variants(batch, masks, unit=unit):
        compare(
            variant.invariance,
            variant.words,
            lambda variant=variant: {
                what: variant.back(value)
                for what, value in _compute_outputs(per_token, select(variant.batch), variable).items()
            },
        )
    for invariance, words, parts in split_rows(len(batch), unit):
        compare(invariance, words, lambda parts=parts: _compute_outputs(per_token, select(batch), variable, parts))
    doubles = TensorBatch({name: column.double() for name, column in batch.items() if column is not None})
    compare("float64", "in float64", lambda: in_float64(lambda: _compute_outputs(per_token, select(doubles), variable)))
    with findings.attempt("masked_gradient", "with ordinary numbers everywhere"):
        gradient = _compute_outputs(per_token, select(_fill(batch, masks)), variable)["the gradient"]
        nothing = torch.zeros_like(gradient)
        findings.compare("masked_gradient", "where the mask is 0", "the gradient", nothing, gradient, ~kept, absolute=0)
    if config != config_before:
        findings.add("inputs_unchanged", "the config was changed")


def _compute_outputs(
    per_token: PerTokenLoss, batch: TensorBatch, variable: str, parts: list[torch.Tensor] | None = None
) -> Outputs:
    """Compute what a worker computes, in parts with the weights of the whole mini-batch: the loss of every token,
    metrics, and the gradient of the reduced loss in the variable.
    """
    mask = batch.tensor("loss_mask")
    weights = token_weights(mask, "sequence_mean").to(mask.dtype)
    leaf = batch.tensor(variable).detach().clone().requires_grad_()
    outputs: Outputs = {}
    total = leaf.new_zeros(())
    for rows in [torch.arange(len(batch))] if parts is None else parts:
        loss, metrics = _check_form(per_token(batch.rows(rows), leaf[rows]), (len(rows), leaf.shape[1]))
        total = total + weighted_sum(loss, weights[rows])
        for name, value in {
            "the loss": loss,
            **{f"metric '{name}'": metric for name, metric in metrics.items()},
        }.items():
            outputs.setdefault(name, torch.zeros_like(leaf, requires_grad=False))[rows] = value.detach().to(leaf.dtype)
    gradient = None
    if total.requires_grad:
        [gradient] = torch.autograd.grad(total, [leaf], allow_unused=True)
    outputs["the gradient"] = torch.zeros_like(leaf) if gradient is None else gradient
    return {name: value.detach() for name, value in outputs.items()}


def _check_form(answer: Any, size: tuple[int, int]) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
    if not isinstance(answer, tuple) or len(answer) != 2 or not isinstance(answer[1], Mapping):
        raise ValueError(f"it must give a loss and a dict of metrics; got {type(answer).__name__}")
    loss, metrics = answer
    for name, value in {"the loss": loss, **metrics}.items():
        if not isinstance(value, torch.Tensor) or tuple(value.shape) != size:
            raise ValueError(f"{name} must be a tensor {size}, one number a token; got {_looks(value)}")
    return loss, metrics


def _check_inputs(findings: Findings, per_token: PerTokenLoss, batch: TensorBatch, variable: str) -> None:
    inputs = TensorBatch({name: column.clone() for name, column in batch.items() if column is not None})
    watched = inputs.tensor(variable).requires_grad_() * 1  # no leaf: torch itself forbids to change one in place
    versions = {name: column._version for name, column in inputs.items() if column is not None} | {variable: 0}
    inputs[variable] = watched
    with findings.attempt("inputs_unchanged", "on an ordinary mini-batch"):
        per_token(inputs, watched)
    for name, version in versions.items():
        if inputs.tensor(name)._version != version:
            findings.add("inputs_unchanged", f"{name} was changed in place")


def _check_gradient_of_first_step(
    findings: Findings, per_token: PerTokenLoss, batch: TensorBatch, reads_advantages: bool
) -> None:
    """Policy, old policy and engine agree: every token learns, and in the direction of its advantage. Tokens that a
    selector took out may rest."""
    learning = batch.tensor("loss_mask") != 0
    if "selected_tokens" in batch:
        learning = learning & ~batch.tensor("selected_tokens")
    gradient = _compute_outputs(per_token, batch, "log_probs")["the gradient"]
    direction = -batch.tensor("advantages") if reads_advantages else None
    _check_slope(findings, "at the first optimizer step, against the advantage", gradient, direction, learning)


def _check_slope(
    findings: Findings, words: str, gradient: torch.Tensor, direction: torch.Tensor | None, learning: torch.Tensor
) -> None:
    """Check, where `learning`, that the gradient is not 0 and has the sign of `direction` (None: any)."""
    still = learning & (gradient == 0)
    for row, token in still.nonzero()[:1].tolist():
        count = f"{int(still.sum())} of {int(learning.sum())} tokens"
        findings.add("gradient", f"{words}: the gradient of {count} is 0, of row {row}, token {token} for one")
    if direction is None:
        return
    wrong = learning & (gradient != 0) & (gradient.sign() != direction.sign())
    for row, token in wrong.nonzero()[:1].tolist():
        sign = "positive" if direction[row, token] > 0 else "negative"
        got = f"{gradient[row, token].item():.7g}"
        count = f"{int(wrong.sum())} of {int(learning.sum())}"
        findings.add(
            "gradient_direction",
            f"{words}: the gradient of row {row}, token {token} must be {sign}; got {got} ({count} tokens are wrong)",
        )


def _fill(batch: TensorBatch, masks: Mapping[str, str]) -> TensorBatch:
    """The batch with ordinary numbers where the mask is 0."""
    draw = torch.Generator().manual_seed(2)
    filled = dict(batch)
    for name, mask in masks.items():
        column = batch.tensor(name)
        filled[name] = torch.where(batch.tensor(mask) != 0, column, -torch.rand(column.shape, generator=draw))
    return TensorBatch(filled)


def _looks(value: Any) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)


def _get_name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", repr(function))

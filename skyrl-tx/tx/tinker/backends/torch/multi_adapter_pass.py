"""One forward and backward of the base model over the concatenated data of several models. From the last hidden states
on, output layer, loss and gradient are computed per model.

With several processes, each computes a share of every model's data, with weights gathered for the pass. A model's
result is merged from their log-probs, as if one process had computed it; its gradient is reduced over processes, and
each keeps a shard.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Concatenate, ParamSpec

import numpy as np
import torch

from tx.errors import ModelError
from tx.tinker.backends.base import Failure
from tx.tinker.backends.torch.adapters import Adapter, set_parts
from tx.tinker.backends.torch.frozen_model import FrozenModel
from tx.tinker.backends.torch.head import Targets
from tx.tinker.backends.torch.layout import Segment, build_layout
from tx.tinker.backends.torch.losses import LOSSES, LossResult, collect_loss_inputs
from tx.tinker.backends.torch.rank_group import RankGroup
from tx.tinker.types import Datum, PassOutput, TrainingPass

logger = logging.getLogger(__name__)

_NOBODYS = [Datum(np.zeros(1, np.int64), {})]
"""Dummy data of a rank without data: all ranks must take part in the pass."""

Outcome = PassOutput | Failure
P = ParamSpec("P")


def run_together(
    base: FrozenModel, rank_group: RankGroup, passes: Sequence[TrainingPass], adapters: Sequence[Adapter]
) -> list[Outcome]:
    """Run passes jointly. Gradients are accumulated at the very end, after everything that may fail. A collective.

    Args:
        passes: all forward only, or none.
        adapters: of each.

    Raises:
        Exception: the base model could not be computed; nothing was added.
    """
    with_gradient = not passes[0].forward_only
    owners = [rank_group.assign_owners(each.data) for each in passes]
    mine = [_filter_share(each, of_data, rank_group.rank) for each, of_data in zip(passes, owners, strict=True)]
    here = [i for i, each in enumerate(mine) if each.data]
    layout = build_layout([mine[i].data for i in here] or [_NOBODYS], base.device)
    # Not strict: the dummy data of a rank without data have a segment, but no model.
    segments = dict(zip(here, layout.segments, strict=False))
    # Vectors of their own: if the pass fails, what was accumulated before is unchanged. Models without data on this
    # rank have one as well, because all ranks must take part in each sum below.
    gradients = [adapter.zero_gradient() if with_gradient else None for adapter in adapters]
    weights = [adapter.gather() for adapter in adapters]
    parts = {i: adapters[i].parts(segments[i].start, segments[i].end, weights[i], gradients[i]) for i in here}
    root = torch.zeros((), device=base.device, requires_grad=True) if with_gradient else None
    set_parts(base.layers, list(parts.values()), layout.input_ids.shape[1], root)
    try:
        with torch.set_grad_enabled(with_gradient):
            hidden = base.compute_hidden_states(layout)
        # Rows of a model whose loss fails stay 0: it does not disturb the one backward of all models.
        of_hidden = torch.zeros_like(hidden) if with_gradient else None
        outcomes = {
            i: _score(mine[i], base, segments[i], parts[i].get(base.head_name), hidden, of_hidden) for i in here
        }
        if of_hidden is not None and hidden.requires_grad:
            hidden.backward(of_hidden)
    finally:
        # After the backward, not before: with gradient checkpointing it runs the layers' forward again.
        set_parts(base.layers, (), 0, None)
    results = _merge_shares(rank_group, passes, owners, outcomes)
    # Every rank has put together the same results, so all agree on which gradients to sum, and in which order. One that
    # skipped a sum would leave the others waiting until the timeout.
    for adapter, gradient, result in zip(adapters, gradients, results, strict=True):
        if gradient is not None and isinstance(result, PassOutput):
            adapter.accumulate(gradient)
    return results


def to_failure(each: TrainingPass, error: Exception) -> Failure:
    """Wrap an error without its traceback, which would keep the pass's tensors alive; server errors are logged."""
    if not isinstance(error, ModelError):
        logger.error("a pass of model %s failed", each.model_id, exc_info=error)
    return Failure(error.with_traceback(None))


def _filter_share(each: TrainingPass, owners: list[int], rank: int) -> TrainingPass:
    return replace(each, data=[datum for datum, owner in zip(each.data, owners, strict=True) if owner == rank])


def _handle_failure_alone(compute: Callable[Concatenate[TrainingPass, P], Outcome]) -> Callable[..., Outcome]:
    """Convert an error into a failure of the current pass, so that other passes continue."""

    def guarded(each: TrainingPass, *args: P.args, **kwargs: P.kwargs) -> Outcome:
        try:
            return compute(each, *args, **kwargs)
        except Exception as error:  # this model's alone
            return to_failure(each, error)

    return guarded


@_handle_failure_alone
def _score(
    each: TrainingPass,
    base: FrozenModel,
    segment: Segment,
    part: Any,
    hidden: torch.Tensor,
    of_hidden: torch.Tensor | None,
) -> Outcome:
    """Compute a model's log-probs and loss, and the gradient of its hidden states."""
    inputs = collect_loss_inputs(each.loss_fn, each.data, each.loss_config, base.device)
    rows = slice(segment.start, segment.end)
    scored = base.head.score(hidden.detach()[rows], Targets.of(each.data), part)
    # A leaf: autograd ends here and `scored.backward` continues by chunks, so logits of all rows never coexist.
    log_probs = scored.log_probs.requires_grad_(of_hidden is not None)
    with torch.set_grad_enabled(of_hidden is not None):
        loss = LOSSES[each.loss_fn](log_probs, inputs)
    if of_hidden is not None:
        (gradient,) = torch.autograd.grad(loss[0].sum(), log_probs)
        of_hidden[rows] = scored.backward(gradient)
    return _build_output(each, log_probs, loss)


def _merge_shares(
    rank_group: RankGroup, passes: Sequence[TrainingPass], owners: list[list[int]], outcomes: dict[int, Outcome]
) -> list[Outcome]:
    """Merge each model's result from its shares."""
    if rank_group.size == 1:
        return [outcomes[i] for i in range(len(passes))]
    of_ranks = rank_group.gather_values({i: _to_picklable(outcome) for i, outcome in outcomes.items()})
    return [
        _merge_outcomes(each, owners[i], {rank: of_rank[i] for rank, of_rank in enumerate(of_ranks) if i in of_rank})
        for i, each in enumerate(passes)
    ]


@_handle_failure_alone
def _merge_outcomes(each: TrainingPass, owners: list[int], shares: dict[int, Outcome]) -> Outcome:
    """
    Args:
        shares: by rank.
    """
    inputs = collect_loss_inputs(each.loss_fn, each.data, each.loss_config, torch.device("cpu"))
    pieces = {}
    for rank, share in shares.items():
        if isinstance(share, Failure):
            return share
        pieces[rank] = iter(share.logprobs)
    # Each rank holds its data in the order of the request, so the next piece of a datum's owner is that datum's.
    log_probs = torch.from_numpy(np.concatenate([next(pieces[owner]).reshape(-1) for owner in owners]))
    # The loss once more, over all log-probs: metrics of shares, as means, cannot be combined without their counts.
    return _build_output(each, log_probs, LOSSES[each.loss_fn](log_probs, inputs))


def _build_output(each: TrainingPass, log_probs: torch.Tensor, loss: LossResult) -> PassOutput:
    """
    Args:
        log_probs: [M], of all targets one after the other.
    """
    losses, metrics = loss
    # float64: float32 keeps 7 digits, few for a sum over thousands of targets.
    total = float(losses.detach().sum(dtype=torch.float64))
    flat = log_probs.detach().cpu().numpy()
    cuts = np.cumsum([datum.inputs["target_tokens"].size for datum in each.data])[:-1]
    return PassOutput(
        [
            piece.reshape(datum.inputs["target_tokens"].shape)
            for piece, datum in zip(np.split(flat, cuts), each.data, strict=True)
        ],
        {"loss:sum": total, "targets:sum": float(len(flat)), **metrics},
    )


def _to_picklable(outcome: Outcome) -> Outcome:
    """Errors of libraries may not survive the way to another process."""
    if isinstance(outcome, Failure) and not isinstance(outcome.error, ModelError):
        return Failure(RuntimeError(f"{type(outcome.error).__name__}: {outcome.error}"))
    return outcome

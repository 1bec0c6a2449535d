"""Losses of the protocol: plain sums over all targets of all data, without averaging.

Each is a pure function of the log-probs under the current weights and of the request's inputs. `wire.losses` defines
these inputs and the defaults of settings. To add a loss, add a rule there, a function here, and a row of manually
computed numbers in the test.

Shapes: M targets, concatenated over all data of a micro-batch. In formulas lp = log p(target), q = log p of
the policy that sampled it, A its advantage, r = exp(lp - q); sg[x] is x, held constant by the gradient.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from tx.tinker.types import Datum
from tx.tinker.wire.losses import TARGETS, fill_default_config

BOUNDS = ("clip_low_threshold", "clip_high_threshold")

LARGEST_LOG_RATIO = 80.0
"""exp of more overflows float32, and a clipped ratio would then have the gradient 0 * inf."""


@dataclass(frozen=True)
class LossInputs:
    """Inputs of a loss."""

    tensors: Mapping[str, torch.Tensor]
    """Tensors by name, each [M] float32."""
    config: Mapping[str, float]
    lengths: tuple[int, ...]
    """Targets of each datum; they sum to M."""

    def bounds(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the clipping bounds of a ratio: per target if the request has them, else shared. Ratios, not distances
        from 1.
        """
        device = self.tensors["logprobs"].device
        low, high = (self.tensors.get(n, torch.tensor(self.config[n], device=device)) for n in BOUNDS)
        return low, high


LossResult = tuple[torch.Tensor, dict[str, float]]
"""The loss of each target [M], and metrics by `name:how`."""


def cross_entropy(log_probs: torch.Tensor, inputs: LossInputs) -> LossResult:
    """L = -sum w lp, with w = 1 where the request has no weights.

    With w = -g its gradient is g, which is how clients implement custom losses.
    """
    weights = inputs.tensors.get("weights")
    return (-log_probs if weights is None else -weights * log_probs), {}


def importance_sampling(log_probs: torch.Tensor, inputs: LossInputs) -> LossResult:
    """L = -sum r A."""
    ratio = _compute_ratio(log_probs, inputs)
    return -ratio * inputs.tensors["advantages"], _compute_ratio_metrics(ratio, inputs)


def ppo(log_probs: torch.Tensor, inputs: LossInputs) -> LossResult:
    """L = -sum min(r A, clip(r, low, high) A) (https://arxiv.org/abs/1707.06347, eq. 7), bounds 0.8 and 1.2."""
    return _compute_clipped_surrogate(_compute_ratio(log_probs, inputs), inputs)


def cispo(log_probs: torch.Tensor, inputs: LossInputs) -> LossResult:
    """L = -sum sg[clip(r, low, high)] lp A (https://arxiv.org/abs/2506.13585, eq. 4), bounds 0 and 4: a clipped target
    keeps its gradient."""
    ratio = _compute_ratio(log_probs, inputs).detach()
    clipped = ratio.clamp(*inputs.bounds())
    return -clipped * log_probs * inputs.tensors["advantages"], _compute_ratio_metrics(ratio, inputs, clipped)


def dro(log_probs: torch.Tensor, inputs: LossInputs) -> LossResult:
    """L = -sum (lp A - beta / 2 (lp - q)^2) (https://arxiv.org/abs/2405.19107), beta 0.05."""
    distance = log_probs - inputs.tensors["logprobs"]
    penalty = 0.5 * inputs.config["beta"] * distance**2
    return penalty - log_probs * inputs.tensors["advantages"], _compute_ratio_metrics(
        _compute_ratio(log_probs, inputs), inputs
    )


def gspo(log_probs: torch.Tensor, inputs: LossInputs) -> LossResult:
    """One ratio for a whole datum (https://arxiv.org/abs/2507.18071, eq. 14), as a gradient of each target:

        s = exp(mean of sg[lp] - q where the mask is not 0)      rho = s exp(lp - sg[lp])
        L = -sum min(rho A, clip(rho, low, high) A)

    The mask is `sequence_ratio_mask`; bounds 0.8 and 1.2.
    """
    log_ratios = log_probs.detach() - inputs.tensors["logprobs"]
    counted = inputs.tensors["sequence_ratio_mask"] != 0
    # Selected by the mask and not multiplied with it: 0 times a ratio that is not finite would be NaN. A datum without
    # any counted target has the mean 0, so the ratio 1.
    of_datum = [
        (ratios[mask].sum() / mask.sum().clamp(min=1)).expand(len(ratios))
        for ratios, mask in zip(log_ratios.split(inputs.lengths), counted.split(inputs.lengths), strict=True)
    ]
    of_sequence = torch.cat(of_datum).clamp(max=LARGEST_LOG_RATIO).exp()
    return _compute_clipped_surrogate(of_sequence * (log_probs - log_probs.detach()).exp(), inputs)


LOSSES: dict[str, Callable[[torch.Tensor, LossInputs], LossResult]] = {
    "cross_entropy": cross_entropy,
    "importance_sampling": importance_sampling,
    "ppo": ppo,
    "cispo": cispo,
    "dro": dro,
    "gspo": gspo,
}


def collect_loss_inputs(name: str, data: list[Datum], config: Mapping[str, float], device: torch.device) -> LossInputs:
    """Collect the inputs of a loss from data that `wire.checks` has passed."""
    config = fill_default_config(name, config)
    keys = sorted({key for datum in data for key in datum.inputs} - {TARGETS})
    tensors = {key: _merge_inputs(key, data, config.get(key, 1.0)).to(device) for key in keys}
    return LossInputs(tensors, config, tuple(datum.inputs[TARGETS].size for datum in data))


def _merge_inputs(key: str, data: list[Datum], default: float) -> torch.Tensor:
    """[M]. A datum without an input that others have takes the setting of that name, or 1 (a weight)."""
    parts = []
    for datum in data:
        values = datum.inputs.get(key)
        parts.append(np.full(datum.inputs[TARGETS].size, default) if values is None else values.reshape(-1))
    return torch.from_numpy(np.concatenate(parts).astype(np.float32))


def _compute_ratio(log_probs: torch.Tensor, inputs: LossInputs) -> torch.Tensor:
    return (log_probs - inputs.tensors["logprobs"]).clamp(max=LARGEST_LOG_RATIO).exp()


def _compute_clipped_surrogate(ratio: torch.Tensor, inputs: LossInputs) -> LossResult:
    # Inside the bounds both products are equal, and torch.minimum gives each half of the gradient. clamp passes its
    # half on to the ratio, so the gradient is whole there; outside, the clipped product has none.
    clipped, advantages = ratio.clamp(*inputs.bounds()), inputs.tensors["advantages"]
    return -torch.minimum(ratio * advantages, clipped * advantages), _compute_ratio_metrics(ratio, inputs, clipped)


def _compute_ratio_metrics(
    ratio: torch.Tensor, inputs: LossInputs, clipped: torch.Tensor | None = None
) -> dict[str, float]:
    """Compute metrics of the ratio over targets with an advantage: prompts have none."""
    counted = inputs.tensors["advantages"] != 0
    ratio = ratio.detach()
    # min() of an empty tensor is an error: without any advantage the ratio counts as 1.
    among = ratio[counted] if bool(counted.any()) else torch.ones(1)
    metrics = {"ratio:mean": float(among.mean()), "ratio:min": float(among.min()), "ratio:max": float(among.max())}
    if clipped is not None:
        changed = (clipped.detach() != ratio) & counted
        metrics["clipped:mean"] = float(changed.sum() / counted.sum().clamp(min=1))
    return metrics

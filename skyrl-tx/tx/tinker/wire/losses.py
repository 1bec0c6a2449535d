"""Inputs, settings and defaults of each loss. Their computation belongs to the training backend."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from tx.tinker.types import Datum

TARGETS = "target_tokens"
"""int64; every other input is float32."""


@dataclass(frozen=True)
class LossRule:
    """Required and optional inputs of a datum, and settings of `loss_fn_config`."""

    required: tuple[str, ...]
    optional: tuple[str, ...] = ()
    config: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    """Settings with their defaults."""
    many_targets: bool = False
    """True if targets may be [N, K]."""

    @property
    def inputs(self) -> tuple[str, ...]:
        return self.required + self.optional


MASK = "sequence_ratio_mask"
_OF_A_RATIO = (TARGETS, "logprobs", "advantages")
_THRESHOLDS = ("clip_low_threshold", "clip_high_threshold")
"""Absolute bounds of the ratio. As inputs they are bounds a token, and outrank the settings."""

LOSS_RULES: Mapping[str, LossRule] = MappingProxyType(
    {
        "cross_entropy": LossRule(required=(TARGETS,), optional=("weights",), many_targets=True),
        "importance_sampling": LossRule(required=_OF_A_RATIO),
        "ppo": LossRule(
            required=_OF_A_RATIO, optional=_THRESHOLDS, config=dict(zip(_THRESHOLDS, (0.8, 1.2), strict=True))
        ),
        "cispo": LossRule(
            required=_OF_A_RATIO, optional=_THRESHOLDS, config=dict(zip(_THRESHOLDS, (0.0, 4.0), strict=True))
        ),
        "dro": LossRule(required=_OF_A_RATIO, config={"beta": 0.05}),
        "gspo": LossRule(
            required=_OF_A_RATIO,
            optional=(MASK, *_THRESHOLDS),
            config=dict(zip(_THRESHOLDS, (0.8, 1.2), strict=True)),
        ),
    }
)

STABLE_REINFORCE = "stable_reinforce"
ELSEWHERE = MappingProxyType(
    {
        STABLE_REINFORCE: "its definition is not public; set loss_fn=importance_sampling (or ppo, cispo, gspo), or "
        "serve with --stable-reinforce-as importance_sampling",
        "custom": "send the gradient instead, as forward_backward_custom does",
    }
)
"""Losses that the hosted service has and this one has not, with the reason."""


def fill_default_config(loss_fn: str, config: Mapping[str, float]) -> dict[str, float]:
    """Return every setting of the loss, with defaults filled in."""
    rule = LOSS_RULES.get(loss_fn)
    return {**(rule.config if rule else {}), **config}


def fill_default_inputs(loss_fn: str, datum: Datum) -> Datum:
    """Fill in weights of one for cross-entropy, and for gspo a mask of the targets with nonzero sampling log-prob or
    advantage: clients pad both with zeros over the prompt.
    """
    inputs = datum.inputs
    if loss_fn == "cross_entropy" and "weights" not in inputs and TARGETS in inputs:
        inputs = {**inputs, "weights": np.ones(inputs[TARGETS].shape, np.float32)}
    if loss_fn == "gspo" and MASK not in inputs and {"logprobs", "advantages"} <= inputs.keys():
        is_sampled = [inputs[name] != 0 for name in ("logprobs", "advantages")]
        if is_sampled[0].shape == is_sampled[1].shape:  # else it is refused later
            inputs = {**inputs, MASK: np.logical_or(*is_sampled).astype(np.float32)}
    return Datum(tokens=datum.tokens, inputs=inputs)

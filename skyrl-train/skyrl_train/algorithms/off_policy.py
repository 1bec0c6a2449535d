"""Off-policy correction for a mismatch between rollout engine and trainer: metrics, weights and masks.

The engine may compute in lower precision or with older weights. With the trainer's log-probs at the start of the step,

    rho_t = exp(clip(old_log_prob_t - rollout_log_prob_t, -20, 20))

is the ratio of token t. Everything here is computed over a whole batch, once per step, and without gradients.

Shapes: B sequences, T response tokens.
"""

from dataclasses import dataclass, field

import torch

from skyrl_train.algorithms.losses.contract import LOG_RATIO_BOUND
from skyrl_train.algorithms.masking import apply_mask
from skyrl_train.config import OffPolicyCorrectionConfig

METRIC_PREFIX = "policy/loss_metrics/"


@dataclass(frozen=True)
class Correction:
    """Result of the correction, for the loss.

    Attributes:
        weights: [B, T], factor of every token's loss; None: no weighting. 1 outside the incoming loss mask.
        loss_mask: [B, T], the incoming mask without rejected tokens.
        metrics: by logged name.
    """

    weights: torch.Tensor | None
    loss_mask: torch.Tensor
    metrics: dict[str, float] = field(default_factory=dict)


@torch.no_grad()
def correct_off_policy(
    old_log_probs: torch.Tensor,
    rollout_logprobs: torch.Tensor,
    loss_mask: torch.Tensor,
    config: OffPolicyCorrectionConfig,
) -> Correction:
    """Compute truncated importance weights, and mask tokens and sequences, according to the settings.

    Truncated importance sampling (https://fengyao.notion.site/off-policy-rl):

        tis_ratio_type=token       w_bt = clip(rho_bt, token_tis_ratio_clip_{low,high})
        tis_ratio_type=sequence    w_bt = clip(prod_t rho_bt, sequence_tis_ratio_clip_{low,high})

    Masks, each with separate thresholds (a ratio equal to a threshold is kept):

        token_mask_is_threshold_{low,high}       tokens by rho_bt
        sequence_mask_metric=product             sequences by prod_t rho_bt
        sequence_mask_metric=geometric           sequences by (prod_t rho_bt)^(1 / tokens of b)
        outlier_token_is_threshold_{low,high}    sequences by the smallest and the largest rho_bt in them

    Every ratio is over the tokens of the incoming `loss_mask`, so no rule depends on the result of another.

    Args:
        old_log_probs, rollout_logprobs: [B, T]; outside `loss_mask` they may be anything.
        loss_mask: [B, T], 1 on the tokens that train.

    Returns:
        weights, the remaining mask, and metrics over the tokens (or non-empty sequences) of the incoming mask: {}
        without
            tokens, or if no correction is enabled.
    """
    if not config.is_on:
        return Correction(None, loss_mask)
    rules = _Rules(_log_ratio(old_log_probs, rollout_logprobs, loss_mask), loss_mask != 0)
    weights = _compute_truncated_weights(rules, config)
    rejected = torch.zeros_like(rules.tokens)
    if config.sequence_mask_metric is not None:
        rejected |= _find_out_of_range_sequences(rules, config)
    # exp is monotonic: the extremes are taken of the logarithms. The fill value keeps a sequence without tokens inside
    # any bounds.
    smallest_B1 = rules.log_ratio.masked_fill(~rules.tokens, float("inf")).amin(-1, keepdim=True).exp()
    largest_B1 = rules.log_ratio.masked_fill(~rules.tokens, float("-inf")).amax(-1, keepdim=True).exp()
    bounds = config.outlier_token_is_threshold_low, config.outlier_token_is_threshold_high
    rejected |= rules.find_outside("outlier_seq", smallest_B1, largest_B1, *bounds)
    bounds = config.token_mask_is_threshold_low, config.token_mask_is_threshold_high
    rejected |= rules.find_outside("token_mask", rules.ratio, rules.ratio, *bounds)
    metrics = rules.metrics | _compute_ratio_metrics(rules) if rules.tokens.any() else {}
    # A new tensor: the caller still needs the incoming mask, over which metrics and other rules are counted.
    remaining = torch.where(rejected, torch.zeros_like(loss_mask), loss_mask)
    return Correction(weights, remaining, {METRIC_PREFIX + name: value for name, value in metrics.items()})


class _Rules:
    """Ratios of a batch, and metrics collected while rules are applied.

    Args:
        log_ratio: [B, T], 0 outside the mask.
        tokens: [B, T] bool, the incoming mask.
    """

    def __init__(self, log_ratio: torch.Tensor, tokens: torch.Tensor):
        self.log_ratio, self.tokens = log_ratio, tokens
        self.ratio = log_ratio.exp()
        self.sequences_B1 = tokens.any(-1, keepdim=True)
        self.metrics: dict[str, float] = {}

    def compute_fraction(self, hit: torch.Tensor) -> float:
        """Compute the fraction of tokens [B, T], or of non-empty sequences [B, 1], where `hit` is true."""
        # Rules of tokens and of sequences share a name; the shape, [B, T] or [B, 1], tells them apart.
        of = self.tokens if hit.shape == self.tokens.shape else self.sequences_B1
        return ((hit & of).sum() / of.sum().clamp(min=1)).item()

    def find_outside(
        self, name: str, smallest: torch.Tensor, largest: torch.Tensor, low: float | None, high: float | None
    ) -> torch.Tensor:
        """Return where `smallest` is below `low` or `largest` above `high`, counted under `name`; nowhere without
        bounds."""
        nowhere = torch.zeros_like(smallest, dtype=torch.bool)
        if low is None and high is None:
            return nowhere
        under = nowhere if low is None else smallest < low
        over = nowhere if high is None else largest > high
        self.metrics[f"{name}_masked_ratio"] = self.compute_fraction(under | over)
        self.metrics[f"{name}_under_low_ratio"] = self.compute_fraction(under)
        self.metrics[f"{name}_over_high_ratio"] = self.compute_fraction(over)
        return under | over


def _log_ratio(old_log_probs: torch.Tensor, rollout_logprobs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    # Outside the mask there may be NaN or infinity, which would survive a product with 0: replaced before the
    # difference.
    old_log_probs, rollout_logprobs = apply_mask(mask, old_log_probs, rollout_logprobs)
    return (old_log_probs - rollout_logprobs).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def _compute_truncated_weights(rules: _Rules, config: OffPolicyCorrectionConfig) -> torch.Tensor | None:
    if config.tis_ratio_type is None:
        return None
    if config.tis_ratio_type == "token":
        name, ratio = "tis_token", rules.ratio
        low, high = config.token_tis_ratio_clip_low, config.token_tis_ratio_clip_high
    else:
        name, ratio = "tis_seq", _compute_sequence_ratio(rules, "product")
        low, high = config.sequence_tis_ratio_clip_low, config.sequence_tis_ratio_clip_high
    rules.metrics[f"{name}_clip_high_ratio"] = rules.compute_fraction(ratio > high)
    # The cap bounds the variance, which only large ratios raise. A lower bound adds bias, to keep training tokens that
    # the trainer finds much less likely than the engine did.
    if low > 0:
        rules.metrics[f"{name}_clip_low_ratio"] = rules.compute_fraction(ratio < low)
    # 1 outside the mask, so that a product with the loss changes nothing there.
    return torch.where(rules.tokens, ratio.clamp(low, high), 1.0)


def _find_out_of_range_sequences(rules: _Rules, config: OffPolicyCorrectionConfig) -> torch.Tensor:
    if config.sequence_mask_metric == "product":
        name, low, high = "product_sequence_mask", config.product_mask_low, config.product_mask_high
    else:
        name, low, high = "geo_sequence_mask", config.geo_mask_low, config.geo_mask_high
    ratio_B1 = _compute_sequence_ratio(rules, config.sequence_mask_metric)
    return rules.find_outside(name, ratio_B1, ratio_B1, low, high)


def _compute_sequence_ratio(rules: _Rules, metric: str | None) -> torch.Tensor:
    """Compute the product or the geometric mean of a sequence's ratios [B, 1]."""
    # A sum of logarithms: the product of thousands of ratios would overflow float32. Each is clamped, masked ones are
    # 0.
    log_ratio_B1 = rules.log_ratio.sum(-1, keepdim=True)
    if metric == "geometric":
        log_ratio_B1 = log_ratio_B1 / rules.tokens.sum(-1, keepdim=True).clamp(min=1)
    return log_ratio_B1.exp()


def _compute_ratio_metrics(rules: _Rules) -> dict[str, float]:
    # float64: metrics of millions of tokens are sums in which float32 would lose small differences.
    ratio = rules.ratio[rules.tokens].double()
    return {
        "is_ratio_mean": ratio.mean().item(),
        "is_ratio_std": ratio.std(correction=0).item(),
        "is_ratio_max": ratio.max().item(),
        "is_ratio_min": ratio.min().item(),
    }


@torch.no_grad()
def mismatch_metrics(
    old_log_probs: torch.Tensor, rollout_logprobs: torch.Tensor, loss_mask: torch.Tensor
) -> dict[str, float]:
    """Compute metrics of the mismatch between the trainer's and the engine's log-probs, over the n tokens of
    `loss_mask`; {} without tokens.

        abs_diff_{mean,max,std}     |old - rollout|
        kl_k3                       mean of rho - 1 - log rho: an estimate of KL(rollout || trainer)
        ratio_{mean,max,min}        rho
        ess                         (sum rho)^2 / (n sum rho^2): 1 if all ratios are equal, 1/n if one dominates

    Args:
        old_log_probs, rollout_logprobs: [B, T]; outside `loss_mask` they may be anything.
    """
    tokens = loss_mask != 0
    if not tokens.any():
        return {}
    # float64: the differences between two float32 log-probs are near the rounding of their mean.
    old, rollout = old_log_probs[tokens].double(), rollout_logprobs[tokens].double()
    difference = (old - rollout).abs()
    # The difference above is not clamped, because it should show an outlier; its exp must not overflow.
    log_ratio = (old - rollout).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    ratio = log_ratio.exp()
    values = {
        "logprobs_abs_diff_mean": difference.mean(),
        "logprobs_abs_diff_max": difference.max(),
        "logprobs_abs_diff_std": difference.std(correction=0),
        "kl_k3": (ratio - 1 - log_ratio).mean(),
        "ratio_mean": ratio.mean(),
        "ratio_max": ratio.max(),
        "ratio_min": ratio.min(),
        "ess": ratio.sum().square() / (len(ratio) * ratio.square().sum()),
    }
    return {f"policy/rollout_train_{name}": value.item() for name, value in values.items()}

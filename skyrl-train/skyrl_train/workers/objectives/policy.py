"""Objective of the policy: policy loss with off-policy weights, KL divergence to the reference, entropy."""

from collections.abc import Mapping

import torch

from skyrl_train.algorithms.distillation import compute_candidate_kl
from skyrl_train.algorithms.kl import compute_approx_kl
from skyrl_train.algorithms.losses import PolicyLoss, importance_ratio
from skyrl_train.algorithms.reduction import weighted_sum
from skyrl_train.config import AlgorithmConfig
from skyrl_train.config.distillation import DistillationConfig
from skyrl_train.errors import ConfigError
from skyrl_train.training_backends.base import MetricScalars, Scores
from skyrl_train.training_batch import TrainingInputBatch, shape_of


class PolicyObjective:
    """Loss of the policy, for reinforcement learning and (with the corresponding loss functions) supervised training.

    Args:
        algorithm: `trainer.algorithm`.
        loss_fn: per-token loss function.
        distillation: `trainer.distillation`, whose divergence is added if the batch has teacher log-probs of several
            tokens; None: the batch never has them.
    """

    needs_entropy = True

    def __init__(self, algorithm: AlgorithmConfig, loss_fn: PolicyLoss, distillation: DistillationConfig | None = None):
        self.algorithm = algorithm
        self.loss_fn = loss_fn
        self.distillation = distillation

    def __call__(self, scores: Scores, micro_batch: TrainingInputBatch) -> tuple[torch.Tensor, MetricScalars]:
        """Compute the weighted sum of token losses, and metrics.

        Args:
            micro_batch: `loss_mask`, `loss_weights` [b, R]; if used by the algorithm, `action_log_probs` (without it,
                the scores themselves are the old log-probs, which is exact if a single optimizer step uses all rows),
                `advantages`, `rollout_logprobs`, `base_action_log_probs`, `off_policy_weights`, `selected_tokens`,
                `teacher_log_probs` [b, R, K].
        """
        algorithm = self.algorithm
        mask, weights = micro_batch.tensor("loss_mask"), micro_batch.tensor("loss_weights")

        def masked(tensor: torch.Tensor) -> torch.Tensor:
            return torch.where(mask != 0, tensor, 0.0)

        def column(name: str) -> torch.Tensor | None:
            return None if micro_batch.get(name) is None else masked(micro_batch.tensor(name))

        assert scores.entropy is not None
        log_probs, entropy = masked(scores.output), masked(scores.entropy)
        old_log_probs = column("action_log_probs")
        if old_log_probs is None:
            old_log_probs = log_probs.detach()
        selected = micro_batch.get("selected_tokens")
        returned = self.loss_fn(
            log_probs,
            old_log_probs,
            column("advantages"),
            algorithm,
            mask,
            column("rollout_logprobs"),
            **({} if selected is None else {"selected_tokens": selected}),
        )
        policy_loss, loss_metrics = checked_loss(returned, algorithm.policy_loss_type, log_probs.shape)
        off_policy_weights = column("off_policy_weights")
        parts = {"policy_loss": policy_loss if off_policy_weights is None else policy_loss * off_policy_weights}
        base_log_probs = column("base_action_log_probs")
        if algorithm.use_kl_loss and base_log_probs is not None:
            kl = compute_approx_kl(log_probs, base_log_probs, mask, algorithm.kl_estimator_type)
            parts["kl_loss"] = kl * algorithm.kl_loss_coef
            loss_metrics = {**loss_metrics, "policy_kl": kl}
        if self.distillation is not None and scores.candidates is not None:
            divergence = _compute_divergence(
                scores.candidates, micro_batch.tensor("teacher_log_probs"), mask, self.distillation
            )
            parts["distillation_loss"] = divergence * self.distillation.coef
            loss_metrics = {**loss_metrics, "teacher_kl": divergence}
        if algorithm.use_entropy_loss:
            parts["entropy_loss"] = -entropy * algorithm.entropy_loss_coef
        reduced = {name: weighted_sum(part, weights) for name, part in parts.items()}
        loss = torch.stack(list(reduced.values())).sum()
        sums = {f"loss/{name}": value.detach() for name, value in {**reduced, "final_loss": loss}.items()}
        for name, value in {"policy_entropy": entropy, **loss_metrics}.items():
            sums[f"token/{name}"] = weighted_sum(value.detach(), mask)
        deviation = (importance_ratio(log_probs.detach(), old_log_probs) - 1).abs()
        sums["max/ratio_deviation"] = masked(deviation).max()
        return loss, sums | {"num_tokens": mask.sum()}


def _compute_divergence(
    student: torch.Tensor, teacher: torch.Tensor, mask: torch.Tensor, settings: DistillationConfig
) -> torch.Tensor:
    """Compute the divergence [b, R] between student and teacher from log-probs [b, R, K]; 0 outside the mask."""
    trains = mask != 0
    with_tail = settings.tokens == "top_k"
    # Rows of padding hold no distribution: only tokens that train are computed.
    own = compute_candidate_kl(student[trains], teacher[trains], settings.kl, with_tail=with_tail)
    return torch.zeros_like(mask, dtype=own.dtype).masked_scatter(trains, own)


def checked_loss(returned: object, name: str, shape: torch.Size) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
    """Compute the per-token loss and its metrics, and validate the output of the loss function.

    Raises:
        ConfigError: the output is invalid.
    """
    rule = f"trainer.algorithm.policy_loss_type='{name}' must return the loss of every token, {tuple(shape)}"
    match returned:
        case (torch.Tensor() as loss, Mapping() as metrics):
            pass
        case _:
            raise ConfigError(f"{rule}, and a dict of metrics; got {shape_of(returned)}")
    if loss.shape != shape:
        raise ConfigError(f"{rule}; got {shape_of(loss)}. The trainer reduces it (trainer.algorithm.loss_reduction)")
    for metric, values in metrics.items():
        if not isinstance(values, torch.Tensor) or values.shape not in (shape, torch.Size()):
            raise ConfigError(f"{rule}, and metrics that are tensors of this shape; '{metric}' is {shape_of(values)}")
    return loss, metrics

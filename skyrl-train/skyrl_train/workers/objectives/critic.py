"""Objective of the critic: squared error of its values."""

import torch

from skyrl_train.algorithms.critic_loss import critic_loss
from skyrl_train.algorithms.reduction import weighted_sum
from skyrl_train.config import AlgorithmConfig
from skyrl_train.training_backends.base import MetricScalars, Scores
from skyrl_train.training_batch import TrainingInputBatch


class CriticObjective:
    """Loss of the critic.

    Args:
        algorithm: `trainer.algorithm`.
    """

    needs_entropy = False

    def __init__(self, algorithm: AlgorithmConfig):
        self.algorithm = algorithm

    def __call__(self, scores: Scores, micro_batch: TrainingInputBatch) -> tuple[torch.Tensor, MetricScalars]:
        """Compute the weighted sum of token losses, and metrics.

        Args:
            micro_batch: `loss_mask`, `critic_loss_weights`, `values` (before the update) and `returns` [b, R].
        """
        mask, weights = micro_batch.tensor("loss_mask"), micro_batch.tensor("critic_loss_weights")

        def masked(tensor: torch.Tensor) -> torch.Tensor:
            return torch.where(mask != 0, tensor, 0.0)

        values = masked(scores.output)
        old_values, returns = masked(micro_batch.tensor("values")), masked(micro_batch.tensor("returns"))
        per_token, metrics = critic_loss(values, old_values, returns, self.algorithm, mask)
        loss = weighted_sum(per_token, weights)
        sums = {"loss/critic_loss": loss.detach(), "num_tokens": mask.sum()}
        for name, value in {"values": values, **metrics}.items():
            sums[f"token/{name}"] = weighted_sum(value.detach(), mask)
        return loss, sums

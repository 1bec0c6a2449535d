"""One rank of the critic: values, and the loss that makes them better."""

from collections.abc import Iterator

import torch
from transformers import PreTrainedModel

from skyrl_train.algorithms.critic_loss import critic_loss
from skyrl_train.algorithms.reduction import weighted_sum
from skyrl_train.config import CriticConfig
from skyrl_train.distributed.fsdp2 import full
from skyrl_train.models.value_model import ValueModel, load_value_model
from skyrl_train.training_batch import MicroBatch, TrainingInputBatch
from skyrl_train.workers.learner import LearnerWorker, MetricSums


class CriticWorker(LearnerWorker):
    """The model that learns what reward to expect."""

    name = "critic"
    model: ValueModel

    @property
    def settings(self) -> CriticConfig:
        return self.cfg.trainer.critic

    @property
    def transformer(self) -> PreTrainedModel:
        return self.model.backbone

    def whole_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Those of the transformers model, and the head, under the names that `load_value_model` reads. A
        collective."""
        yield from super().whole_parameters()
        yield f"{self.model.head_name}.weight", full(self.model.head.weight.detach())

    def build(self, path: str, *, with_weights: bool) -> ValueModel:
        """The model without its output layer, with a head for values, and with its adapters."""
        model = load_value_model(
            path,
            head_name=self.cfg.trainer.algorithm.value_head_prefix,
            seed=self.cfg.trainer.seed,
            with_weights=with_weights,
            **self.loading(),
            **self.layout(),
        )
        self.add_adapters(model.backbone, with_weights=with_weights)
        return model

    def score(self, micro: TrainingInputBatch) -> torch.Tensor:
        """The value [b, R] of the state in which each response token was written."""
        return self.model(
            micro.tensor("sequences").to(self.device),
            micro.tensor("attention_mask").to(self.device),
            micro.metadata["response_length"],
        )

    def loss(self, micro: TrainingInputBatch, micro_batch: MicroBatch) -> tuple[torch.Tensor, MetricSums]:
        """The squared error of the values, with weights `critic_loss_weights`."""
        mask = micro.tensor("loss_mask").to(self.device)
        weights = micro.tensor("critic_loss_weights").to(self.device)

        def masked(tensor: torch.Tensor) -> torch.Tensor:
            return torch.where(mask != 0, tensor.to(self.device), 0.0)

        values = masked(self.score(micro))
        old_values, returns = masked(micro.tensor("values")), masked(micro.tensor("returns"))
        per_token, metrics = critic_loss(values, old_values, returns, self.cfg.trainer.algorithm, mask)
        loss = weighted_sum(per_token, weights)
        sums = {"loss/critic_loss": loss.item(), "num_tokens": float(mask.sum())}
        for name, value in {"values": values, **metrics}.items():
            sums[f"token/{name}"] = float(weighted_sum(value.detach(), mask))
        return loss, sums

"""A training backend of one rank: plain SGD on a whole model, without a process group."""

import math
from collections.abc import Iterator

import torch
from transformers import PreTrainedModel

from skyrl_train.models.build import build_model, gather_parameters, get_transformer, iter_trained_parameters
from skyrl_train.models.scoring import ScoringModel
from skyrl_train.models.value_model import ValueModel
from skyrl_train.training_backends.base import RankInfo, Scores, Step, TrainingBackend
from skyrl_train.training_backends.checkpoint import StateFiles
from skyrl_train.training_batch import TrainingInputBatch


class SGDBackend(TrainingBackend):
    model: ScoringModel | ValueModel

    def join(self, info: RankInfo) -> None:
        self.device = torch.device(info.device)

    def load_model(self) -> None:
        torch.manual_seed(self.cfg.trainer.seed)
        path = self.settings.model.path or ""
        model = build_model(self.cfg, self.name, path, device=self.device, is_trained=self.is_trained)
        self.model = model.to(self.device)
        if self.is_trained:
            self.begin_schedule()

    @property
    def transformer(self) -> PreTrainedModel:
        return get_transformer(self.model)

    def score(self, micro_batch: TrainingInputBatch, *, with_entropy: bool = False) -> Scores:
        sequences, mask = (micro_batch.tensor(name).to(self.device) for name in ("sequences", "attention_mask"))
        num_response = micro_batch.metadata["response_length"]
        if isinstance(self.model, ValueModel):
            return Scores(self.model(sequences, mask, num_response))
        temperature = self.cfg.generator.sampling_params.temperature
        scores = self.model(sequences, mask, num_response, temperature, with_entropy=with_entropy)
        return Scores(scores.log_probs, scores.entropy, scores.router)

    def prompt_log_probs(self, tokens: torch.Tensor) -> torch.Tensor:
        assert isinstance(self.model, ScoringModel)
        return self.model(tokens, torch.ones_like(tokens), tokens.shape[1] - 1, 1.0).log_probs

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def optimizer_step(self) -> Step:
        trained, rate = list(self.model.parameters()), self.schedule.rate
        max_norm = self.trained_settings.optimizer_config.max_grad_norm
        norm = float(torch.nn.utils.clip_grad_norm_(trained, max_norm))
        with torch.no_grad():
            for weight in trained:
                if math.isfinite(norm) and weight.grad is not None:
                    weight -= rate * weight.grad
                weight.grad = None
        self.schedule.step()
        return Step(norm, rate, is_skipped=not math.isfinite(norm))

    def gather_parameters(self, dtype: torch.dtype = torch.float32) -> Iterator[tuple[str, torch.Tensor]]:
        return gather_parameters(self.model, dtype)

    def load_parameters(self, folder: str) -> None:
        other = build_model(self.cfg, self.name, folder, device=self.device, is_trained=False)
        self.model.load_state_dict(other.state_dict())

    def training_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, weight.detach()) for name, weight in iter_trained_parameters(self.model))

    def load_training_state(self, files: StateFiles) -> None:
        for name, weight in iter_trained_parameters(self.model):
            weight.data.copy_(files.read(name, weight.shape))

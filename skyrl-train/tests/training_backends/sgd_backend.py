"""A training backend of one rank: plain SGD on a whole model, without a process group."""

import math
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import PreTrainedModel

from skyrl_train.models.build import build_model, gather_parameters, transformer_of
from skyrl_train.models.scoring import ScoringModel
from skyrl_train.models.value_model import ValueModel
from skyrl_train.training_backends.base import RankInfo, Scores, Step, TrainingBackend, WrittenFiles
from skyrl_train.training_batch import TrainingInputBatch


class SGDBackend(TrainingBackend):
    model: ScoringModel | ValueModel

    def join(self, info: RankInfo) -> None:
        self.device = torch.device(info.device)

    def load_model(self) -> None:
        torch.manual_seed(self.cfg.trainer.seed)
        path = self.settings.model.path or ""
        model = build_model(self.cfg, self.name, path, device=self.device, is_trained=self.is_trained)
        self.model, self.num_steps = model.to(self.device), 0

    @property
    def transformer(self) -> PreTrainedModel:
        return transformer_of(self.model)

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
        assert self.num_training_steps is not None
        config, trained = self.trained_settings.optimizer_config, list(self.model.parameters())
        norm = float(torch.nn.utils.clip_grad_norm_(trained, config.max_grad_norm))
        rate = config.lr * (1 - self.num_steps / self.num_training_steps)
        with torch.no_grad():
            for weight in trained:
                if math.isfinite(norm) and weight.grad is not None:
                    weight -= rate * weight.grad
                weight.grad = None
        self.num_steps += 1
        return Step(norm, rate, is_skipped=not math.isfinite(norm))

    def gather_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        return gather_parameters(self.model)

    def load_parameters(self, folder: str) -> None:
        other = build_model(self.cfg, self.name, folder, device=self.device, is_trained=False)
        self.model.load_state_dict(other.state_dict())

    def save(self, folder: Path) -> WrittenFiles:
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "state.pt"
        torch.save({"model": self.model.state_dict(), "num_steps": self.num_steps}, file)
        return WrittenFiles("this node", {file.name: file.stat().st_size})

    def load(self, folder: Path) -> None:
        state = torch.load(folder / "state.pt")
        self.model.load_state_dict(state["model"])
        self.num_steps = state["num_steps"]

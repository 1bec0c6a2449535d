"""FSDP2: parameters, gradients and optimizer state of every block are divided over the ranks (`fully_shard`)."""

import math
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel

from skyrl_train.distributed.process_group import make_mesh
from skyrl_train.models.build import build_model, gather_parameters, transformer_of
from skyrl_train.models.scoring import ScoringModel
from skyrl_train.models.scoring_check import check_scoring
from skyrl_train.models.value_model import ValueModel
from skyrl_train.training_backends.base import Scores, Step, TrainingBackend, WrittenFiles
from skyrl_train.training_backends.fsdp2.checkpoint import read_state, write_state
from skyrl_train.training_backends.fsdp2.sharding import (
    clip_grad_norm,
    load_whole_state,
    move_optimizer_state,
    shard_model,
)
from skyrl_train.training_backends.optimizer import new_optimizer, resume_schedule
from skyrl_train.training_batch import TrainingInputBatch


class FSDP2Backend(TrainingBackend):
    """A model sharded by FSDP2, with AdamW."""

    model: ScoringModel | ValueModel
    """The sharded root module."""

    optimizer: torch.optim.Optimizer
    scheduler: LambdaLR

    def load_model(self) -> None:
        """Load the model, whole on rank 0 alone, and divide it over the ranks."""
        torch.manual_seed(self.cfg.trainer.seed)
        path = self.settings.model.path or ""
        is_first = self.parallel.rank == 0
        model = self.build(path, with_weights=is_first)
        whole = {}
        if is_first:
            check_scoring(model, path)
            whole = model.state_dict()
        fsdp_config = self.settings.fsdp_config
        mesh = make_mesh(self.device, fsdp_config.fsdp_size)
        shard_model(model, mesh, fsdp_config, bf16=self.cfg.trainer.bf16)
        self.model = model
        if self.parallel.world_size > 1:
            load_whole_state(self.model, whole, fsdp_config, self.device)
        if self.is_trained:
            self.begin_optimizer()

    def begin_optimizer(self) -> None:
        """Make a new optimizer and learning-rate schedule."""
        assert self.num_training_steps is not None
        config = self.trained_settings.optimizer_config
        self.optimizer, self.scheduler = new_optimizer(self.model.parameters(), config, self.num_training_steps)

    def build(self, path: str, *, with_weights: bool) -> ScoringModel | ValueModel:
        """Make the model whole, on the CPU; without weights its parameters have shapes only (meta device)."""
        return build_model(
            self.cfg,
            self.name,
            path,
            device=self.device,
            is_trained=self.is_trained,
            with_weights=with_weights,
            sequence_parallel=self.sequence_parallel,
        )

    @property
    def transformer(self) -> PreTrainedModel:
        return transformer_of(self.model)

    # ---- one step

    def score(self, micro_batch: TrainingInputBatch, *, with_entropy: bool = False) -> Scores:
        inputs = (
            micro_batch.tensor("sequences").to(self.device),
            micro_batch.tensor("attention_mask").to(self.device),
            micro_batch.metadata["response_length"],
        )
        if isinstance(self.model, ValueModel):
            return Scores(self.model(*inputs))
        # The policy's temperature, whichever model this is.
        temperature = self.cfg.generator.sampling_params.temperature
        scores = self.model(*inputs, temperature, with_entropy=with_entropy)
        return Scores(scores.log_probs, scores.entropy, scores.router)

    def prompt_log_probs(self, tokens: torch.Tensor) -> torch.Tensor:
        assert isinstance(self.model, ScoringModel), "a critic gives no log-probs"
        tokens = tokens.to(self.device)
        scores = self.model(tokens, torch.ones_like(tokens), tokens.shape[1] - 1, 1.0, with_entropy=False)
        return scores.log_probs.float()

    def backward(self, loss: torch.Tensor) -> None:
        # Ranks hold disjoint parts of one weighted sum, and FSDP averages gradients over ranks. (Ranks of one replica
        # compute the same loss, of which each gets the gradient that came through its own tokens.)
        (loss * self.parallel.world_size).backward()

    def optimizer_step(self) -> Step:
        max_norm = self.trained_settings.optimizer_config.max_grad_norm
        grad_norm = clip_grad_norm(self._trained_parameters(), max_norm)
        learning_rate = float(self.scheduler.get_last_lr()[0])
        is_finite = math.isfinite(grad_norm)
        if is_finite:
            self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return Step(grad_norm, learning_rate, is_skipped=not is_finite)

    def _trained_parameters(self) -> Iterator[nn.Parameter]:
        return (parameter for parameter in self.model.parameters() if parameter.requires_grad)

    # ---- whole parameters, files

    def gather_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        return gather_parameters(self.model)

    def load_parameters(self, folder: str) -> None:
        whole = self.build(folder, with_weights=True).state_dict() if self.parallel.rank == 0 else {}
        load_whole_state(self.model, whole, self.settings.fsdp_config, self.device)

    def save(self, folder: Path) -> WrittenFiles:
        return write_state(folder, self.model, self.optimizer, self.scheduler.state_dict(), self.parallel.rank)

    def load(self, folder: Path) -> None:
        state = read_state(folder, self.model, self.optimizer, self.parallel.rank)
        resume_schedule(self.optimizer, self.scheduler, state, self.trained_settings.optimizer_config)

    # ---- device memory

    def offload(self) -> None:
        if self._is_on_device:
            if self.is_trained and self.trained_settings.optimizer_config.offload_after_step:
                move_optimizer_state(self.optimizer, torch.device("cpu"))
            self.model.to("cpu")
            torch.cuda.empty_cache()

    def onload(self) -> None:
        if self._is_on_device:
            self.model.to(self.device)
            if self.is_trained:
                move_optimizer_state(self.optimizer, self.device)

    @property
    def _is_on_device(self) -> bool:
        """Whether there is a device's memory to free: not on a CPU, nor where the model rests in host memory anyway."""
        return self.device.type == "cuda" and not self.settings.fsdp_config.cpu_offload

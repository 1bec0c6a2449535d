"""FSDP2: parameters, gradients and optimizer state of every block are sharded over the ranks (`fully_shard`)."""

import math
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager

import torch
from torch import nn

from skyrl_train.distributed.process_group import build_mesh
from skyrl_train.models.build import get_transformer
from skyrl_train.models.weight_files import WeightFiles
from skyrl_train.training_backends.base import Step
from skyrl_train.training_backends.checkpoint import StateFiles
from skyrl_train.training_backends.fsdp2.sharding import (
    cast_frozen_parameters,
    clip_grad_norm,
    compile_layers,
    get_non_file_values,
    load_from_files,
    load_full_state,
    reshard,
    shard_model,
)
from skyrl_train.training_backends.fsdp2.training_state import gather_training_state, load_training_state
from skyrl_train.training_backends.host_store import Transfer
from skyrl_train.training_backends.optimizer import build_adamw, iter_moments, move_optimizer_state, set_learning_rate
from skyrl_train.training_backends.transformers_backend import TransformersBackend
from skyrl_train.training_batch import MicroBatch, TrainingInputBatch


class FSDP2Backend(TransformersBackend):
    """A model sharded by FSDP2, with AdamW."""

    optimizer: torch.optim.Optimizer

    def load_model(self) -> None:
        """Load the model and shard it over the ranks."""
        torch.manual_seed(self.cfg.trainer.seed)
        model, files = self.open_model(self.settings.model.path or "", check=True)
        if self.parallel.rank:  # initial values have been drawn; dropout of adapters must differ by rank
            torch.manual_seed(self.cfg.trainer.seed + self.parallel.rank)
        if self.cfg.trainer.bf16 and self._init_method_from_weights is None:
            cast_frozen_parameters(model, is_trained=self.is_trained)
        values = self._get_initial_values(model, files)
        fsdp_config = self.settings.fsdp_config
        mesh = build_mesh(self.device, fsdp_config.fsdp_size)
        if self.cfg.trainer.compile_layers:  # after the check of its scores, which may run on another device
            compile_layers(get_transformer(model))
        shard_model(model, mesh, fsdp_config, bf16=self.cfg.trainer.bf16)
        self.model = model
        if files is not None or self.parallel.world_size > 1:
            self._load_values(files, values)
        if self.is_trained:
            self.begin_optimizer()

    def begin_optimizer(self) -> None:
        """Create an optimizer and learning-rate schedule."""
        config, cpu_offload = self.trained_settings.optimizer_config, self.settings.fsdp_config.cpu_offload
        # One kernel for all parameters of a GPU. On a CPU the bits of the plain operations are kept.
        fused = self.device.type == "cuda" and not cpu_offload
        self.optimizer = build_adamw(self.model.parameters(), config, fused=fused)
        self.begin_schedule()

    # ---- one step

    def backward(self, loss: torch.Tensor) -> None:
        # Ranks hold disjoint parts of one weighted sum, and FSDP averages gradients over ranks. (Ranks of one replica
        # compute the same loss, and each gets the gradient through its own tokens.)
        (loss * self.parallel.world_size).backward()

    def optimizer_step(self) -> Step:
        max_norm = self.trained_settings.optimizer_config.max_grad_norm
        grad_norm = clip_grad_norm(self._get_trained_parameters(), max_norm)
        learning_rate = self.schedule.rate
        is_finite = math.isfinite(grad_norm)
        if is_finite:
            set_learning_rate(self.optimizer, learning_rate)
            self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        return Step(grad_norm, learning_rate, is_skipped=not is_finite)

    def _get_trained_parameters(self) -> Iterator[nn.Parameter]:
        return (parameter for parameter in self.model.parameters() if parameter.requires_grad)

    # ---- passes without gradients

    def forward(self, batch: TrainingInputBatch, micro_batches: Sequence[MicroBatch]) -> torch.Tensor:
        with self._reshard_after():
            return super().forward(batch, micro_batches)

    def forward_top(
        self, batch: TrainingInputBatch, micro_batches: Sequence[MicroBatch], num_top: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with self._reshard_after():
            return super().forward_top(batch, micro_batches, num_top)

    def forward_recording_routes(
        self, batch: TrainingInputBatch, micro_batches: Sequence[MicroBatch]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with self._reshard_after():
            return super().forward_recording_routes(batch, micro_batches)

    def prompt_log_probs(self, tokens: torch.Tensor) -> torch.Tensor:
        with self._reshard_after():
            return super().prompt_log_probs(tokens)

    @contextmanager
    def _reshard_after(self) -> Iterator[None]:
        """Reshard the modules after a pass. With `reshard_after_forward=false` a pass leaves the unsharded parameters,
        in bfloat16 under mixed precision, but readers of parameters (checkpoints, exports, weight sync) expect the
        float32 masters."""
        try:
            yield
        finally:
            reshard(self.model)

    # ---- whole parameters, files

    def load_parameters(self, folder: str) -> None:
        other, files = self.open_model(folder, check=False)
        self._load_values(files, self._get_initial_values(other, files))

    def _get_initial_values(self, model: nn.Module, files: WeightFiles | None) -> dict[str, torch.Tensor]:
        """Return the values that are not in files, before the model is sharded. Without files: all values of rank 0,
        which keeps its float32 copy while it is scattered."""
        if files is not None:
            return get_non_file_values(model)
        return model.state_dict() if self.parallel.rank == 0 else {}

    def _load_values(self, files: WeightFiles | None, values: dict[str, torch.Tensor]) -> None:
        """Load weights into the model from files, or from a state dict of rank 0. A collective."""
        if files is None:
            load_full_state(self.model, values, self.settings.fsdp_config, self.device)
            return
        with closing(files):
            load_from_files(self.model, self.transformer, files, values, self.settings.fsdp_config, self.device)

    def training_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        return gather_training_state(self.model, self.optimizer)

    def load_training_state(self, files: StateFiles) -> None:
        load_training_state(self.model, self.optimizer, files)

    # ---- device memory

    def iter_weights(self) -> Iterator[torch.Tensor]:
        yield from self.model.parameters()
        yield from self.model.buffers()

    def iter_optimizer_state(self) -> Iterator[torch.Tensor]:
        return iter_moments(self.optimizer)

    def onload(self) -> Transfer | None:
        transfer = super().onload()
        if self.frees_device and self.is_trained:  # moments that a checkpoint brought meanwhile
            move_optimizer_state(self.optimizer, self.device)
        return transfer

    @property
    def frees_device(self) -> bool:
        return super().frees_device and not self.settings.fsdp_config.cpu_offload

"""DeepSpeed: ZeRO shards optimizer state (stage 1), gradients (2) and parameters (3) over the ranks."""

import logging
from collections.abc import Iterator
from contextlib import closing, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from skyrl_train.models.build import get_transformer
from skyrl_train.models.scoring import ScoringModel
from skyrl_train.training_backends.base import RankInfo, Step
from skyrl_train.training_backends.checkpoint import StateFiles
from skyrl_train.training_backends.deepspeed.engine_settings import JsonSection, build_model_settings
from skyrl_train.training_backends.deepspeed.loading import load_on_ranks
from skyrl_train.training_backends.deepspeed.memory import (
    build_memory_report,
    iter_optimizer_state,
    iter_weights,
    offload_gradients,
    onload_gradients,
)
from skyrl_train.training_backends.deepspeed.partitions import (
    Engine,
    free_gathered_parameters,
    is_trained,
    write_parameter,
)
from skyrl_train.training_backends.deepspeed.process import deepspeed, join_deepspeed
from skyrl_train.training_backends.deepspeed.replicated_optimizer import ReplicatedAdamW
from skyrl_train.training_backends.deepspeed.training_state import gather_training_state, load_training_state
from skyrl_train.training_backends.host_store import Transfer
from skyrl_train.training_backends.optimizer import build_adamw, move_optimizer_state, set_learning_rate
from skyrl_train.training_backends.transformers_backend import TransformersBackend

logger = logging.getLogger(__name__)


class DeepSpeedBackend(TransformersBackend):
    """Model in a DeepSpeed engine, with torch's AdamW. A model of stage 0 that only scores needs no engine."""

    engine: Engine = None

    @property
    def stage(self) -> int:
        """Stage of ZeRO: 0 shards nothing, 3 everything."""
        return self.settings.deepspeed_config.zero_optimization.stage

    def join(self, info: RankInfo) -> None:
        super().join(info)
        join_deepspeed(self.device, self.cfg.trainer.worker_timeout_seconds)

    def load_model(self) -> None:
        """Load the model, distribute it over the ranks, and create the engine."""
        torch.manual_seed(self.cfg.trainer.seed)
        if self.engine is not None:
            self.engine.destroy()
            self.engine = None
        is_first = self.parallel.rank == 0
        self.model, files = self.open_model(self.settings.model.path or "", check=True)
        if not is_first:  # initial values have been drawn; dropout of adapters must differ by rank
            torch.manual_seed(self.cfg.trainer.seed + self.parallel.rank)
        settings = build_model_settings(self.cfg, self.name)
        rounded = self.cfg.trainer.bf16 and not self.settings.deepspeed_config.torch_autocast.enabled
        dtype = torch.bfloat16 if rounded else torch.float32
        with closing(files) if files is not None else nullcontext():
            zero_settings = settings if self.stage == 3 else None
            load_on_ranks(self.model, self.transformer, files, self.device, zero_settings, dtype)
        if self.is_trained or self.stage == 3:
            self._make_engine(settings)
        if is_first:
            logger.info(
                "DeepSpeed stage %d shards the %s over %d ranks; memory per rank:\n%s",
                self.stage,
                self.name,
                self.parallel.world_size,
                build_memory_report(self.engine, self.model, self.stage),
            )

    def _make_engine(self, settings: JsonSection) -> None:
        optimizer = self._build_optimizer() if self.is_trained else None
        if self.stage == 3:
            # The root uses the weight of its output layer, which belongs to a module that it does not call.
            head = (
                self.model.causal_lm.get_output_embeddings()
                if isinstance(self.model, ScoringModel)
                else self.model.head
            )
            for parameter in head.parameters():
                deepspeed.zero.register_external_parameter(self.model, parameter)
        self.engine, *_ = deepspeed.initialize(
            model=self.model, optimizer=optimizer, config=settings, dist_init_required=False
        )
        if self.is_trained:
            self.begin_schedule()

    def _build_optimizer(self) -> torch.optim.AdamW:
        settings = self.trained_settings
        config, offload = settings.optimizer_config, settings.deepspeed_config.zero_optimization.offload_optimizer
        # One kernel for a whole flat tensor. On a CPU without a GPU, the same operations as under FSDP2.
        fused = self.device.type == "cuda" or offload.device == "cpu"
        if self.stage == 0:
            optimizer = build_adamw(self.model.parameters(), config, ReplicatedAdamW, fused=fused)
            optimizer.max_norm = config.max_grad_norm
            return optimizer
        return build_adamw(self.model.parameters(), config, fused=fused)

    # ---- one step

    def compute(self, *args: object, **kwargs: object) -> Any:
        if self.engine is not None:
            return self.engine(*args, **kwargs)
        autocast = self.cfg.trainer.bf16 and self.settings.deepspeed_config.torch_autocast.enabled
        with torch.autocast(self.device.type, torch.bfloat16, enabled=autocast):
            return self.model(*args, **kwargs)

    def backward(self, loss: torch.Tensor) -> None:
        # Ranks hold disjoint parts of one weighted sum, and DeepSpeed averages gradients over ranks.
        self.engine.backward(loss * self.parallel.world_size, scale_wrt_gas=False)

    def optimizer_step(self) -> Step:
        learning_rate = self.schedule.rate
        set_learning_rate(self.engine.basic_optimizer, learning_rate)
        self.engine.step()
        self.schedule.step()
        norm = float(self.engine.get_global_grad_norm())
        return Step(norm, learning_rate, is_skipped=not self.engine.was_step_applied())

    # ---- whole parameters, files

    def load_parameters(self, folder: str) -> None:
        is_first = self.parallel.rank == 0
        other, files = self.open_model(folder, check=False)
        free_gathered_parameters(self.engine)
        names = {id(parameter): name for name, parameter in get_transformer(other).named_parameters()}
        with closing(files) if files is not None else nullcontext():
            for parameter, new in zip(self.model.parameters(), other.parameters(), strict=True):
                if files is not None and new.is_meta:
                    whole = files.read(names[id(new)], dtype=torch.float32).to(self.device)
                else:
                    whole = new.detach().to(self.device) if is_first else torch.empty(new.shape, device=self.device)
                    dist.broadcast(whole, src=0)
                write_parameter(self.engine, parameter, whole)

    def training_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        return gather_training_state(self.engine, self.model, self.device)

    def load_training_state(self, files: StateFiles) -> None:
        load_training_state(self.engine, self.model, files)

    # ---- device memory

    def iter_weights(self) -> Iterator[torch.Tensor]:
        return iter_weights(self.model)

    def iter_optimizer_state(self) -> Iterator[torch.Tensor]:
        return iter_optimizer_state(self.engine, self.model)

    def offload(self) -> Transfer | None:
        if self.frees_device:
            free_gathered_parameters(self.engine)
            offload_gradients(self.engine)
        return super().offload()

    def onload(self) -> Transfer | None:
        transfer = super().onload()
        if self.frees_device:
            onload_gradients(self.engine)
            if is_trained(self.engine) and not self.engine.zero_use_cpu_optimizer():
                # Moments that a checkpoint brought meanwhile.
                move_optimizer_state(self.engine.basic_optimizer, self.device)
        return transfer

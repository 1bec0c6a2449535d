"""Megatron-Core: tensor, pipeline, sequence, expert and data parallelism of a model."""

import logging
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from megatron.core import parallel_state
from torch import nn
from transformers import PreTrainedModel

from skyrl_train.config.megatron import MegatronConfig, MegatronModelConfig
from skyrl_train.models.build import get_transformer
from skyrl_train.models.value_model import ValueModel
from skyrl_train.training_backends.base import (
    Gradient,
    Objective,
    ParallelInfo,
    RankInfo,
    Scores,
    Step,
    TrainingBackend,
    build_dummy,
    join_process_group,
    merge_metric_sums,
    read_scalars,
)
from skyrl_train.training_backends.checkpoint import StateFiles
from skyrl_train.training_backends.host_store import Transfer
from skyrl_train.training_backends.megatron.certificate import verify_model
from skyrl_train.training_backends.megatron.groups import setup_groups
from skyrl_train.training_backends.megatron.layout import ParallelSizes, check_world
from skyrl_train.training_backends.megatron.loading import build_full_model, from_first_rank, get_full_weights
from skyrl_train.training_backends.megatron.model import (
    HiddenStatesModel,
    build_stage,
    get_stage_layers,
    get_vocabulary_shard,
)
from skyrl_train.training_backends.megatron.optimizer import StageOptimizer
from skyrl_train.training_backends.megatron.pipeline import Part, Pipeline, from_last_stage
from skyrl_train.training_backends.megatron.routers import StageRouters
from skyrl_train.training_backends.megatron.settings import check_model_config, get_layout
from skyrl_train.training_backends.megatron.training_state import gather_training_state, load_training_state
from skyrl_train.training_backends.megatron.transformer_config import (
    build_transformer_config,
    find_sparse_layers,
    map_sizes,
)
from skyrl_train.training_backends.megatron.weight_map import Entry
from skyrl_train.training_backends.megatron.weights import StageWeights
from skyrl_train.training_batch import MicroBatch, TrainingInputBatch

logger = logging.getLogger(__name__)


class MegatronBackend(TrainingBackend):
    """Model with layers, vocabulary and experts sharded over ranks, and megatron-core's distributed optimizer."""

    stage: HiddenStatesModel
    """Layers of this rank's pipeline stage."""

    optimizer: StageOptimizer
    """Gradients and AdamW of a trained model."""

    @property
    def megatron(self) -> MegatronModelConfig:
        """Section `trainer.<name>.megatron_config`."""
        return self.settings.megatron_config

    @property
    def trained_megatron(self) -> MegatronConfig:
        """The section of a trained model."""
        settings = self.megatron
        assert isinstance(settings, MegatronConfig), "the reference model is never trained"
        return settings

    @property
    def layout(self) -> ParallelSizes:
        """Parallel layout of the model."""
        return get_layout(self.megatron)

    def join(self, info: RankInfo) -> None:
        self.device = info.torch_device
        layout, timeout = self.layout, self.cfg.trainer.worker_timeout_seconds
        check_world(layout, info.world_size, f"trainer.{self.name}.megatron_config")
        if self.device.type == "cpu":
            from skyrl_train.training_backends.megatron import cpu_stand_in

            cpu_stand_in.install()
        else:
            # Communication kernels start in the order in which they are issued, as overlap with tensor parallelism
            # requires. Read when the device is first used.
            os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        # Workers of a replica are consecutive; megatron-core numbers ranks in another order. Rank 0 is the same.
        group_rank = layout.get_group_rank(info.rank, info.world_size)
        join_process_group(replace(info, rank=group_rank), timeout)
        setup_groups(layout, timeout / 60, self.cfg.trainer.seed)
        self.parallel = ParallelInfo(
            rank=info.rank,
            world_size=info.world_size,
            ranks_per_replica=layout.ranks_per_replica,
            holds_outputs=parallel_state.is_pipeline_last_stage(),
        )

    # ---- loading

    def load_model(self) -> None:
        """Build this rank's part, distribute the weights read by rank 0, and verify them."""
        torch.manual_seed(self.cfg.trainer.seed)
        model = build_full_model(self.cfg, self.name, self._path, with_weights=False)
        self._transformer = get_transformer(model)
        config, layout = self._transformer.config, self.layout
        check_model_config(config, self.settings, f"trainer.{self.name}")
        self.config = build_transformer_config(
            config,
            layout,
            self.megatron.transformer_config_kwargs,
            dispatcher=self.megatron.moe_token_dispatcher_type,
            device=self.device,
            bf16=self.cfg.trainer.bf16,
            recompute=self.is_trained and bool(self.cfg.trainer.gradient_checkpointing),
        )
        is_critic = isinstance(model, ValueModel)
        with self._emulate_gpu():
            embeddings: Any = self._transformer.get_input_embeddings()
            self.stage = build_stage(
                self.config, config, layout, self.device, padding_id=embeddings.padding_idx, is_critic=is_critic
            )
            if self.is_trained:
                self.optimizer = StageOptimizer(
                    self.config,
                    self.stage,
                    self.trained_megatron,
                    self.trained_settings.optimizer_config,
                    self.device,
                    bf16=self.cfg.trainer.bf16,
                )
                self.begin_schedule()
        self.weights = StageWeights(
            self.stage,
            self.config,
            map_sizes(config, layout, model.head_name if is_critic else None),
            {name: weight.shape for name, weight in get_full_weights(model).items()},
            has_frozen_routers=self.is_trained and self.trained_megatron.freeze_moe_router,
        )
        self.pipeline = self._build_pipeline(config)
        self._load_weights(self._path)

    @property
    def _path(self) -> str:
        return self.settings.model.path or ""

    def _build_pipeline(self, config: Any) -> Pipeline:
        """Build the pipeline that runs micro-batches. Args: `config`, of the transformers model."""
        layers, routers = sorted(find_sparse_layers(config)), None
        if layers:
            first_layer, _ = get_stage_layers(self.config)
            routers = StageRouters(self.stage, layers, first_layer, config.num_experts_per_tok, config.num_experts)
        decoder: Any = self._transformer.get_decoder()
        return Pipeline(
            self.optimizer.model if self.is_trained else self.stage,
            self.stage,
            type(decoder.rotary_emb)(config).to(self.device),
            get_vocabulary_shard(config, self.layout),
            routers=routers,
            chunk_size=self.cfg.trainer.logprobs_chunk_size,
            device=self.device,
        )

    def _load_weights(self, path: str) -> None:
        """Distribute the weights of a model from rank 0, which reads them, to all ranks, and verify them. A
        collective.
        """
        whole = build_full_model(self.cfg, self.name, path, with_weights=True) if self.parallel.rank == 0 else None
        weights = None if whole is None else get_full_weights(whole)
        self.weights.scatter(from_first_rank(weights, self.weights.shapes, self.device), self._write)
        line = verify_model(
            path,
            whole,
            self.gather_parameters(),
            lambda batch: self.pipeline.forward([batch], 1.0)[0].output,
            self._transformer.config.vocab_size,
            held=torch.float32 if self.is_trained else self.config.params_dtype,
            computed=self.config.params_dtype,
        )
        if self.parallel.rank == 0:
            logger.info(line)

    @torch.no_grad()
    def _write(self, _: Entry, parameter: nn.Parameter, part: torch.Tensor) -> None:
        if self.is_trained and parameter.requires_grad:
            self.optimizer.shards.write(parameter, "weight", part)
        else:
            parameter.copy_(part)

    def _emulate_gpu(self) -> AbstractContextManager[None]:
        """Make megatron-core treat CPU tensors as GPU tensors while it builds model and optimizer."""
        if self.device.type != "cpu":
            return nullcontext()
        from skyrl_train.training_backends.megatron import cpu_stand_in

        return cpu_stand_in.emulate_gpu_tensors()

    @property
    def transformer(self) -> PreTrainedModel:
        return self._transformer

    # ---- one step

    @property
    def _temperature(self) -> float:
        """Sampling temperature of the policy, for all models."""
        return self.cfg.generator.sampling_params.temperature

    def score_each(
        self, micro_batches: Iterable[TrainingInputBatch], *, record_routes: bool = False
    ) -> Iterable[Scores]:
        # All at once: stages compute different micro-batches at a time.
        return self.pipeline.forward(micro_batches, self._temperature, record_routes=record_routes)

    def forward_backward(
        self, batch: TrainingInputBatch, micro_batches: Sequence[MicroBatch], objective: Objective
    ) -> Gradient:
        parts: list[Part] = []
        for each in micro_batches:
            micro = batch.rows(torch.tensor(each.rows))
            parts.append((build_dummy(micro), False) if each.is_dummy else (micro, True))
        found = self.pipeline.forward_backward(parts, self._temperature, objective, self.parallel.data_parallel_size)
        # Only the last stage has scores; it sends them to the others, since any rank of a replica may be asked.
        scores = [
            (each.scores.output.cpu(), None if each.scores.entropy is None else each.scores.entropy.cpu())
            for each in found
        ]
        sums, scored = from_last_stage((merge_metric_sums(read_scalars([each.sums for each in found])), scores))
        outputs = torch.zeros(len(batch), batch.metadata["response_length"])
        entropies = torch.zeros_like(outputs) if objective.needs_entropy else None
        for micro_batch, (output, entropy) in zip(micro_batches, scored, strict=True):
            if not micro_batch.is_dummy:
                rows = torch.tensor(micro_batch.rows)
                outputs[rows] = output
                if entropies is not None and entropy is not None:
                    entropies[rows] = entropy
        router = None if self.pipeline.routers is None else self.pipeline.routers.reset_statistics()
        return Gradient(sums, outputs, router, entropies)

    def prompt_log_probs(self, tokens: torch.Tensor) -> torch.Tensor:
        micro = TrainingInputBatch(
            sequences=tokens, attention_mask=torch.ones_like(tokens), metadata={"response_length": tokens.shape[1] - 1}
        )
        return self.pipeline.forward([micro], 1.0)[0].output

    def score(self, micro_batch: TrainingInputBatch, *, with_entropy: bool = False) -> Scores:
        """Score a micro-batch of a model in one pipeline stage; several stages support only `forward` and
        `forward_backward`."""
        if self.layout.pipeline > 1:
            raise RuntimeError("score() needs pipeline_model_parallel_size=1: use forward() or forward_backward()")
        return self.pipeline.score(micro_batch, self._temperature, with_entropy=with_entropy)

    def backward(self, loss: torch.Tensor) -> None:
        # Gradients are averaged over data-parallel ranks, which hold disjoint parts of one weighted sum.
        (loss * self.parallel.data_parallel_size).backward()

    def optimizer_step(self) -> Step:
        rate = self.schedule.rate
        norm = self.optimizer.step(rate)
        self.schedule.step()
        if self.device.type == "cuda" and self.trained_megatron.empty_cuda_cache:
            torch.cuda.empty_cache()
        return Step(norm, rate, is_skipped=not math.isfinite(norm))

    # ---- device memory

    def iter_weights(self) -> Iterator[torch.Tensor]:
        yield from self.stage.parameters()
        yield from self.stage.buffers()

    def iter_optimizer_state(self) -> Iterator[torch.Tensor]:
        return self.optimizer.shards.iter_tensors()

    def offload(self) -> Transfer | None:
        if self.frees_device and self.is_trained:
            self.optimizer.free_gradients()
        return super().offload()

    def offload_optimizer(self) -> Transfer | None:
        if self.frees_device and self.is_trained:
            self.optimizer.free_gradients()
        return super().offload_optimizer()

    def onload(self) -> Transfer | None:
        transfer = super().onload()
        if self.frees_device and self.is_trained:
            self.optimizer.restore_gradients()
            self.optimizer.shards.move(self.device)  # moments that a checkpoint brought meanwhile
        return transfer

    # ---- whole parameters, files

    def gather_parameters(self, dtype: torch.dtype = torch.float32) -> Iterator[tuple[str, torch.Tensor]]:
        def get_values(parameter: nn.Parameter) -> torch.Tensor:
            # The model computes with the float32 weights rounded to its dtype, so they need no communication.
            return parameter.detach() if parameter.dtype == dtype else self._gather_shard(parameter).to(dtype)

        return self.weights.gather(get_values, dtype=dtype)

    def _gather_shard(self, parameter: nn.Parameter) -> torch.Tensor:
        """Gather a weight of this rank in float32. A collective of its data-parallel ranks."""
        if self.is_trained and parameter.requires_grad and parameter.dtype != torch.float32:
            return self.optimizer.shards.gather(parameter, "weight")
        return parameter.detach().float()

    def load_parameters(self, folder: str) -> None:
        self._load_weights(folder)

    def training_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        return gather_training_state(self.weights, self.optimizer.shards, self._gather_shard)

    def load_training_state(self, files: StateFiles) -> None:
        load_training_state(self.weights, self.optimizer.shards, files)

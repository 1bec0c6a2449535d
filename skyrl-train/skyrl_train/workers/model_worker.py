"""One rank of a model: it loads, shards and runs it. Knows nothing of Ray; alone it is a plain object."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from skyrl_train.config import FSDPConfig, SkyRLConfig
from skyrl_train.distributed.fsdp2 import shard_model
from skyrl_train.distributed.process_group import free_port, init_process_group, make_mesh, node_address
from skyrl_train.models.causal_lm import load_causal_lm, response_log_probs, trim
from skyrl_train.training_batch import TrainingInputBatch, TrainingOutputBatch


@dataclass(frozen=True, kw_only=True)
class RankInfo:
    """Which rank of which group a worker is, and where the group meets."""

    rank: int = 0
    world_size: int = 1
    master_address: str = "127.0.0.1"
    master_port: int = 0
    device: str = "cpu"


class ModelWorker:
    """A sharded causal LM that gives log-probs. The reference model is one as it stands; the policy adds learning."""

    def __init__(self, cfg: SkyRLConfig):
        self.cfg = cfg
        self.device = torch.device("cpu")
        self.rank = 0
        self.world_size = 1

    @property
    def _model_settings(self) -> tuple[str, FSDPConfig, dict[str, Any]]:
        ref = self.cfg.trainer.ref
        return ref.model.path, ref.fsdp_config, ref.model_config_kwargs

    def rendezvous_point(self) -> tuple[str, int]:
        """An address and free port of this worker's machine where its group can meet."""
        return node_address(), free_port()

    def init_model(self, info: RankInfo) -> None:
        """Joins the group and loads the model. A collective: every rank must call it."""
        self.rank, self.world_size, self.device = info.rank, info.world_size, torch.device(info.device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        init_process_group(
            rank=info.rank,
            world_size=info.world_size,
            master_address=info.master_address,
            master_port=info.master_port or free_port(),
            device=self.device,
            timeout_seconds=self.cfg.trainer.worker_timeout_seconds,
        )
        torch.manual_seed(self.cfg.trainer.seed)
        path, fsdp_config, config_overrides = self._model_settings
        model = load_causal_lm(
            path,
            device=torch.device("cpu") if fsdp_config.cpu_offload else self.device,
            flash_attn=self.cfg.trainer.flash_attn,
            config_overrides=config_overrides,
            **self._checkpointing,
        )
        mesh = make_mesh(self.device, fsdp_config.fsdp_size)
        self.model: nn.Module = shard_model(model, mesh, fsdp_config, bf16=self.cfg.trainer.bf16)

    @property
    def _checkpointing(self) -> dict[str, bool]:
        return {}  # nothing is kept for a backward pass that never comes

    @torch.no_grad()
    def forward(self, batch: TrainingInputBatch) -> TrainingOutputBatch:
        """Log-probs `output` [B, R] of the responses in `sequences`, `attention_mask` [B, T]. R is metadata
        `response_length`."""
        micro_size = self.cfg.trainer.micro_forward_batch_size_per_gpu
        outputs = []
        for micro in batch.chunks(micro_size):
            log_probs, _ = self._response_log_probs(micro, with_entropy=False)
            outputs.append(log_probs.cpu())
        return TrainingOutputBatch(output=torch.cat(outputs))

    def _response_log_probs(
        self, micro: TrainingInputBatch, *, with_entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Log-probs and entropy [B, R] of a micro-batch, computed without the columns that only pad; 0 there."""
        num_response = micro.metadata["response_length"]
        sequences, mask, num_used = trim(micro.tensor("sequences"), micro.tensor("attention_mask"), num_response)
        log_probs, entropy = response_log_probs(
            self.model,
            sequences.to(self.device),
            mask.to(self.device),
            num_used,
            self.cfg.generator.sampling_params.temperature,
            with_entropy=with_entropy,
        )
        missing = num_response - num_used
        if missing:
            log_probs = nn.functional.pad(log_probs, (0, missing))
            entropy = None if entropy is None else nn.functional.pad(entropy, (0, missing))
        return log_probs, entropy

    def offload_to_cpu(self) -> None:
        """Gives the device's memory back until `backload_to_gpu`. On a CPU there is nothing to give."""
        if self.device.type == "cuda":
            self.model.to("cpu")
            torch.cuda.empty_cache()

    def backload_to_gpu(self) -> None:
        if self.device.type == "cuda":
            self.model.to(self.device)

    def teardown(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


class RefWorker(ModelWorker):
    """The reference model: the policy as it was, which KL is measured to."""

"""One rank of a model: it loads, shards and runs it. Knows nothing of Ray; alone it is a plain object."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from skyrl_train.config import CriticConfig, PolicyConfig, RefConfig, SkyRLConfig
from skyrl_train.distributed.fsdp2 import load_whole_state, shard_model
from skyrl_train.distributed.process_group import free_port, init_process_group, make_mesh
from skyrl_train.distributed.ulysses import SequenceParallel, make_sequence_parallel
from skyrl_train.models.causal_lm import load_causal_lm
from skyrl_train.models.scoring import ScoringModel, TokenScores
from skyrl_train.models.scoring_check import check_scoring
from skyrl_train.models.value_model import ValueModel
from skyrl_train.training_batch import MicroBatch, TrainingInputBatch, TrainingOutputBatch
from skyrl_train.utils.nodes import node_address


@dataclass(frozen=True, kw_only=True)
class RankInfo:
    """Which rank of which group a worker is, and where the group meets."""

    rank: int = 0
    world_size: int = 1
    master_address: str = "127.0.0.1"
    master_port: int = 0
    device: str = "cpu"


class ModelWorker:
    """A sharded causal LM that gives log-probs. The reference model is one as it stands; what learns adds to it."""

    model: nn.Module
    """The sharded root module, a `ScoringModel` unless a subclass builds another."""

    def __init__(self, cfg: SkyRLConfig):
        self.cfg = cfg
        self.device = torch.device("cpu")
        self.rank = 0
        self.world_size = 1
        self.sequence_parallel: SequenceParallel | None = None  # the ranks of this rank's shard, if they are several

    @property
    def settings(self) -> PolicyConfig | CriticConfig | RefConfig:
        """The section of the settings that describes this model."""
        return self.cfg.trainer.ref

    def rendezvous_point(self) -> tuple[str, int]:
        """An address and free port of this worker's machine where its group can meet."""
        return node_address(), free_port()

    def init_model(self, info: RankInfo) -> None:
        """Joins the group and loads the model. A collective: every rank must call it."""
        self.join(info)
        self.load_model()

    def join(self, info: RankInfo) -> None:
        """Meets the other ranks. A collective."""
        self.rank, self.world_size, self.device = info.rank, info.world_size, torch.device(info.device)
        timeout = self.cfg.trainer.worker_timeout_seconds
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        init_process_group(
            rank=info.rank,
            world_size=info.world_size,
            master_address=info.master_address,
            master_port=info.master_port or free_port(),
            device=self.device,
            timeout_seconds=timeout,
        )
        self.sequence_parallel = make_sequence_parallel(self.settings.sequence_parallel_size, timeout)

    def load_model(self) -> None:
        """Loads the model, whole on rank 0 alone, and divides it over the ranks. A collective."""
        torch.manual_seed(self.cfg.trainer.seed)
        path = self.settings.model.path or ""
        model = self.build(path, with_weights=self.rank == 0)
        whole = {}
        if self.rank == 0:
            check_scoring(model, path)
            whole = model.state_dict()
        fsdp_config = self.settings.fsdp_config
        mesh = make_mesh(self.device, fsdp_config.fsdp_size)
        self.model = shard_model(model, mesh, fsdp_config, bf16=self.cfg.trainer.bf16)
        if self.world_size > 1:
            load_whole_state(self.model, whole, fsdp_config, self.device)

    def build(self, path: str, *, with_weights: bool) -> ScoringModel | ValueModel:
        """The model whole, in float32 on the CPU; without weights its parameters have shapes only (meta device)."""
        transformer = load_causal_lm(path, with_weights=with_weights, **self.loading())
        return ScoringModel(transformer, chunk_size=self.cfg.trainer.logprobs_chunk_size, **self.layout())

    def loading(self) -> dict[str, Any]:
        """How a transformers model is loaded. What is not trained keeps nothing for a backward that never comes."""
        return dict(
            device=self.device,
            flash_attn=self.cfg.trainer.flash_attn,
            config_overrides=self.settings.model_config_kwargs,
        )

    def layout(self) -> dict[str, Any]:
        """How rows lie before the model. Attention written out (`flash_attn=false`) knows padded rows only."""
        trainer = self.cfg.trainer
        return dict(packing=trainer.use_sample_packing and trainer.flash_attn, sequence_parallel=self.sequence_parallel)

    @torch.no_grad()
    def forward(self, batch: TrainingInputBatch, micro_batches: Sequence[MicroBatch]) -> TrainingOutputBatch:
        """What the model says of each response token, as `output` [b, R] of the batch's rows (0 for a row that only
        fillers compute).

        Args:
            batch: `sequences`, `attention_mask` [b, T]. R is metadata `response_length`.
            micro_batches: its rows, as the schedule divides them.
        """
        output = torch.zeros(len(batch), batch.metadata["response_length"])
        for micro_batch in micro_batches:
            rows = torch.tensor(micro_batch.rows)
            scores = self.score(batch.rows(rows))
            if not micro_batch.is_filler:
                output[rows] = scores.cpu()
        return TrainingOutputBatch(output=output)

    def score(self, micro: TrainingInputBatch) -> torch.Tensor:
        """One number [b, R] of each response token: here its log-prob."""
        return self.token_scores(micro).log_probs

    def token_scores(self, micro: TrainingInputBatch, *, with_entropy: bool = False) -> TokenScores:
        """Log-probs under the temperature of sampling (the policy's, whichever model this is), and entropy [b, R]."""
        return self.model(
            micro.tensor("sequences").to(self.device),
            micro.tensor("attention_mask").to(self.device),
            micro.metadata["response_length"],
            self.cfg.generator.sampling_params.temperature,
            with_entropy=with_entropy,
        )

    @property
    def _moves(self) -> bool:
        """Whether the model has a device to give up: not on a CPU, nor where it rests in host memory anyway."""
        return self.device.type == "cuda" and not self.settings.fsdp_config.cpu_offload

    def offload_to_cpu(self) -> None:
        """Gives the device's memory back until `backload_to_gpu`. On a CPU there is nothing to give."""
        if self._moves:
            self.model.to("cpu")
            torch.cuda.empty_cache()

    def backload_to_gpu(self) -> None:
        """Takes the device again."""
        if self._moves:
            self.model.to(self.device)

    def teardown(self) -> None:
        """Give back what does not end with the worker's last reference."""


class RefWorker(ModelWorker):
    """The reference model: the policy as it was, which KL is measured to."""

    def load_weights(self, folder: str) -> None:
        """Becomes the model that `PolicyWorker.save_hf_model` wrote into `folder`. A collective."""
        whole = self.build(folder, with_weights=True).state_dict() if self.rank == 0 else {}
        load_whole_state(self.model, whole, self.settings.fsdp_config, self.device)

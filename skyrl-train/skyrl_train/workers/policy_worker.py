"""One rank of the policy: log-probs, gradients, optimizer steps, and its weights on their way out."""

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_sharded
from torch.distributed.checkpoint.state_dict_saver import save as save_sharded
from transformers import PreTrainedTokenizerBase, get_scheduler

from skyrl_train.algorithms.kl import compute_approx_kl
from skyrl_train.algorithms.losses import PolicyLoss
from skyrl_train.algorithms.reduction import weighted_sum
from skyrl_train.config import FSDPConfig, SkyRLConfig
from skyrl_train.distributed.fsdp2 import clip_grad_norm, full_parameters
from skyrl_train.errors import CheckpointError
from skyrl_train.training_batch import TrainingInputBatch, TrainingOutputBatch
from skyrl_train.weight_sync.base import WeightSyncInitInfo
from skyrl_train.weight_sync.sender import EngineHandles, WeightSender, buckets_of
from skyrl_train.workers.model_worker import ModelWorker, RankInfo

MetricSums = dict[str, float]
"""Sums over a rank's part of a mini-batch: `loss/<name>` are parts of the loss (already weighted), `token/<name>` are
sums over the tokens of the loss mask, whose number is `num_tokens`. Ranks' sums add up to the mini-batch's."""


class PolicyWorker(ModelWorker):
    """The model that learns.

    Args:
        loss_fn: the policy loss, as a function (a user's own comes here by value).
        num_training_steps: optimizer steps of the whole run, for the learning-rate schedule.
    """

    def __init__(self, cfg: SkyRLConfig, loss_fn: PolicyLoss, num_training_steps: int):
        super().__init__(cfg)
        self._loss_fn = loss_fn
        self._num_training_steps = num_training_steps
        self._staged = TrainingInputBatch()
        self._old_log_probs: list[torch.Tensor] = []
        self._sender: WeightSender | None = None

    @property
    def _model_settings(self) -> tuple[str, FSDPConfig, dict[str, Any]]:
        policy = self.cfg.trainer.policy
        return policy.model.path, policy.fsdp_config, policy.model_config_kwargs

    @property
    def _checkpointing(self) -> dict[str, bool]:
        trainer = self.cfg.trainer
        return dict(
            gradient_checkpointing=trainer.gradient_checkpointing,
            use_reentrant=trainer.gradient_checkpointing_use_reentrant,
        )

    def init_model(self, info: RankInfo) -> None:
        super().init_model(info)
        optimizer = self.cfg.trainer.policy.optimizer_config
        beta1, beta2 = optimizer.adam_betas
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=optimizer.lr, betas=(beta1, beta2), weight_decay=optimizer.weight_decay
        )
        self.scheduler = get_scheduler(
            optimizer.scheduler,
            self.optimizer,
            num_warmup_steps=optimizer.num_warmup_steps,
            num_training_steps=self._num_training_steps,
        )

    # ---- learning

    def stage(self, batch: TrainingInputBatch) -> None:
        """Keeps this rank's rows of the whole training batch; `forward_backward` then names rows of it. Without
        `action_log_probs` in it, each row's own forward stands for them: right if one optimizer step takes all rows."""
        self._staged = batch
        self._old_log_probs = []

    def forward_backward(self, start: int, end: int) -> MetricSums:
        """Adds the gradient of staged rows [start, end), this rank's part of one mini-batch, in micro-batches."""
        sums: MetricSums = {}
        for micro in self._staged.slice(start, end).chunks(self.cfg.trainer.micro_train_batch_size_per_gpu):
            for name, value in self._forward_backward_micro(micro).items():
                sums[name] = sums.get(name, 0.0) + value
        return sums

    def _forward_backward_micro(self, micro: TrainingInputBatch) -> MetricSums:
        algorithm = self.cfg.trainer.algorithm
        mask = micro.tensor("loss_mask").to(self.device)
        weights = micro.tensor("loss_weights").to(self.device)

        def masked(tensor: torch.Tensor) -> torch.Tensor:
            return torch.where(mask != 0, tensor.to(self.device), 0.0)

        def column(name: str) -> torch.Tensor | None:
            return None if micro.get(name) is None else masked(micro.tensor(name))

        log_probs, entropy = self._response_log_probs(micro, with_entropy=True)
        assert entropy is not None
        log_probs, entropy = masked(log_probs), masked(entropy)
        old_log_probs = column("action_log_probs")
        if old_log_probs is None:
            old_log_probs = log_probs.detach()
            self._old_log_probs.append(old_log_probs.cpu())
        policy_loss, loss_metrics = self._loss_fn(
            log_probs, old_log_probs, column("advantages"), algorithm, mask, column("rollout_logprobs")
        )
        if policy_loss.shape != log_probs.shape:
            raise ValueError(
                f"the policy loss '{algorithm.policy_loss_type}' must return the loss of every token, "
                f"{tuple(log_probs.shape)}; got {tuple(policy_loss.shape)}. The trainer reduces it (loss_reduction)."
            )
        parts = {"policy_loss": policy_loss}
        base_log_probs = column("base_action_log_probs")
        if algorithm.use_kl_loss and base_log_probs is not None:
            kl = compute_approx_kl(log_probs, base_log_probs, mask, algorithm.kl_estimator_type)
            parts["kl_loss"] = kl * algorithm.kl_loss_coef
            loss_metrics = {**loss_metrics, "policy_kl": kl}
        if algorithm.use_entropy_loss:
            parts["entropy_loss"] = -entropy * algorithm.entropy_loss_coef
        reduced = {name: weighted_sum(part, weights) for name, part in parts.items()}
        loss = torch.stack(list(reduced.values())).sum()
        # Ranks hold disjoint parts of one weighted sum, and FSDP averages gradients over ranks.
        (loss * self.world_size).backward()
        sums = {f"loss/{name}": value.item() for name, value in reduced.items()}
        sums["loss/final_loss"] = loss.item()
        for name, value in {"policy_entropy": entropy, **loss_metrics}.items():
            sums[f"token/{name}"] = float(weighted_sum(value.detach(), mask))
        return sums | {"num_tokens": float(mask.sum())}

    def old_log_probs(self) -> TrainingOutputBatch:
        """What stood for `action_log_probs`, as `output` [B, R] of the staged rows; 0 outside the loss mask."""
        return TrainingOutputBatch(output=torch.cat(self._old_log_probs))

    def optim_step(self) -> dict[str, float]:
        """One optimizer step on the gradient gathered so far. A gradient that is not finite is dropped, and said so.

        Returns:
            `grad_norm` before clipping, `policy_lr` of this step, `skipped_updates` (1 if the gradient was not finite).
        """
        grad_norm = clip_grad_norm(self.model.parameters(), self.cfg.trainer.policy.optimizer_config.max_grad_norm)
        learning_rate = float(self.scheduler.get_last_lr()[0])
        finite = math.isfinite(grad_norm)
        if finite:
            self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return {"grad_norm": grad_norm, "policy_lr": learning_rate, "skipped_updates": float(not finite)}

    # ---- weights on their way to the engines

    def init_weight_sync(self, engines: EngineHandles, init_infos: Sequence[WeightSyncInitInfo]) -> None:
        """Rank 0 meets the engines; to the other ranks this is nothing."""
        if self.rank == 0:
            self._sender = WeightSender(engines, init_infos, self.device)

    def send_weights(self, version: int) -> dict[str, float]:
        """Streams the parameters to every engine and verifies them. A collective: they are gathered one by one."""
        generator = self.cfg.generator
        dtype: torch.dtype = getattr(torch, generator.model_dtype)
        buckets = buckets_of(
            full_parameters(self.model), dtype, int(generator.weight_transfer_threshold_cuda_ipc_GB * 1e9)
        )
        if self._sender is not None:
            return self._sender.send(buckets, version)
        for _ in buckets:  # takes part in the gathering
            pass
        return {}

    # ---- checkpoints

    def save_checkpoint(self, folder: str) -> None:
        """Writes model, optimizer, scheduler and this rank's random state into `folder`. A collective."""
        path = Path(folder)
        model_state, optimizer_state = get_state_dict(self.model, self.optimizer)
        try:
            path.mkdir(parents=True, exist_ok=True)
            save_sharded({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path / "sharded")
        except CheckpointException as error:  # no Exception: left alone, it would end this process
            raise CheckpointError(_reasons(error)) from None
        except OSError as error:
            raise CheckpointError(str(error)) from error
        extra = {"scheduler": self.scheduler.state_dict(), "rng": _random_state()}
        try:
            torch.save(extra, path / f"rank_{self.rank}.pt")
        except (OSError, RuntimeError) as error:  # torch's writer says that the disk is full by a RuntimeError
            raise CheckpointError(str(error)) from error

    def load_checkpoint(self, folder: str) -> None:
        """Takes on what `save_checkpoint` wrote, on any number of ranks. A collective."""
        path = Path(folder)
        model_state, optimizer_state = get_state_dict(self.model, self.optimizer)
        state = {"model": model_state, "optimizer": optimizer_state}
        try:
            load_sharded(state, checkpoint_id=path / "sharded")
        except CheckpointException as error:
            raise CheckpointError(f"{path} does not fit this model: {_reasons(error)}") from None
        except (OSError, RuntimeError, KeyError) as error:
            raise CheckpointError(f"{path} does not fit this model: {error}") from error
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        # A rank that is new (more ranks than before) goes on with rank 0's random state, set apart by its number.
        own = path / f"rank_{self.rank}.pt"
        extra = torch.load(own if own.exists() else path / "rank_0.pt", weights_only=False)
        self.scheduler.load_state_dict(extra["scheduler"])
        _set_random_state(extra["rng"])
        if not own.exists():
            torch.manual_seed(torch.initial_seed() + self.rank)

    def save_hf_model(self, folder: str, tokenizer: PreTrainedTokenizerBase) -> None:
        """Writes the model as `transformers` loads it (float32 safetensors, config, tokenizer). A collective."""
        state = self.full_state()
        if self.rank == 0:
            os.makedirs(folder, exist_ok=True)
            self.model.save_pretrained(folder, state_dict=state)  # type: ignore[operator]
            tokenizer.save_pretrained(folder)
        dist.barrier()

    def full_state(self) -> dict[str, torch.Tensor]:
        """Every parameter whole, on the CPU (rank 0; empty elsewhere). A collective."""
        state = {}
        for name, tensor in full_parameters(self.model):
            if self.rank == 0:
                state[name] = tensor.to("cpu", copy=True)
        return state


def _reasons(error: CheckpointException) -> str:
    """What failed on which rank, without the tracebacks of every one."""
    return "; ".join(f"rank {rank}: {type(reason).__name__}: {reason}" for rank, (reason, _) in error.failures.items())


def _random_state() -> dict[str, Any]:
    state: dict[str, Any] = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])

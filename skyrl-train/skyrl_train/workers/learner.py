"""What policy and critic share: gradients over micro-batches, optimizer steps, checkpoints, exports."""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel, PreTrainedTokenizerBase, get_scheduler

from skyrl_train.config import CriticConfig, PolicyConfig, SkyRLConfig
from skyrl_train.distributed.fsdp2 import clip_grad_norm, move_optimizer_state
from skyrl_train.models.adapter_files import save_adapter
from skyrl_train.models.lora import add_adapters, exported_parameters
from skyrl_train.training_batch import MicroBatch, TrainingInputBatch
from skyrl_train.workers.model_files import WrittenFiles, read_state, replacing, write_state
from skyrl_train.workers.model_worker import ModelWorker

MetricSums = dict[str, float]
"""Of a part of a mini-batch: `loss/<name>` are parts of the loss (already weighted), `token/<name>` are sums over the
tokens of the loss mask, whose number is `num_tokens`; these add up over parts. `max/<name>` are maxima."""

_WEIGHTS = ("loss_mask", "loss_weights", "critic_loss_weights")


def joined(parts: Iterable[MetricSums]) -> MetricSums:
    """The metrics of a whole from those of its parts, micro-batches or shards."""
    whole: MetricSums = {}
    for part in parts:
        for name, value in part.items():
            if name not in whole:
                whole[name] = value
            else:
                # Where one is NaN the maximum is: max() alone may pass over it.
                is_maximum = name.startswith("max/") and not math.isnan(whole[name] + value)
                whole[name] = max(whole[name], value) if is_maximum else whole[name] + value
    return whole


class LearnerWorker(ModelWorker):
    """A model that learns. One optimizer step is `forward_backward` of this shard's part of a mini-batch, then
    `optim_step`.

    Args:
        num_training_steps: optimizer steps of the whole run, for the learning-rate schedule.
    """

    name: ClassVar[str]
    """In metrics and settings: policy, critic."""

    def __init__(self, cfg: SkyRLConfig, num_training_steps: int):
        super().__init__(cfg)
        self._num_training_steps = num_training_steps
        self._staged = TrainingInputBatch()

    @property
    def settings(self) -> PolicyConfig | CriticConfig:
        raise NotImplementedError

    @property
    def transformer(self) -> PreTrainedModel:
        """The transformers model inside."""
        raise NotImplementedError

    def load_model(self) -> None:
        """Loads the model and begins its optimizer. A collective."""
        super().load_model()
        self.begin_optimizer()

    def begin_optimizer(self) -> None:
        """Make a new AdamW and learning-rate schedule. Weight decay spares no weight that is trained (norms, biases and
        embeddings decay too), as in SkyRL's FSDP backend."""
        config = self.settings.optimizer_config
        beta1, beta2 = config.adam_betas
        self.optimizer = torch.optim.AdamW(
            [parameter for parameter in self.model.parameters() if parameter.requires_grad],
            lr=config.lr,
            betas=(beta1, beta2),
            weight_decay=config.weight_decay,
        )
        self.scheduler = get_scheduler(
            config.scheduler,
            self.optimizer,
            num_warmup_steps=config.num_warmup_steps,
            num_training_steps=self._num_training_steps,
        )

    def loading(self) -> dict[str, Any]:
        """As of any model, with activations computed again in the backward if that is asked for."""
        trainer = self.cfg.trainer
        return super().loading() | dict(
            gradient_checkpointing=trainer.gradient_checkpointing,
            use_reentrant=trainer.gradient_checkpointing_use_reentrant,
        )

    def add_adapters(self, transformer: PreTrainedModel, *, with_weights: bool) -> None:
        """Gives the model adapters, if the settings ask for any."""
        lora = self.settings.model.lora
        if lora.rank == 0:
            return
        if with_weights:
            add_adapters(transformer, lora, setting=f"trainer.{self.name}.model.lora")
            return
        with torch.device("meta"):  # how they begin is rank 0's business, and may need the weights
            add_adapters(transformer, replace(lora, init_method="kaiming"))

    # ---- learning

    def stage(self, batch: TrainingInputBatch) -> None:
        """Keeps this shard's rows of the whole training batch; `forward_backward` then names rows of it."""
        self._staged = batch

    def forward_backward(self, micro_batches: Sequence[MicroBatch]) -> MetricSums:
        """Adds the gradient of this shard's part of one mini-batch, given as rows of what was staged."""
        return joined(self._forward_backward(micro_batch) for micro_batch in micro_batches)

    def _forward_backward(self, micro_batch: MicroBatch) -> MetricSums:
        micro = self._staged.rows(torch.tensor(micro_batch.rows))
        if micro_batch.is_filler:
            for name in _WEIGHTS:
                if micro.get(name) is not None:
                    micro[name] = torch.zeros_like(micro.tensor(name))
        loss, sums = self.loss(micro, micro_batch)
        # Ranks hold disjoint parts of one weighted sum, and FSDP averages gradients over ranks. (Ranks of one shard
        # compute the same loss, of which each gets the gradient that came through its own tokens.)
        (loss * self.world_size).backward()
        return sums

    def loss(self, micro: TrainingInputBatch, micro_batch: MicroBatch) -> tuple[torch.Tensor, MetricSums]:
        """A micro-batch's part of the mini-batch's loss, and of its metrics. A filler's weights and masks are 0."""
        raise NotImplementedError

    def optim_step(self) -> dict[str, float]:
        """One optimizer step on the gradient gathered so far. A gradient that is not finite is dropped, and said so.

        Returns:
            `grad_norm` before clipping, `<name>_lr` of this step, `skipped_updates` (1 if the gradient was not finite).
        """
        parameters = (parameter for parameter in self.model.parameters() if parameter.requires_grad)
        grad_norm = clip_grad_norm(parameters, self.settings.optimizer_config.max_grad_norm)
        learning_rate = float(self.scheduler.get_last_lr()[0])
        finite = math.isfinite(grad_norm)
        if finite:
            self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return {"grad_norm": grad_norm, f"{self.name}_lr": learning_rate, "skipped_updates": float(not finite)}

    # ---- making room

    def offload_to_cpu(self) -> None:
        """As of any model, and with `offload_after_step` the optimizer's state goes along."""
        if self._moves and self.settings.optimizer_config.offload_after_step:
            move_optimizer_state(self.optimizer, torch.device("cpu"))
        super().offload_to_cpu()

    def backload_to_gpu(self) -> None:
        """Takes the device again, model and optimizer."""
        super().backload_to_gpu()
        if self._moves:
            move_optimizer_state(self.optimizer, self.device)

    # ---- files

    def save_checkpoint(self, folder: str) -> WrittenFiles:
        """Writes all that the rest of a run depends on into `folder`, and tells which files. A collective."""
        return write_state(Path(folder), self.model, self.optimizer, self.scheduler.state_dict(), self.rank)

    def load_checkpoint(self, folder: str) -> None:
        """Takes on what `save_checkpoint` wrote, on any number of ranks. The optimizer's settings stay those of this
        run. A collective."""
        config, scheduler = self.settings.optimizer_config, self.scheduler
        assert isinstance(scheduler, LambdaLR), "every schedule that can be set is one"
        state = read_state(Path(folder), self.model, self.optimizer, self.rank)
        # The rate that the schedule gives at this step: the checkpoint's own, to the bit, if nothing has changed.
        rates = [config.lr * factor(state["last_epoch"]) for factor in scheduler.lr_lambdas]
        scheduler.load_state_dict(state | {"base_lrs": [config.lr] * len(rates), "_last_lr": rates})
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group |= {"lr": rate, "initial_lr": config.lr}
            group |= {"betas": tuple(config.adam_betas), "weight_decay": config.weight_decay}

    def save_hf_model(self, folder: str, tokenizer: PreTrainedTokenizerBase) -> None:
        """Writes the model as `transformers` loads it (float32 safetensors, config, tokenizer), adapters merged; these
        besides, as peft loads them, into `adapter`. The folder is there when it is whole. A collective."""
        state = self.full_state()
        with replacing(folder) if self.rank == 0 else nullcontext(Path(folder)) as target:
            if self.settings.model.lora.rank:
                save_adapter(self.transformer, target / "adapter", self.settings.model.path or "")
            if self.rank == 0:
                self.transformer.save_pretrained(target, state_dict=state)
                tokenizer.save_pretrained(target)

    def whole_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter whole, one at a time, adapters merged, under the names of transformers. A collective."""
        return exported_parameters(self.transformer)

    def full_state(self) -> dict[str, torch.Tensor]:
        """All of `whole_parameters` on the CPU (rank 0; empty elsewhere). A collective."""
        state = {}
        for name, tensor in self.whole_parameters():
            if self.rank == 0:
                state[name] = tensor.to("cpu", copy=True)
        return state

"""Gradients and AdamW of one pipeline stage: reduction over data-parallel ranks, and the optimizer step."""

import math
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import ChainedOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from skyrl_train.config import OptimizerConfig
from skyrl_train.config.megatron import MegatronConfig
from skyrl_train.training_backends.megatron.optimizer_shards import OptimizerShards, iter_optimizers


class StageOptimizer:
    """AdamW of megatron-core, with state and float32 weights sharded over data-parallel ranks. Construction is a
    collective.

    Args:
        stage: its parameters get their gradients from `model`, which wraps it.
        bf16: the model computes in bfloat16.
    """

    def __init__(
        self,
        config: TransformerConfig,
        stage: nn.Module,
        settings: MegatronConfig,
        optimizer_config: OptimizerConfig,
        device: torch.device,
        *,
        bf16: bool,
    ):
        if settings.freeze_moe_router:  # before the wrapper, which reduces only parameters that require gradients
            for name, parameter in stage.named_parameters():
                if name.endswith("mlp.router.weight"):
                    parameter.requires_grad = False
        self.model = DistributedDataParallel(config, build_ddp_config(settings.ddp_config, device), stage)
        self._optimizer = _build_adamw(self.model, optimizer_config, bf16=bf16)
        self._max_norm = optimizer_config.max_grad_norm
        self.shards = OptimizerShards(self.model, self._optimizer)

    def step(self, learning_rate: float) -> float:
        """Step on the accumulated gradient unless it is not finite, and zero it. A collective. Returns: the gradient's
        global norm before clipping."""
        # Once per optimizer step, for any number of forward-backward calls: it is not idempotent.
        finalize_model_grads([self.model])
        self._optimizer.prepare_grads()
        # Reduced over all ranks: either all skip the step, or none.
        norm = float(self._optimizer.get_grad_norm())
        if math.isfinite(norm):
            self._clip(norm)
            for part in self._optimizer.chained_optimizers:
                for group in part.param_groups:
                    group["lr"] = learning_rate
            self._optimizer.step_with_ready_grads()
        # Both: the buffer that the backward adds to, and its shards created by the optimizer.
        self.model.zero_grad_buffer()
        self._optimizer.zero_grad()
        return norm

    def _clip(self, norm: float) -> None:
        """Clip the gradients of the step to the maximum norm, as torch's `clip_grad_norm_` does."""
        factor = self._max_norm / (norm + 1e-6)
        if factor < 1:
            for part in iter_optimizers(self._optimizer):
                for group in part.param_groups:
                    for shard in group["params"]:
                        if shard.grad is not None:
                            shard.grad.mul_(factor)

    def free_gradients(self) -> None:
        """Free the memory of gradients, which are zero between steps."""
        for buffer in self._buffers:
            buffer.offload_to_cpu(move_params=False)

    def restore_gradients(self) -> None:
        """Allocate the gradients, as zeros."""
        for buffer in self._buffers:
            buffer.reload_from_cpu(move_params=False)

    @property
    def _buffers(self) -> list[Any]:
        """Flat buffers underlying weights and gradients."""
        return [*self.model.buffers, *self.model.expert_parallel_buffers]  # type: ignore[misc]


def _build_adamw(model: DistributedDataParallel, config: OptimizerConfig, *, bf16: bool) -> ChainedOptimizer:
    # Weight decay applies to all trained weights, as with FSDP2.
    beta1, beta2 = config.adam_betas
    settings = MegatronOptimizerConfig(
        optimizer="adam",
        lr=config.lr,
        weight_decay=config.weight_decay,
        adam_beta1=beta1,
        adam_beta2=beta2,
        adam_eps=1e-8,
        bf16=bf16,
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
        use_distributed_optimizer=True,
        clip_grad=0.0,  # `_clip` is called between the norm and the step
    )
    # Empty overrides: the default excludes norms and biases from weight decay.
    optimizer = get_megatron_optimizer(settings, [model], config_overrides={}, use_gloo_process_groups=False)
    assert isinstance(optimizer, ChainedOptimizer)
    return optimizer


def build_ddp_config(settings: Any, device: torch.device) -> DistributedDataParallelConfig:
    """Build the gradient-reduction settings from `megatron_config.ddp_config`."""
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=settings.grad_reduce_in_fp32,
        # gloo has no averaging: gradients are divided before the sum, which is equivalent.
        average_in_collective=settings.average_in_collective and device.type == "cuda",
        use_distributed_optimizer=True,
    )

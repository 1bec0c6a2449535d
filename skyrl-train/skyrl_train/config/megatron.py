"""Settings of the Megatron backend (`trainer.strategy=megatron`): division of a model, and its layers."""

from dataclasses import dataclass, field
from typing import Any, Literal

from skyrl_train.config.base import BaseConfig

RECOMPUTATION: dict[str, Any] = {
    "recompute_granularity": "full",
    "recompute_modules": ["core_attn"],
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
    "gradient_accumulation_fusion": False,
}
"""Entries of `transformer_config_kwargs` that a run has unless it gives others."""


@dataclass(kw_only=True)
class MegatronDDPConfig(BaseConfig):
    """Reduction of gradients over data-parallel ranks."""

    grad_reduce_in_fp32: bool = True
    """Add up and reduce gradients in float32 where the model computes in bfloat16."""

    overlap_grad_reduce: bool = False
    """Reduce gradients while the backward still runs. Must be false: hooks of the backward would start the reduction of
    an optimizer step in its first part, and later parts would be left out."""

    overlap_param_gather: bool = False
    """Gather updated weights while the next forward runs. Must be false: it needs `overlap_grad_reduce`."""

    average_in_collective: bool = True
    """Average inside of the collective; else divide before it. On a CPU, whose collectives have no average, always the
    latter."""


@dataclass(kw_only=True)
class MegatronModelConfig(BaseConfig):
    """Division of one model by megatron-core."""

    tensor_model_parallel_size: int = 1
    """Ranks that divide each layer. Must divide attention heads, key-value heads and rows of the feed-forward layers.
    Above 1 the ranks divide the tokens between these layers, too (sequence parallelism)."""

    pipeline_model_parallel_size: int = 1
    """Stages that divide the layers; a micro-batch goes from one to the next. Must divide the number of layers, unless
    `transformer_config_kwargs` has `num_layers_in_first_pipeline_stage` or `num_layers_in_last_pipeline_stage`."""

    context_parallel_size: int = 1
    """Ranks that divide the tokens in attention. Must be 1: attention among packed rows over several ranks needs
    kernels of Transformer Engine. `trainer.strategy=fsdp2` divides sequences with `sequence_parallel_size`."""

    expert_model_parallel_size: int = 1
    """Ranks that the experts of a mixture are dealt to. Must divide their number."""

    expert_tensor_parallel_size: int | None = None
    """Ranks that divide each expert. null: `tensor_model_parallel_size`. 1 is what recipes with expert parallelism
    use."""

    model_config_kwargs: dict[str, Any] = field(default_factory=dict)
    """Entries of the model's config.json to replace at loading, besides those of the model's own
    `model_config_kwargs`."""

    transformer_config_kwargs: dict[str, Any] = field(default_factory=dict)
    """Fields of megatron-core's `TransformerConfig`, added to `recompute_granularity: full`, `recompute_modules:
    [core_attn]`, `recompute_method: uniform`, `recompute_num_layers: 1`, `gradient_accumulation_fusion: false`.
    Activations are computed again only if `trainer.gradient_checkpointing` is on."""

    moe_token_dispatcher_type: Literal["alltoall"] = "alltoall"
    """How tokens travel to the ranks of their experts. (megatron-core's `allgather` wants as many tokens of every rank,
    and rows laid end to end differ in length; `flex` needs libraries of its own.)"""

    def __post_init__(self) -> None:
        self.transformer_config_kwargs = RECOMPUTATION | dict(self.transformer_config_kwargs)

    @property
    def ranks_per_replica(self) -> int:
        """Ranks that share the rows of a data-parallel rank."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size


@dataclass(kw_only=True)
class MegatronConfig(MegatronModelConfig):
    """Division of a trained model by megatron-core, and how it is trained."""

    ddp_config: MegatronDDPConfig = field(default_factory=MegatronDDPConfig)

    freeze_moe_router: bool = False
    """Train the experts and not the choice among them."""

    empty_cuda_cache: bool = True
    """Give memory that the allocator keeps back to the device after each optimizer step."""

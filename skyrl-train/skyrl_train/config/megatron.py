"""Settings of the Megatron backend (`trainer.strategy=megatron`): parallelism of a model, and its layers."""

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
"""Default entries of `transformer_config_kwargs`, kept unless a run overrides them."""


@dataclass(kw_only=True)
class MegatronDDPConfig(BaseConfig):
    """Reduction of gradients over data-parallel ranks."""

    grad_reduce_in_fp32: bool = True
    """Accumulate and reduce gradients in float32 if the model computes in bfloat16."""

    overlap_grad_reduce: bool = False
    """Reduce gradients while the backward runs. Must be false: hooks would reduce the first micro-batches of an
    optimizer step and miss the later ones."""

    overlap_param_gather: bool = False
    """Gather updated weights while the next forward runs. Must be false: it needs `overlap_grad_reduce`."""

    average_in_collective: bool = True
    """Average gradients within the collective; otherwise divide before it. Ignored on a CPU, where collectives do not
    average."""


@dataclass(kw_only=True)
class MegatronModelConfig(BaseConfig):
    """Parallelism of one model in megatron-core."""

    tensor_model_parallel_size: int = 1
    """Ranks that share each layer. Must divide the number of attention heads, key-value heads and rows of the
    feed-forward layers. Above 1, the ranks also divide the tokens between these layers (sequence parallelism)."""

    pipeline_model_parallel_size: int = 1
    """Pipeline stages that divide the layers. Must divide the number of layers, unless `transformer_config_kwargs` has
    `num_layers_in_first_pipeline_stage` or `num_layers_in_last_pipeline_stage`."""

    context_parallel_size: int = 1
    """Ranks that divide the tokens in attention. Must be 1; `trainer.strategy=fsdp2` divides sequences with
    `sequence_parallel_size`."""

    expert_model_parallel_size: int = 1
    """Ranks that share the experts of a mixture. Must divide the number of experts."""

    expert_tensor_parallel_size: int | None = None
    """Ranks that share each expert. null: `tensor_model_parallel_size`. Recipes with expert parallelism use 1."""

    model_config_kwargs: dict[str, Any] = field(default_factory=dict)
    """Entries that override the model's config.json at loading, in addition to the model's own
    `model_config_kwargs`.
    """

    transformer_config_kwargs: dict[str, Any] = field(default_factory=dict)
    """Fields of megatron-core's `TransformerConfig`, added to the default. Activations are recomputed only if
    `trainer.gradient_checkpointing` is on."""

    moe_token_dispatcher_type: Literal["alltoall"] = "alltoall"
    """Method of sending tokens to the ranks of their experts."""

    def __post_init__(self) -> None:
        self.transformer_config_kwargs = RECOMPUTATION | dict(self.transformer_config_kwargs)

    @property
    def ranks_per_replica(self) -> int:
        """Number of ranks that share the rows of a data-parallel rank."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size


@dataclass(kw_only=True)
class MegatronConfig(MegatronModelConfig):
    """Parallelism and training of a model in megatron-core."""

    ddp_config: MegatronDDPConfig = field(default_factory=MegatronDDPConfig)

    freeze_moe_router: bool = False
    """Train the experts but not the router."""

    empty_cuda_cache: bool = True
    """Release the allocator's cached memory to the device after each optimizer step."""

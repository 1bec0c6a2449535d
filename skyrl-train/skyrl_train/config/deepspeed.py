"""Settings of the DeepSpeed backend (`trainer.strategy=deepspeed`): names and structure of DeepSpeed's JSON.

Two top-level groups are shared: `deepspeed_config.train` by trained models, `deepspeed_config.eval` by models that only
score. Each model has the same settings, which refer to the shared ones by default.
"""

from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal, TypeVar

from skyrl_train.config.base import BaseConfig
from skyrl_train.config.typed import make_reference

Group = TypeVar("Group")
Amount = int | float | Literal["auto"]
"""Number of elements; 1e4 is accepted. `auto`: DeepSpeed's default."""


@dataclass(kw_only=True)
class DeepSpeedOffloadConfig(BaseConfig):
    """Location of the state that ZeRO shards over ranks."""

    device: Literal["none", "cpu"] = "none"
    """`none`: on the model's device. `cpu`: in host memory."""

    pin_memory: bool = False
    """Use page-locked host memory: faster copies, but it cannot be swapped out."""


@dataclass(kw_only=True)
class DeepSpeedZeroConfig(BaseConfig):
    """ZeRO: sharding of a model's state over its ranks (https://arxiv.org/abs/1910.02054)."""

    stage: int = 3
    """Sharded state. 0: nothing. 1: optimizer state and the float32 weights of mixed precision. 2: also gradients. 3:
    also parameters."""

    offload_param: DeepSpeedOffloadConfig = field(default_factory=DeepSpeedOffloadConfig)
    offload_optimizer: DeepSpeedOffloadConfig = field(default_factory=lambda: DeepSpeedOffloadConfig(pin_memory=True))

    sub_group_size: Amount = "auto"
    """Number of elements that the stage-3 optimizer updates at a time."""

    reduce_bucket_size: Amount = "auto"
    """Number of gradient elements reduced at a time."""

    stage3_param_persistence_threshold: Amount = "auto"
    """Parameters of at most this many elements are kept whole on every rank."""

    stage3_prefetch_bucket_size: Amount = "auto"
    """Number of parameter elements gathered ahead of their use."""

    stage3_max_live_parameters: Amount = "auto"
    """Maximum number of gathered parameter elements at a time."""

    stage3_max_reuse_distance: Amount = "auto"
    """A parameter used again within this many elements stays gathered."""

    round_robin_gradients: bool = True
    """Assign parameters to ranks in turn (stages 1 and 2), so that ranks copy gradients in parallel."""

    zero_hpz_partition_size: int = 1
    """Ranks that share a second copy of the stage-3 parameters (ZeRO++). Only 1 (no second copy) is supported."""

    zero_quantized_weights: bool = False
    """Gather weights in quantized form (ZeRO++). Not supported: log-probs would belong to other weights."""

    zero_quantized_gradients: bool = False
    """Reduce gradients in quantized form (ZeRO++). Not supported."""


@dataclass(kw_only=True)
class DeepSpeedScoringZeroConfig(BaseConfig):
    """Sharding of a model that is used for inference only."""

    stage: int = 3
    """0: every rank holds the whole model, without a DeepSpeed engine. 3: parameters are sharded over the ranks."""

    offload_param: DeepSpeedOffloadConfig = field(
        default_factory=lambda: DeepSpeedOffloadConfig(device="cpu", pin_memory=True)
    )

    stage3_param_persistence_threshold: Amount = "auto"
    """Parameters of at most this many elements are kept whole on every rank."""


@dataclass(kw_only=True)
class DeepSpeedAutocastConfig(BaseConfig):
    """Mixed precision by torch.autocast. Read only if `trainer.bf16` is true."""

    enabled: bool = True
    """Keep parameters in float32. False: parameters are bfloat16 and the optimizer keeps float32 copies (DeepSpeed's
    `bf16`)."""

    dtype: Literal["bfloat16"] = "bfloat16"
    """Number format of matrix products. No other is supported: float16 needs loss scaling."""


@dataclass(kw_only=True)
class DeepSpeedDataTypesConfig(BaseConfig):
    """Number formats that differ from the parameters' format."""

    grad_accum_dtype: Literal["fp32", "bf16"] = "fp32"
    """Number format in which the gradients of micro-batches are accumulated if parameters are bfloat16."""


@dataclass(kw_only=True)
class DeepSpeedTrainConfig(BaseConfig):
    """DeepSpeed settings of a trained model."""

    zero_optimization: DeepSpeedZeroConfig = field(default_factory=DeepSpeedZeroConfig)
    torch_autocast: DeepSpeedAutocastConfig = field(default_factory=DeepSpeedAutocastConfig)
    data_types: DeepSpeedDataTypesConfig = field(default_factory=DeepSpeedDataTypesConfig)

    disable_trace_cache: bool = False
    """Gather stage-3 parameters on use and free them at once, for mixtures of experts."""

    gradient_clipping: float | None = None
    """Maximum gradient norm. It is set by `optimizer_config.max_grad_norm` of the model; if given here, it must be
    equal."""

    wall_clock_breakdown: bool = False
    """Log the time of forward, backward and optimizer step."""

    prescale_gradient: bool = False
    """Divide gradients by the number of ranks before their reduction instead of after it."""


@dataclass(kw_only=True)
class DeepSpeedEvalConfig(BaseConfig):
    """DeepSpeed settings of a model that is used for inference only."""

    zero_optimization: DeepSpeedScoringZeroConfig = field(default_factory=DeepSpeedScoringZeroConfig)
    torch_autocast: DeepSpeedAutocastConfig = field(default_factory=DeepSpeedAutocastConfig)


@dataclass(kw_only=True)
class DeepSpeedConfig(BaseConfig):
    """Settings shared by the models of a run, under `trainer.strategy=deepspeed`."""

    train: DeepSpeedTrainConfig = field(default_factory=DeepSpeedTrainConfig)
    eval: DeepSpeedEvalConfig = field(default_factory=DeepSpeedEvalConfig)


def build_references(group: type[Group], name: str) -> Group:
    """Build settings that each refer to the setting of the same name in section `name`."""
    defaults = group()
    values: dict[str, Any] = {}
    for setting in fields(group):  # type: ignore[arg-type]
        value, full_name = getattr(defaults, setting.name), f"{name}.{setting.name}"
        values[setting.name] = (
            build_references(type(value), full_name) if is_dataclass(value) else make_reference(f"${{{full_name}}}")
        )
    return group(**values)

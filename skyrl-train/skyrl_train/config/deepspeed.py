"""Settings of the DeepSpeed backend (`trainer.strategy=deepspeed`): names and structure of DeepSpeed's own JSON.

Two groups at the top level are shared: `deepspeed_config.train` by what learns, `deepspeed_config.eval` by what only
scores. Every model has the same settings of its own, whose defaults are references to the shared ones.
"""

from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal, TypeVar

from skyrl_train.config.base import BaseConfig
from skyrl_train.config.typed import reference

Group = TypeVar("Group")
Amount = int | float | Literal["auto"]
"""A number of elements; 1e4 is one too. `auto` is DeepSpeed's default."""


@dataclass(kw_only=True)
class DeepSpeedOffloadConfig(BaseConfig):
    """Place of what ZeRO divides over the ranks."""

    device: Literal["none", "cpu"] = "none"
    """`none`: where the model computes. `cpu`: in host memory."""

    pin_memory: bool = False
    """Host memory is page-locked: faster copies, and it cannot be swapped out."""


@dataclass(kw_only=True)
class DeepSpeedZeroConfig(BaseConfig):
    """ZeRO: what the ranks of a model divide among them (https://arxiv.org/abs/1910.02054)."""

    stage: int = 3
    """0: nothing. 1: optimizer state and float32 weights of mixed precision. 2: gradients too. 3: parameters too."""

    offload_param: DeepSpeedOffloadConfig = field(default_factory=DeepSpeedOffloadConfig)
    offload_optimizer: DeepSpeedOffloadConfig = field(default_factory=lambda: DeepSpeedOffloadConfig(pin_memory=True))

    sub_group_size: Amount = "auto"
    """Elements that the optimizer of stage 3 updates at a time."""

    reduce_bucket_size: Amount = "auto"
    """Gradient elements that are reduced at a time."""

    stage3_param_persistence_threshold: Amount = "auto"
    """Parameters of at most so many elements stay whole on every rank."""

    stage3_prefetch_bucket_size: Amount = "auto"
    """Parameter elements that are gathered ahead of their use."""

    stage3_max_live_parameters: Amount = "auto"
    """Parameter elements that may be whole at a time."""

    stage3_max_reuse_distance: Amount = "auto"
    """A parameter that is used again within so many elements stays whole."""

    round_robin_gradients: bool = True
    """Stages 1 and 2 deal parameters over the ranks in turn, so that ranks copy gradients at the same time."""

    zero_hpz_partition_size: int = 1
    """Ranks that keep a second copy of the parameters of stage 3 among them (ZeRO++). 1: none. Others are not
    supported."""

    zero_quantized_weights: bool = False
    """Quantized gathering of weights (ZeRO++). Not supported: log-probs would be those of other weights."""

    zero_quantized_gradients: bool = False
    """Quantized reduction of gradients (ZeRO++). Not supported."""


@dataclass(kw_only=True)
class DeepSpeedScoringZeroConfig(BaseConfig):
    """Division of a model that only scores."""

    stage: int = 3
    """0: every rank holds the whole model, without an engine. 3: the ranks divide its parameters."""

    offload_param: DeepSpeedOffloadConfig = field(
        default_factory=lambda: DeepSpeedOffloadConfig(device="cpu", pin_memory=True)
    )

    stage3_param_persistence_threshold: Amount = "auto"
    """Parameters of at most so many elements stay whole on every rank."""


@dataclass(kw_only=True)
class DeepSpeedAutocastConfig(BaseConfig):
    """Mixed precision by torch.autocast. Asked only where `trainer.bf16` is true."""

    enabled: bool = True
    """Parameters stay float32 and matrix products compute in bfloat16. False: parameters are bfloat16 and the
    optimizer has float32 ones (DeepSpeed's `bf16`)."""

    dtype: Literal["bfloat16"] = "bfloat16"
    """Precision of matrix products. No other is supported: float16 needs a loss scale."""


@dataclass(kw_only=True)
class DeepSpeedDataTypesConfig(BaseConfig):
    """Precisions beside that of the parameters."""

    grad_accum_dtype: Literal["fp32", "bf16"] = "fp32"
    """Precision in which the gradients of micro-batches are added where parameters are bfloat16."""


@dataclass(kw_only=True)
class DeepSpeedTrainConfig(BaseConfig):
    """DeepSpeed's settings for a model that learns."""

    zero_optimization: DeepSpeedZeroConfig = field(default_factory=DeepSpeedZeroConfig)
    torch_autocast: DeepSpeedAutocastConfig = field(default_factory=DeepSpeedAutocastConfig)
    data_types: DeepSpeedDataTypesConfig = field(default_factory=DeepSpeedDataTypesConfig)

    disable_trace_cache: bool = False
    """Gather parameters of stage 3 when they are used and free them at once: for mixtures of experts and modules that
    not every forward uses. Sets prefetch bucket, max live parameters and max reuse distance to 0."""

    gradient_clipping: float | None = None
    """The norm to clip at is the model's `optimizer_config.max_grad_norm`; where this is given, it must be the same."""

    wall_clock_breakdown: bool = False
    """Log the time of forward, backward and step."""

    prescale_gradient: bool = False
    """Divide gradients by the number of ranks before they are added up, in place of afterwards."""


@dataclass(kw_only=True)
class DeepSpeedEvalConfig(BaseConfig):
    """DeepSpeed's settings for a model that only scores."""

    zero_optimization: DeepSpeedScoringZeroConfig = field(default_factory=DeepSpeedScoringZeroConfig)
    torch_autocast: DeepSpeedAutocastConfig = field(default_factory=DeepSpeedAutocastConfig)


@dataclass(kw_only=True)
class DeepSpeedConfig(BaseConfig):
    """Settings that models share under `trainer.strategy=deepspeed`."""

    train: DeepSpeedTrainConfig = field(default_factory=DeepSpeedTrainConfig)
    eval: DeepSpeedEvalConfig = field(default_factory=DeepSpeedEvalConfig)


def shared(group: type[Group], name: str) -> Group:
    """Make settings of which each is a reference to the same one of the section `name`."""
    defaults = group()
    values: dict[str, Any] = {}
    for setting in fields(group):  # type: ignore[arg-type]
        value, full_name = getattr(defaults, setting.name), f"{name}.{setting.name}"
        values[setting.name] = shared(type(value), full_name) if is_dataclass(value) else reference(f"${{{full_name}}}")
    return group(**values)

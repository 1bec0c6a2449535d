"""Settings of the models: which, how they are optimized, how they are divided over workers."""

from dataclasses import dataclass, field
from typing import Any, Literal

from skyrl_train.config.base import BaseConfig
from skyrl_train.config.deepspeed import DeepSpeedEvalConfig, DeepSpeedTrainConfig, shared
from skyrl_train.config.megatron import MegatronConfig, MegatronModelConfig
from skyrl_train.config.typed import reference


@dataclass(kw_only=True)
class ModelConfig(BaseConfig):
    """Path of a model."""

    path: str = "Qwen/Qwen2.5-1.5B-Instruct"
    """A folder, or a name on the Hugging Face hub."""


@dataclass(kw_only=True)
class LoRAConfig(BaseConfig):
    """Low-rank adapters (https://arxiv.org/abs/2106.09685), made by peft. The model itself is then frozen."""

    rank: int = 0
    """Rank of the adapters. 0: none, every weight of the model is trained."""

    alpha: int = 16
    """An adapter's product is scaled by this / rank."""

    dropout: float = 0.0
    """Dropout before the adapters. Reinforcement learning needs 0: with dropout, the log-probs of the same weights
    differ from one forward to the next."""

    target_modules: str | list[str] = "all-linear"
    """Layers that get an adapter: `all-linear` (all but the output layer), or names as peft takes them."""

    exclude_modules: str | list[str] | None = None
    """Layers that get none although `target_modules` names them."""

    init_method: str = "kaiming"
    """How adapters begin: `kaiming` (peft's default: A random, B zero) or a name that peft knows, such as `gaussian`,
    `pissa`, `olora`."""


@dataclass(kw_only=True)
class TrainedModelConfig(ModelConfig):
    """Path of a trained model, and its adapters."""

    lora: LoRAConfig = field(default_factory=LoRAConfig)


@dataclass(kw_only=True)
class CriticModelConfig(BaseConfig):
    """Path of the model that the critic starts from."""

    path: str | None = None
    """A folder, or a name on the Hugging Face hub. null: no critic."""

    lora: LoRAConfig = field(default_factory=LoRAConfig)


@dataclass(kw_only=True)
class OptimizerConfig(BaseConfig):
    """AdamW and its learning rate."""

    lr: float = 1e-6
    """Learning rate after warm-up."""

    adam_betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    """Decay rates of Adam's running mean and variance."""

    weight_decay: float = 1e-2
    """Decoupled weight decay of every weight that is trained, norms, biases and embeddings included. (Adam's epsilon is
    1e-8.)"""

    max_grad_norm: float = 1.0
    """Gradients of a larger norm, over all parameters and ranks, are scaled down to it. `.inf` never scales."""

    offload_after_step: bool = True
    """Where models take turns on a GPU (`trainer.placement.colocate_all`): optimizer state leaves it with the model."""

    num_warmup_steps: int = 0
    """Optimizer steps (not training steps) in which the learning rate rises from 0."""

    scheduler: Literal[
        "constant_with_warmup", "constant", "linear", "cosine", "cosine_with_restarts", "polynomial", "inverse_sqrt"
    ] = "constant_with_warmup"
    """How the learning rate goes on after warm-up, by its name in transformers (`constant` has no warm-up)."""


@dataclass(kw_only=True)
class FSDPConfig(BaseConfig):
    """Division of one model over its workers (torch's `fully_shard`)."""

    cpu_offload: bool = False
    """Parameters, gradients and optimizer state rest in host memory and visit the GPU layer by layer."""

    reshard_after_forward: bool | int = True
    """Free a layer's gathered parameters after its forward, and gather them again for its backward: less memory, more
    traffic. A number keeps them divided over groups of that many ranks."""

    fsdp_size: int = -1
    """Ranks that divide one copy of the model; several copies then work as data parallel replicas. -1: all ranks."""


@dataclass(kw_only=True)
class PolicyConfig(BaseConfig):
    """The model that learns."""

    model: TrainedModelConfig = field(default_factory=TrainedModelConfig)
    optimizer_config: OptimizerConfig = field(default_factory=OptimizerConfig)
    fsdp_config: FSDPConfig = field(default_factory=FSDPConfig)
    megatron_config: MegatronConfig = field(default_factory=MegatronConfig)
    deepspeed_config: DeepSpeedTrainConfig = field(
        default_factory=lambda: shared(DeepSpeedTrainConfig, "deepspeed_config.train")
    )

    sequence_parallel_size: int = 1
    """Workers that share each sequence (DeepSpeed-Ulysses, https://arxiv.org/abs/2309.14509): every one holds a part of
    its tokens, and in attention a part of its heads. Must divide the number of workers and of attention heads."""

    routing_replay: Literal["off", "R2", "R3"] = "off"
    """For mixtures of experts: the experts that training sends a token to, in place of those that its routers would
    choose now; the weights of these experts are still the routers'. `R2`: those that gave the log-probs at the start of
    the step (where one optimizer step takes all rows they are its own). `R3`: those that the rollout engine chose when
    it computed the token, which in other numerics are others now and then. `off`: its own choice, in every forward. The
    reference model and the critic always choose for themselves."""

    use_torch_compile: bool = False
    """Compile what turns hidden states into log-probs and entropy. Slow to start, faster afterwards."""

    model_config_kwargs: dict[str, Any] = field(default_factory=dict)
    """Entries of the model's config.json to replace at loading."""


@dataclass(kw_only=True)
class CriticConfig(BaseConfig):
    """The model that learns what reward to expect, for `advantage_estimator=gae`."""

    model: CriticModelConfig = field(default_factory=CriticModelConfig)
    optimizer_config: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=5e-6))
    fsdp_config: FSDPConfig = field(default_factory=FSDPConfig)
    megatron_config: MegatronConfig = field(default_factory=MegatronConfig)
    deepspeed_config: DeepSpeedTrainConfig = field(
        default_factory=lambda: shared(DeepSpeedTrainConfig, "deepspeed_config.train")
    )

    sequence_parallel_size: int = 1
    """Workers that share each sequence (DeepSpeed-Ulysses, https://arxiv.org/abs/2309.14509): every one holds a part of
    its tokens, and in attention a part of its heads. Must divide the number of workers and of attention heads."""

    model_config_kwargs: dict[str, Any] = field(default_factory=dict)
    """Entries of the model's config.json to replace at loading."""


@dataclass(kw_only=True)
class RefConfig(BaseConfig):
    """The frozen model that the policy is kept near to. Loaded only if a KL term is on."""

    model: ModelConfig = field(default_factory=lambda: ModelConfig(path=reference("${trainer.policy.model.path}")))
    fsdp_config: FSDPConfig = field(default_factory=FSDPConfig)
    megatron_config: MegatronModelConfig = field(default_factory=MegatronModelConfig)
    deepspeed_config: DeepSpeedEvalConfig = field(
        default_factory=lambda: shared(DeepSpeedEvalConfig, "deepspeed_config.eval")
    )

    sequence_parallel_size: int = 1
    """Workers that share each sequence (DeepSpeed-Ulysses, https://arxiv.org/abs/2309.14509): every one holds a part of
    its tokens, and in attention a part of its heads. Must divide the number of workers and of attention heads."""

    model_config_kwargs: dict[str, Any] = field(default_factory=dict)
    """Entries of the model's config.json to replace at loading."""

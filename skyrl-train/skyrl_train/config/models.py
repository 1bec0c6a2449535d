"""Settings of the models: paths, optimizers, sharding over workers."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from skyrl_train.config.base import BaseConfig
from skyrl_train.config.bounds import AtLeast
from skyrl_train.config.deepspeed import DeepSpeedEvalConfig, DeepSpeedTrainConfig, build_references
from skyrl_train.config.megatron import MegatronConfig, MegatronModelConfig
from skyrl_train.config.typed import make_reference


@dataclass(kw_only=True)
class ModelConfig(BaseConfig):
    """Model to load."""

    path: str = "Qwen/Qwen2.5-1.5B-Instruct"
    """Folder, or name on the Hugging Face hub."""


@dataclass(kw_only=True)
class LoRAConfig(BaseConfig):
    """Low-rank adapters (https://arxiv.org/abs/2106.09685), implemented by peft. The base model is then frozen."""

    rank: int = 0
    """Rank of the adapters. 0: no adapters, all weights of the model are trained."""

    alpha: int = 16
    """Numerator of the adapters' scale: their output is multiplied by alpha / rank."""

    dropout: float = 0.0
    """Dropout probability before the adapters. Reinforcement learning needs 0, as log-probs of the same weights would
    differ."""

    target_modules: str | list[str] = "all-linear"
    """Layers that get an adapter: `all-linear` (all except the output layer), or module names as in peft."""

    exclude_modules: str | list[str] | None = None
    """Layers that get no adapter although `target_modules` includes them."""

    init_method: str = "kaiming"
    """Initialization of the adapters: `kaiming` (peft's default: A random, B zero) or another name known to peft, such
    as `gaussian`, `pissa`, `olora`."""


@dataclass(kw_only=True)
class TrainedModelConfig(ModelConfig):
    """Model to train, with optional adapters."""

    lora: LoRAConfig = field(default_factory=LoRAConfig)


@dataclass(kw_only=True)
class CriticModelConfig(BaseConfig):
    """Model that the critic is initialized from."""

    path: str | None = None
    """Folder, or name on the Hugging Face hub. null: no critic."""

    lora: LoRAConfig = field(default_factory=LoRAConfig)


@dataclass(kw_only=True)
class OptimizerConfig(BaseConfig):
    """AdamW optimizer and learning-rate schedule."""

    lr: float = 1e-6
    """Learning rate after warm-up."""

    adam_betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    """Decay rates of AdamW's running mean and variance of gradients."""

    weight_decay: float = 1e-2
    """Decoupled weight decay, applied to all trained weights, including norms, biases and embeddings. (Epsilon of AdamW
    is 1e-8.)"""

    max_grad_norm: float = 1.0
    """Maximum gradient norm, over all parameters and ranks; larger gradients are scaled down to it. `.inf`: no
    clipping."""

    offload_after_step: bool = True
    """Offload the optimizer state where models share a GPU (`trainer.placement.offload`). False: it stays there."""

    num_warmup_steps: int = 0
    """Optimizer steps (not training steps) of linear warm-up from learning rate 0."""

    scheduler: Literal[
        "constant_with_warmup", "constant", "linear", "cosine", "cosine_with_restarts", "polynomial", "inverse_sqrt"
    ] = "constant_with_warmup"
    """Learning-rate schedule after warm-up, by its name in transformers (`constant` has no warm-up)."""


@dataclass(kw_only=True)
class FSDPConfig(BaseConfig):
    """Sharding of one model over its workers (torch's `fully_shard`)."""

    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory and copy them to the GPU layer by layer."""

    reshard_after_forward: bool | int = True
    """Free a layer's gathered parameters between forward and backward: less memory, more communication. A number keeps
    them sharded over groups of that many ranks."""

    fsdp_size: int = -1
    """Ranks that shard one copy of the model; several copies then work as data-parallel replicas. -1: all ranks."""


@dataclass(kw_only=True)
class TorchProfilerConfig(BaseConfig):
    """Profiler of policy ranks (`torch.profiler`). A step is a training step: all computation of the rank from the end
    of one step to the end of the next. A cycle that is cut off by the end of the run is not written."""

    enable: bool = False
    """Record traces. Recorded steps are slower."""

    ranks: list[int] = field(default_factory=lambda: [0])
    """Ranks of the policy that record."""

    save_path: str | None = None
    """Folder of the traces. null: `trainer.run_dir`/profiles."""

    skip_first: Annotated[int, AtLeast(0)] = 10
    """Steps before the first cycle, counted from the start of the process."""

    wait: Annotated[int, AtLeast(0)] = 0
    """Steps at the beginning of a cycle that are not recorded."""

    warmup: Annotated[int, AtLeast(0)] = 1
    """Following steps whose record is discarded, because it includes the profiler's startup."""

    active: Annotated[int, AtLeast(1)] = 1
    """Following steps that are recorded."""

    repeat: Annotated[int, AtLeast(0)] = 1
    """Number of cycles; each writes a file. 0: until the run ends."""

    activities: list[Literal["cpu", "cuda"]] = field(default_factory=lambda: ["cpu", "cuda"])
    """Devices to record; `cuda` is ignored on a machine without a GPU."""

    record_shapes: bool = True
    """Record the shapes of operators' inputs."""

    profile_memory: bool = False
    """Record allocations of memory."""

    with_stack: bool = True
    """Record source lines of operators."""

    with_flops: bool = False
    """Estimate floating-point operations of matrix products and convolutions."""

    with_modules: bool = False
    """Record the modules that called an operator (TorchScript models only)."""

    export_type: Literal["chrome_trace", "stacks"] = "chrome_trace"
    """`chrome_trace`: a file for https://ui.perfetto.dev. `stacks`: lines for a flame graph, of self CPU time, or of
    CUDA time where that is recorded (needs `with_stack`)."""


@dataclass(kw_only=True)
class PolicyConfig(BaseConfig):
    """The trained model."""

    model: TrainedModelConfig = field(default_factory=TrainedModelConfig)
    optimizer_config: OptimizerConfig = field(default_factory=OptimizerConfig)
    fsdp_config: FSDPConfig = field(default_factory=FSDPConfig)
    megatron_config: MegatronConfig = field(default_factory=MegatronConfig)
    deepspeed_config: DeepSpeedTrainConfig = field(
        default_factory=lambda: build_references(DeepSpeedTrainConfig, "deepspeed_config.train")
    )

    torch_profiler_config: TorchProfilerConfig = field(default_factory=TorchProfilerConfig)

    sequence_parallel_size: int = 1
    """Workers that share each sequence (DeepSpeed-Ulysses, https://arxiv.org/abs/2309.14509). Must divide the number of
    workers and of attention heads."""

    routing_replay: Literal["off", "R2", "R3"] = "off"
    """Replay of expert routing in mixtures of experts: training sends each token to recorded experts; the router still
    computes their weights. `R2`: experts chosen by the forward that computed the log-probs at the start of the step.
    `R3`: experts chosen by the rollout engine when it computed the token. `off`: the router chooses in every forward.
    The reference model and the critic never replay."""

    sampling_mask_replay: bool = False
    """Replay of sampling masks if `top_p`, `top_k` or `min_p` of `generator.sampling_params` truncate
    (https://arxiv.org/abs/2512.02556, "keep sampling mask"): log-probs, ratios and entropy are computed over the kept
    tokens of each position. Needs `generator.sampling_params.top_k`, which bounds their number. False: the gradient
    does not match the sampling distribution."""

    use_torch_compile: bool = False
    """Compile the computation of log-probs and entropy from hidden states. Slower start, faster steps."""

    model_config_kwargs: dict[str, Any] = field(default_factory=dict)
    """Entries that override the model's config.json at loading."""


@dataclass(kw_only=True)
class CriticConfig(BaseConfig):
    """Value model that predicts the expected reward, for `advantage_estimator=gae`."""

    model: CriticModelConfig = field(default_factory=CriticModelConfig)
    optimizer_config: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=5e-6))
    fsdp_config: FSDPConfig = field(default_factory=FSDPConfig)
    megatron_config: MegatronConfig = field(default_factory=MegatronConfig)
    deepspeed_config: DeepSpeedTrainConfig = field(
        default_factory=lambda: build_references(DeepSpeedTrainConfig, "deepspeed_config.train")
    )

    sequence_parallel_size: int = 1
    """Workers that share each sequence (DeepSpeed-Ulysses, https://arxiv.org/abs/2309.14509). Must divide the number of
    workers and of attention heads."""

    model_config_kwargs: dict[str, Any] = field(default_factory=dict)
    """Entries that override the model's config.json at loading."""


@dataclass(kw_only=True)
class RefConfig(BaseConfig):
    """Frozen reference model of the KL penalty. Loaded only if a KL term is enabled or the loss needs it."""

    model: ModelConfig = field(default_factory=lambda: ModelConfig(path=make_reference("${trainer.policy.model.path}")))
    fsdp_config: FSDPConfig = field(default_factory=FSDPConfig)
    megatron_config: MegatronModelConfig = field(default_factory=MegatronModelConfig)
    deepspeed_config: DeepSpeedEvalConfig = field(
        default_factory=lambda: build_references(DeepSpeedEvalConfig, "deepspeed_config.eval")
    )

    sequence_parallel_size: int = 1
    """Workers that share each sequence (DeepSpeed-Ulysses, https://arxiv.org/abs/2309.14509). Must divide the number of
    workers and of attention heads."""

    model_config_kwargs: dict[str, Any] = field(default_factory=dict)
    """Entries that override the model's config.json at loading."""

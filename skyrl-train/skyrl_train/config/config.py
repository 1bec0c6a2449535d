"""Every setting of the trainer: its name, type, default and meaning. The one home of all four.

Hydra's defaults (`store.py`), the checks (`validation.py`) and the reference page (`document.py`) are made from these
dataclasses. A text `${trainer.seed}` as a default means "the value of that setting": `SkyRLConfig` resolves it, a
section made on its own keeps the text. Imports no torch, no Ray, no Hydra.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

from skyrl_train.config.typed import REST, build, reference, resolve_references, to_dict
from skyrl_train.errors import ConfigError

if TYPE_CHECKING:
    from typing import Self

    from omegaconf import DictConfig

Device = Literal["cpu", "cuda"]
TrackerName = Literal["console", "tensorboard", "wandb", "mlflow", "swanlab"]


class BaseConfig:
    """What every section can do. Errors have full names when the section is built as a part of `SkyRLConfig`."""

    @classmethod
    def from_dict(cls, values: "Mapping[str, Any] | DictConfig") -> "Self":
        """Typed settings from plain values or from OmegaConf's, whose interpolations are resolved first.

        Raises ConfigError on a name that does not exist, a type or choice that does not fit, a value that is missing.
        """
        return build(cls, _plain(values))

    @classmethod
    def from_dict_config(cls, values: "Mapping[str, Any] | DictConfig") -> "Self":
        """The same as `from_dict`, under the name that other SkyRL releases use."""
        return cls.from_dict(values)


@dataclass(kw_only=True)
class DataConfig(BaseConfig):
    """What is learnt from, and what is measured on."""

    train_data: list[str] = field(default_factory=lambda: ["~/data/gsm8k/train.parquet"])
    """Training sets: paths of .parquet, .json or .jsonl files, or names on the Hugging Face hub as `name[:split]`.
    Several are joined."""

    val_data: list[str] = field(default_factory=lambda: ["~/data/gsm8k/validation.parquet"])
    """Evaluation sets, in the same forms. Empty means no evaluation."""


@dataclass(kw_only=True)
class PlacementConfig(BaseConfig):
    """Where the models run. Without a GPU, every count of GPUs is a count of worker processes."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """What models compute on. `auto` is cuda where the machine that starts the run sees a GPU, else cpu; set it where
    that machine is not like the workers (a head node without a GPU)."""

    colocate_all: bool = True
    """Training workers and rollout engines share their GPUs: engines sleep while the trainer works, and weights reach
    them through shared memory. False: each has its own GPUs, both may work at the same time, and weights are broadcast
    over a process group. On a CPU they share the cores either way."""

    colocate_policy_ref: bool = True
    """The policy and the reference model share GPUs. Asked only where `colocate_all` is false."""

    policy_num_nodes: int = 1
    """Machines that train the policy."""

    policy_num_gpus_per_node: int = 1
    """Policy workers on each of them: one a GPU, or that many processes on a CPU."""

    ref_num_nodes: int = 1
    """Machines that hold the reference model."""

    ref_num_gpus_per_node: int = 1
    """Reference workers on each of them: one a GPU, or that many processes on a CPU."""

    @property
    def policy_world_size(self) -> int:
        """Policy workers in all."""
        return self.policy_num_nodes * self.policy_num_gpus_per_node

    @property
    def ref_world_size(self) -> int:
        """Reference workers in all."""
        return self.ref_num_nodes * self.ref_num_gpus_per_node

    def resolved_device(self) -> Device:
        """`device` with `auto` answered by this machine. Ask on the driver: Ray hides GPUs from tasks without."""
        if self.device != "auto":
            return self.device
        import torch  # optional and heavy: only the question needs it

        return "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(kw_only=True)
class ModelConfig(BaseConfig):
    """Which model."""

    path: str = "Qwen/Qwen2.5-1.5B-Instruct"
    """A folder, or a name on the Hugging Face hub."""


@dataclass(kw_only=True)
class OptimizerConfig(BaseConfig):
    """AdamW and its learning rate."""

    lr: float = 1e-6
    """Learning rate after warm-up."""

    adam_betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    """Decay rates of Adam's running mean and variance."""

    weight_decay: float = 1e-2
    """Decoupled weight decay."""

    max_grad_norm: float = 1.0
    """Gradients of a larger norm, over all parameters and ranks, are scaled down to it. `.inf` never scales."""

    num_warmup_steps: int = 0
    """Optimizer steps (not training steps) in which the learning rate rises from 0."""

    scheduler: Literal[
        "constant_with_warmup", "constant", "linear", "cosine", "cosine_with_restarts", "polynomial", "inverse_sqrt"
    ] = "constant_with_warmup"
    """How the learning rate goes on after warm-up, by its name in transformers (`constant` has no warm-up)."""


@dataclass(kw_only=True)
class FSDPConfig(BaseConfig):
    """How one model is divided over its workers (torch's `fully_shard`)."""

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

    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer_config: OptimizerConfig = field(default_factory=OptimizerConfig)
    fsdp_config: FSDPConfig = field(default_factory=FSDPConfig)

    model_config_kwargs: dict[str, Any] = field(default_factory=dict)
    """Entries of the model's config.json to replace at loading."""


@dataclass(kw_only=True)
class RefConfig(BaseConfig):
    """The frozen model that the policy is kept near to. Loaded only if a KL term is on."""

    model: ModelConfig = field(default_factory=lambda: ModelConfig(path=reference("${trainer.policy.model.path}")))
    fsdp_config: FSDPConfig = field(default_factory=FSDPConfig)

    model_config_kwargs: dict[str, Any] = field(default_factory=dict)
    """Entries of the model's config.json to replace at loading."""


@dataclass(kw_only=True)
class KLCtrlConfig(BaseConfig):
    """How the KL coefficient moves when KL is part of the reward."""

    type: Literal["fixed", "adaptive"] = "fixed"
    """`adaptive` steers towards `kl_target` (https://arxiv.org/abs/1909.08593, section 2.2); `fixed` stays."""

    kl_target: float = 0.1
    """KL divergence that the adaptive controller aims at."""

    horizon: int = 10000
    """Samples over which the adaptive controller corrects an error; larger is slower."""


@dataclass(kw_only=True)
class CISPOConfig(BaseConfig):
    """Bounds of the importance weight of the `cispo` loss."""

    cispo_eps_clip_low: float = 1.0
    """The weight is at least 1 - this. 1: no lower bound, as in the paper."""

    cispo_eps_clip_high: float = 4.0
    """The weight is at most 1 + this."""


@dataclass(kw_only=True)
class SAPOConfig(BaseConfig):
    """How fast the soft gate of the `sapo` loss closes."""

    tau_pos: float = 1.0
    """Temperature of tokens with a positive advantage."""

    tau_neg: float = 1.05
    """Temperature of the others. Larger than `tau_pos`: what pushes tokens down is trusted less far."""


@dataclass(kw_only=True)
class AlgorithmConfig(BaseConfig):
    """What the trainer optimizes."""

    advantage_estimator: str = "grpo"
    """Registered name of the function that turns rewards into advantages: `grpo`, `rloo`, or one of your own."""

    policy_loss_type: str = "regular"
    """Registered name of the policy loss: `regular` (PPO's clipped surrogate), `dual_clip`, `gspo`, `cispo`, `sapo`, or
    one of your own."""

    loss_reduction: Literal["token_mean", "sequence_mean", "seq_mean_token_sum_norm"] = "token_mean"
    """How the losses of a mini-batch's tokens become one number: the mean over tokens; the mean over sequences of each
    one's token mean; or the mean over sequences of each one's token sum divided by `max_seq_len` (Dr. GRPO). Always
    over the whole mini-batch, so neither micro-batches nor workers change it."""

    max_seq_len: int | None = None
    """Divisor of `seq_mean_token_sum_norm`, in tokens.
    null: `generator.max_input_length` + `generator.sampling_params.max_generate_length`."""

    grpo_norm_by_std: bool = True
    """Divide GRPO's advantages by the standard deviation of their group."""

    advantage_batch_normalize: bool = False
    """Shift and scale the advantages of a batch to mean 0 and standard deviation 1, over response tokens."""

    eps_clip_low: float = 0.2
    """The probability ratio is clipped at 1 - this."""

    eps_clip_high: float = 0.2
    """The probability ratio is clipped at 1 + this."""

    clip_ratio_c: float = 3.0
    """With `policy_loss_type=dual_clip`: the loss of a token with negative advantage A is at most -this * A."""

    cispo: CISPOConfig = field(default_factory=CISPOConfig)

    sapo: SAPOConfig = field(default_factory=SAPOConfig)

    use_kl_loss: bool = True
    """Add the KL divergence to the reference model to the loss. Excludes `use_kl_in_reward`."""

    use_kl_in_reward: bool = False
    """Subtract the KL divergence to the reference model from the rewards. Excludes `use_kl_loss`."""

    kl_loss_coef: float = 0.001
    """Weight of the KL divergence, in the loss or in the reward (there: the controller's first value)."""

    kl_estimator_type: Literal["k1", "k2", "k3", "abs"] = "k3"
    """Estimate of the KL divergence from sampled tokens (http://joschu.net/blog/kl-approx.html)."""

    kl_ctrl: KLCtrlConfig = field(default_factory=KLCtrlConfig)

    use_entropy_loss: bool = False
    """Reward entropy: subtract it from the loss."""

    entropy_loss_coef: float = 0.01
    """Weight of the entropy."""

    @property
    def uses_reference_model(self) -> bool:
        """Whether a reference model is loaded at all."""
        return self.use_kl_loss or self.use_kl_in_reward


@dataclass(kw_only=True)
class TrainerConfig(BaseConfig):
    """The run: models, batches, and what is written when."""

    placement: PlacementConfig = field(default_factory=PlacementConfig)

    strategy: Literal["fsdp2"] = "fsdp2"
    """Training backend."""

    policy: PolicyConfig = field(default_factory=PolicyConfig)
    ref: RefConfig = field(default_factory=RefConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)

    seed: int = 42
    """Seeds the order of the data, every worker, and (through `generator.seed`) sampling."""

    epochs: int = 1
    """Passes over the training data."""

    max_training_steps: int | None = None
    """Training ends after this many steps, if the epochs have not ended it before."""

    train_batch_size: int = 1024
    """Prompts a training step."""

    policy_mini_batch_size: int = 256
    """Prompts an optimizer step."""

    update_epochs_per_batch: int = 1
    """Times that a training step goes over its batch."""

    micro_train_batch_size_per_gpu: int = 1
    """Sequences in one forward and backward of one worker. Changes memory and speed, not the result."""

    micro_forward_batch_size_per_gpu: int = 1
    """Sequences in one forward of one worker when only log-probs are wanted."""

    max_prompt_length: int = 512
    """Rows of the data whose prompt has more tokens are left out."""

    eval_batch_size: int = 1024
    """Prompts of an evaluation that are in work at a time."""

    eval_before_train: bool = True
    """Evaluate before the first step."""

    eval_interval: int = 5
    """Evaluate every so many steps, and after the last. <= 0: never."""

    bf16: bool = True
    """Compute in bfloat16, with float32 parameters and gradients at rest. False: float32 throughout."""

    flash_attn: bool = True
    """The fastest exact attention there is: flash-attention 2 where it is installed and the device is cuda, else
    torch's `scaled_dot_product_attention`. False: attention written out in single operations (eager)."""

    gradient_checkpointing: bool = True
    """Compute activations again in the backward instead of keeping them."""

    gradient_checkpointing_use_reentrant: bool = False
    """torch's older form of it."""

    disable_fast_tokenizer: bool = False
    """Use the tokenizer's Python form."""

    project_name: str = "skyrl"
    """The tracker's name for a group of runs."""

    run_name: str = "test_run"
    """The tracker's name for this run."""

    run_dir: str = "~/skyrl-runs/${trainer.project_name}/${trainer.run_name}"
    """The run's folder: its settings, metrics, trajectories, logs, and unless set otherwise checkpoints and exports."""

    logger: TrackerName | list[TrackerName] = "console"
    """Where metrics go, one name or several. metrics.jsonl in the run folder is always written."""

    print_example_interval: int = 10
    """Show one trajectory on the console every so many steps. <= 0: never."""

    ckpt_path: str = "${trainer.run_dir}/ckpts"
    """Folder of the checkpoints, `global_step_N` each."""

    ckpt_interval: int = 10
    """Write a checkpoint every so many steps, and after the last. <= 0: never."""

    max_ckpts_to_keep: int = -1
    """Older checkpoints are removed when there are more. -1: none is."""

    resume_mode: Literal["none", "latest", "from_path"] | None = "latest"
    """`latest` goes on from the newest complete checkpoint in `ckpt_path`, or starts anew if there is none; `from_path`
    goes on from `resume_path`; `none` (or null) starts anew."""

    resume_path: str | None = None
    """The `global_step_N` folder for `resume_mode=from_path`."""

    export_path: str = "${trainer.run_dir}/exports"
    """Folder of exported models, dumped batches and evaluations."""

    hf_save_interval: int = -1
    """Export the policy in Hugging Face format every so many steps. <= 0: never."""

    dump_data_batch: bool = False
    """Write every training batch to `export_path`/dumped_data."""

    dump_eval_results: bool = True
    """Write every evaluated trajectory to `export_path`/dumped_evals."""

    dump_trajectories: bool = True
    """Write every training trajectory to the run folder, readable: tokens, log-probs, masks, rewards, versions."""

    worker_timeout_seconds: float = 3600.0
    """The longest that one call to a training worker may take before the run ends with an error that names it."""

    @property
    def loggers(self) -> list[str]:
        """`logger` as a list."""
        return [self.logger] if isinstance(self.logger, str) else list(self.logger)

    def __post_init__(self) -> None:
        self.resume_mode = self.resume_mode or "none"


@dataclass(kw_only=True)
class SamplingParams(BaseConfig):
    """How tokens are drawn from the model."""

    max_generate_length: int = 1024
    """The most new tokens a turn."""

    temperature: float = 1.0
    """Divides the logits; log-probs are those of the divided ones. 0 takes the likeliest token."""

    top_p: float = 1.0
    """Draw from the smallest set of tokens with this much probability. 1: all."""

    top_k: int = -1
    """Draw from this many likeliest tokens. -1: all."""

    min_p: float = 0.0
    """Draw from tokens with at least this share of the likeliest one's probability."""

    repetition_penalty: float = 1.0
    """Above 1, tokens that have appeared become less likely (https://arxiv.org/abs/1909.05858)."""

    logprobs: int | None = 0
    """0: keep the log-prob of every token drawn. null: keep none."""

    stop: list[str] | None = None
    """Texts that end a turn. They stay in the answer."""

    additional_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further keywords of the engine's sampling parameters, such as `stop_token_ids` or `min_tokens`."""


def _eval_sampling_params() -> SamplingParams:
    return SamplingParams(
        temperature=0.0, max_generate_length=reference("${generator.sampling_params.max_generate_length}")
    )


@dataclass(kw_only=True)
class ChatTemplateConfig(BaseConfig):
    """The template that turns messages into text, where the tokenizer's own should not be used."""

    source: Literal["name", "file"] = "name"
    """Whether `name_or_path` is the name of a template of ours or the path of a Jinja file."""

    name_or_path: str | None = None
    """`qwen3_with_thinking`, `qwen3_without_thinking`, or a path. null: the tokenizer's own template."""


@dataclass(kw_only=True)
class GeneratorConfig(BaseConfig):
    """How answers are made: engines, sampling, turns."""

    backend: Literal["auto", "native"] = "auto"
    """Rollout engine. `native` runs transformers models in our own loop, on CPU and CUDA; `auto`: the best there is."""

    model_name: str = reference("${trainer.policy.model.path}")
    """The engines' model."""

    model_dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """The engines' number format; weights are cast to it on their way."""

    num_inference_engines: int = 1
    """Engines. With `trainer.placement.colocate_all` on GPUs: one a policy worker."""

    max_num_seqs: int = 1024
    """The most sequences that one engine works on at a time; more wait."""

    engine_init_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further keywords of the engine's constructor. Add with `+generator.engine_init_kwargs.name=value`."""

    weight_sync_backend: Literal["auto", "nccl", "gloo"] = "auto"
    """What carries weights from the trainer to the engines. `auto`: nccl on cuda, gloo on cpu."""

    weight_transfer_threshold_cuda_ipc_GB: float = 1.0
    """Weights travel in pieces of about this many GB (1e9 bytes); a larger tensor travels alone."""

    n_samples_per_prompt: int = 5
    """Answers to each training prompt: the group that GRPO compares."""

    eval_n_samples_per_prompt: int = 1
    """Answers to each evaluation prompt."""

    seed: int = reference("${trainer.seed}")
    """Seeds sampling."""

    sampling_params: SamplingParams = field(default_factory=SamplingParams)
    eval_sampling_params: SamplingParams = field(default_factory=_eval_sampling_params)

    max_input_length: int = reference("${trainer.max_prompt_length}")
    """The most tokens that an engine is given at any turn; a longer conversation ends with stop reason `length`."""

    max_turns: int = 1
    """The most turns of a conversation. Environments get it too."""

    use_conversation_multi_turn: bool = True
    """Every turn is a message of its own. False: model and environment write one growing assistant message."""

    append_eos_token_after_stop_str_in_multi_turn: bool = True
    """Where a turn ended with a stop text, put the end-of-sequence token the chat template expects after it. That token
    is not trained on."""

    chat_template: ChatTemplateConfig = field(default_factory=ChatTemplateConfig)

    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further variables of the chat template, such as `enable_thinking`."""

    zero_reward_on_non_stop: bool = False
    """Reward 0 for answers that did not end with stop reason `stop`."""

    apply_overlong_filtering: bool = False
    """Do not train on answers that were cut off by a length limit."""

    max_rollout_retries: int = 2
    """How often a rollout is tried again after an infrastructure failure, before it is left out of the batch."""

    request_timeout_seconds: float = 3600.0
    """The longest that one request to an engine may take, waiting included."""

    def resolved_backend(self) -> Literal["native"]:
        """`backend` with `auto` answered."""
        return "native"

    def resolved_weight_sync_backend(self, device: Device) -> Literal["nccl", "gloo"]:
        """`weight_sync_backend` with `auto` answered for models on `device`."""
        if self.weight_sync_backend != "auto":
            return self.weight_sync_backend
        return "nccl" if device == "cuda" else "gloo"


@dataclass(kw_only=True)
class SkyRLGymConfig(BaseConfig):
    """Environments. A section named like an environment's id, such as `environment.skyrl_gym.multiply.digits=3`, is
    handed to that environment as its `env_config`."""

    max_env_workers: int = 32
    """Threads that environments run in. 0: none, they run on the generator's event loop (they must not block)."""

    env_timeout_seconds: float = 600.0
    """The longest that one call to an environment may take; after it the rollout fails as an environment failure."""

    env_configs: dict[str, dict[str, Any]] = field(default_factory=dict, metadata=REST)
    """What the environment of that id is given as its `env_config`."""

    def env_config(self, env_class: str) -> dict[str, Any]:
        """The section of the environment `env_class`; empty if it has none."""
        return self.env_configs.get(env_class, {})


@dataclass(kw_only=True)
class EnvironmentConfig(BaseConfig):
    """What judges the answers."""

    env_class: str = "gsm8k"
    """Id of the environment for rows of the data without an `env_class` of their own."""

    skyrl_gym: SkyRLGymConfig = field(default_factory=SkyRLGymConfig)


@dataclass(kw_only=True)
class SkyRLConfig(BaseConfig):
    """All settings of a run."""

    data: DataConfig = field(default_factory=DataConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    generator: GeneratorConfig = field(default_factory=GeneratorConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)

    def __post_init__(self) -> None:
        resolve_references(self)
        if self.trainer.algorithm.max_seq_len is None:
            self.trainer.algorithm.max_seq_len = (
                self.generator.max_input_length + self.generator.sampling_params.max_generate_length
            )


def default_values(config_type: type[SkyRLConfig] = SkyRLConfig) -> dict[str, Any]:
    """The defaults as plain values, references to other settings kept as text (so that Hydra may resolve them last)."""
    return {section.name: to_dict(section.default_factory()) for section in fields(config_type)}  # type: ignore[misc]


def get_config_as_dict(config: "BaseConfig | Mapping[str, Any] | DictConfig") -> dict[str, Any]:
    """Any form of the settings as plain values, with interpolations resolved."""
    return to_dict(config) if isinstance(config, BaseConfig) else _plain(config)


def get_config_as_yaml_str(config: "BaseConfig | Mapping[str, Any] | DictConfig") -> str:
    """Any form of the settings as YAML; `SkyRLConfig.from_dict` of its content gives the same settings."""
    from omegaconf import OmegaConf  # optional here: settings made in Python need no OmegaConf

    return OmegaConf.to_yaml(OmegaConf.create(get_config_as_dict(config)))


def _plain(values: "Mapping[str, Any] | DictConfig") -> dict[str, Any]:
    """Plain values of a dict or a DictConfig."""
    if isinstance(values, dict):
        return values
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    if not isinstance(values, DictConfig):
        return dict(values)
    try:
        plain = OmegaConf.to_container(values, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"the settings cannot be resolved: {error}") from error
    return plain  # type: ignore[return-value]

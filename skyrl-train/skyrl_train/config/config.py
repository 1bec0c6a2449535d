"""Settings of the trainer: the only definition of every name, type, default and meaning.

Hydra's defaults (`store.py`), the checks (`validation.py`) and the reference page (`document.py`) are made from these
dataclasses. The default `${trainer.seed}` means "the value of that setting": `SkyRLConfig` resolves it, a section built
alone keeps the text. Imports no torch, no Ray, no Hydra.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import yaml

from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.config.asynchronous import FullyAsyncConfig
from skyrl_train.config.base import BaseConfig, to_plain_values
from skyrl_train.config.deepspeed import DeepSpeedConfig
from skyrl_train.config.distillation import DistillationConfig
from skyrl_train.config.generation import Device, GeneratorConfig
from skyrl_train.config.models import CriticConfig, PolicyConfig, RefConfig
from skyrl_train.config.training_backends import TrainingBackendRegistry
from skyrl_train.config.typed import REST, Choices, resolve_references, to_dict

if TYPE_CHECKING:
    from omegaconf import DictConfig

TrackerName = Literal[
    "console", "tensorboard", "wandb", "mlflow", "swanlab", "trackio", "aim", "clearml", "comet_ml", "dvclive"
]

OffloadMode = Literal["keep", "optimizer", "all"]
"""Contents of a model that leave a shared device with it."""

TAG_TRACKERS = ("wandb", "swanlab", "clearml")
"""Trackers that support `trainer.tags`."""
SAMPLE_TRACKERS = ("wandb", "tensorboard", "swanlab")
"""Trackers that show samples (`trainer.num_logger_train_samples`)."""

DEFAULT_HOOKS = (
    "skyrl_inspect.plan.memory_report.MemoryReport",
    "skyrl_inspect.simulate.advice.AsyncAdvice",
    "skyrl_inspect.curve_bands.CurveBands",
    "skyrl_inspect.diagnostics.hook.Diagnostics",
)
"""Hooks of a run by default: import paths, because this package does not depend on the one that reads run folders."""


@dataclass(kw_only=True)
class DataConfig(BaseConfig):
    """Training and evaluation data sets."""

    train_data: list[str] = field(default_factory=lambda: ["~/data/gsm8k/train.parquet"])
    """Training sets: paths of .parquet, .json or .jsonl files, or names on the Hugging Face hub as `name[:split]`.
    Several are concatenated. A null field of Parquet or of the hub counts as absent; nulls in lists and JSON text
    stay."""

    val_data: list[str] = field(default_factory=lambda: ["~/data/gsm8k/validation.parquet"])
    """Evaluation sets, in the same forms. Empty: no evaluation."""

    cache_dir: str | None = None
    """Cache folder of rows with the lengths of their prompts, reused with the same files, tokenizer and chat template.
    null: a folder next to the datasets cache of Hugging Face (HF_DATASETS_CACHE)."""


@dataclass(kw_only=True)
class PlacementConfig(BaseConfig):
    """Placement of models on machines and devices. On a CPU, every count of GPUs is a count of worker processes."""

    launcher: Literal["ray", "inline"] = "ray"
    """Launcher of workers and engines. `ray`: one process each, on one machine or on the cluster of RAY_ADDRESS.
    `inline`: objects in the process that starts the run, without Ray, on a CPU or one GPU, with the same results; each
    model has one rank, and engines are native or servers started elsewhere."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device that models compute on. `auto`: cuda if the machine that starts the run has a GPU, else cpu. Set it where
    that machine differs from the workers."""

    colocate_all: bool = True
    """Training workers and rollout engines share their GPUs: engines sleep while the trainer works, and weights reach
    them through shared memory (CUDA IPC on a GPU). False: each has its own GPUs, and weights are broadcast over a
    process group. On a CPU they share the cores in both cases."""

    colocate_policy_ref: bool = True
    """The policy and the reference model share GPUs: log-probs of the reference model wait for the end of generation.
    False: they are computed for finished groups during generation. Read only with `colocate_all=false`."""

    offload: Literal["auto", OffloadMode] = "auto"
    """Contents of models that move to host memory while an engine or another model uses their GPU. `keep`: none.
    `optimizer`: optimizer state. `all`: weights, too. `auto`: the first that fits by the planner's estimates
    (docs/planner.md). `keep` and `optimizer` lower the engine's `gpu_memory_utilization` to what is left. No effect on
    a CPU."""

    policy_num_nodes: int = 1
    """Machines that train the policy."""

    policy_num_gpus_per_node: int = 1
    """Policy workers on each machine: one per GPU, or this many processes on a CPU."""

    critic_num_nodes: int = 1
    """Machines that train the critic."""

    critic_num_gpus_per_node: int = 1
    """Critic workers on each machine: one per GPU, or this many processes on a CPU."""

    ref_num_nodes: int = 1
    """Machines that hold the reference model."""

    ref_num_gpus_per_node: int = 1
    """Reference workers on each machine: one per GPU, or this many processes on a CPU."""

    @property
    def policy_world_size(self) -> int:
        """Number of policy workers."""
        return self.policy_num_nodes * self.policy_num_gpus_per_node

    @property
    def critic_world_size(self) -> int:
        """Number of critic workers."""
        return self.critic_num_nodes * self.critic_num_gpus_per_node

    @property
    def ref_world_size(self) -> int:
        """Number of reference workers."""
        return self.ref_num_nodes * self.ref_num_gpus_per_node

    def resolve_device(self) -> Device:
        """Return `device`, with `auto` resolved for this machine. Call it on the driver: Ray hides GPUs from tasks
        without one.
        """
        if self.device != "auto":
            return self.device
        import torch  # optional and heavy: imported only when needed

        return "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(kw_only=True)
class TrainerConfig(BaseConfig):
    """Training: models, batches, evaluation, checkpoints, logs."""

    placement: PlacementConfig = field(default_factory=PlacementConfig)

    use_expandable_segments: bool = False
    """Use expandable segments in the CUDA allocator of training workers, against fragmentation. (For engines set
    PYTORCH_CUDA_ALLOC_CONF where the run starts.)"""

    enable_ray_gpu_monitor: bool = True
    """Log utilization and memory of every GPU that trains the policy, and memory of its machine, as means over the step
    (`gpu/…`). Needs nvidia-smi."""

    strategy: Annotated[str, Choices(TrainingBackendRegistry.list_registrations)] = "fsdp2"
    """Training backend: how model parameters are stored, sharded over ranks and updated."""

    policy: PolicyConfig = field(default_factory=PolicyConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    ref: RefConfig = field(default_factory=RefConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)

    seed: int = 42
    """Random seed of the data order, of every worker and (through `generator.seed`) of sampling."""

    epochs: int = 1
    """Passes over the training data, which set the number of training steps."""

    max_training_steps: int | None = None
    """Maximum number of training steps; training ends earlier if the epochs do. null: no limit."""

    train_batch_size: int = 1024
    """Prompts per training step."""

    policy_mini_batch_size: int = 256
    """Prompts per optimizer step of the policy."""

    critic_mini_batch_size: int = 256
    """Prompts per optimizer step of the critic."""

    update_epochs_per_batch: int = 1
    """Passes of a training step over its batch."""

    micro_train_batch_size_per_gpu: int = 1
    """Sequences per forward and backward of one worker. Changes memory and speed, not the result."""

    micro_forward_batch_size_per_gpu: int = 1
    """Sequences per forward of one worker, for the reference model's log-probs and the critic's values. (The policy's
    log-probs are computed in its training micro-batches, so that first ratios are exactly 1.)"""

    max_tokens_per_microbatch: int | None = None
    """Maximum number of tokens per forward of one worker; replaces the two counts of sequences above. A longer sequence
    gets its own micro-batch; a shared prefix counts once. Needs `use_sample_packing`."""

    use_sample_packing: bool = True
    """Concatenate the sequences of a micro-batch, so that no padding is computed."""

    use_shared_prefixes: bool = True
    """Compute a shared prompt prefix once for all sequences of a micro-batch, such as the samples of a prompt. Exact:
    gradients equal those without sharing. Needs `use_sample_packing`; no effect on mixtures of experts, with adapter
    dropout, or under Megatron."""

    logprobs_chunk_size: int = 1024
    """Number of tokens whose logits are held in memory at a time when log-probs are computed."""

    sequence_parallel_backend: Literal["ulysses"] = "ulysses"
    """Method by which `sequence_parallel_size` workers share a sequence."""

    update_ref_every_epoch: bool = False
    """Copy the policy's weights to the reference model at the end of every epoch but the last."""

    max_prompt_length: int = 512
    """Maximum number of tokens of a prompt; longer rows of the data are dropped."""

    eval_batch_size: int = 1024
    """Maximum number of evaluation prompts that are generated concurrently."""

    eval_before_train: bool = True
    """Evaluate before the first training step."""

    eval_interval: int = 5
    """Training steps between evaluations; one follows the last step as well. <= 0: never."""

    bf16: bool = True
    """Compute in bfloat16 and store parameters and gradients in float32. False: float32 throughout."""

    flash_attn: bool = True
    """Use flash-attention 2 if it is installed and the device is cuda, else torch's `scaled_dot_product_attention`.
    False: eager attention."""

    gradient_checkpointing: Literal["auto"] | bool = True
    """Recompute activations in the backward instead of storing them. `auto`: not if the planner finds that they fit
    with a margin into the GPUs of a run of reinforcement learning (`python -m skyrl_train.plan` prints its choice)."""

    gradient_checkpointing_use_reentrant: bool = False
    """Use torch's older, reentrant implementation of gradient checkpointing."""

    compile_layers: bool = False
    """Compile the layers of transformers with torch.compile, except for attention: faster steps on a GPU, after a
    minute of compiling. Requires `strategy=fsdp2`; not for mixtures of experts and linear attention."""

    disable_fast_tokenizer: bool = False
    """Use the tokenizer's Python implementation. An error where the installed transformers has none."""

    project_name: str = "skyrl"
    """Name of the project (a group of runs) in the experiment tracker."""

    run_name: str = "run-{fingerprint}"
    """Name of this run in the experiment tracker. `{fingerprint}`, here and in paths, is a short hash of the settings
    that define the experiment: all but those about placement, memory, intervals, names and the number of steps. The
    same command thus finds its run again. (Quotes for Hydra: `"trainer.run_name='sweep-{fingerprint}'"`.)"""

    run_dir: str = "~/skyrl-runs/${trainer.project_name}/${trainer.run_name}"
    """Folder of settings, metrics, trajectories, logs, and by default checkpoints and exports."""

    log_path: str | None = None
    """Folder for process logs, in its subfolder `project_name`/`run_name`; with several nodes on a shared file system.
    null: `run_dir`/logs."""

    logger: TrackerName | list[TrackerName] = "console"
    """Destinations of metrics besides metrics.jsonl: the console, and services of accelerate.tracking (the extra
    `tracking` installs the first four)."""

    tags: list[str] | None = None
    """Tags of this run in the experiment tracker (wandb, swanlab, clearml)."""

    num_logger_train_samples: int = -1
    """Number of training samples of each step that are sent to the experiment tracker as a table (wandb, tensorboard,
    swanlab). <= 0: none."""

    num_logger_eval_samples: int = -1
    """The same for the samples of each evaluation."""

    print_example_interval: int = 10
    """Training steps between trajectories printed on the console. <= 0: never."""

    show_progress: bool = True
    """Show progress on the console: bars on a terminal, occasional log lines elsewhere."""

    curve_bands: str | None = None
    """File of expected metric curves (YAML: metric, step, lowest and highest value; see docs/recipes.md). A metric that
    leaves its band is logged as a warning and as `expected/<metric>/outside`. null: no comparison."""

    hooks: list[str] = field(default_factory=lambda: list(DEFAULT_HOOKS))
    """Subclasses of `skyrl_train.hooks.TrainerHook`, `package.module.Class` each, that observe the run (see
    docs/extending.md). The default ones report memory, advise on asynchronous throughput, check `curve_bands`, and name
    failures of training (`on_diagnostic`)."""

    on_diagnostic: str = "warn"
    """Reaction to a failure of training that the metrics show (docs/why-it-stopped-learning.md): `warn`; `stop` ends
    the run with a checkpoint and an error; any other text is a shell command that gets the diagnostic as JSON."""

    ckpt_path: str = "${trainer.run_dir}/ckpts"
    """Folder of the checkpoints on a file system that all nodes share; or a URL of an object store,
    `s3://bucket/folder`, `gs://…` (the extra `cloud`)."""

    ckpt_interval: int = 10
    """Training steps between checkpoints; one follows the last step as well. <= 0: never."""

    ckpt_async: bool = False
    """Write checkpoints in the background: ranks copy their shards to host memory (12 bytes per parameter, divided over
    ranks) and train on while threads write and upload them. The next checkpoint and the end of the run wait for it."""

    max_ckpts_to_keep: int = -1
    """Number of checkpoints to keep; older ones are removed. -1: keep all."""

    resume_mode: Literal["none", "latest", "from_path"] | None = "latest"
    """`latest` resumes from the newest complete checkpoint in `ckpt_path`, or starts from scratch without one.
    `from_path` resumes from `resume_path`. `none` (or null) starts from scratch."""

    resume_path: str | None = None
    """Folder `global_step_N`, or its URL, for `resume_mode=from_path`."""

    resume_allow_changes: bool = False
    """Resume from a checkpoint of a different experiment. If false, a run is rejected when its training data (by
    content), environment, models, seeds, batch sizes, samples per prompt, advantage estimator or policy loss differ.
    Other settings may always change."""

    export_path: str = "${trainer.run_dir}/exports"
    """Folder, or URL, of exported models, dumped batches and evaluations."""

    hf_save_interval: int = -1
    """Training steps between exports of the policy in Hugging Face format. <= 0: never."""

    fully_async: FullyAsyncConfig = field(default_factory=FullyAsyncConfig)
    distillation: DistillationConfig = field(default_factory=DistillationConfig)

    dump_data_batch: bool = False
    """Write every training batch to `export_path`/dumped_data."""

    dump_eval_results: bool = True
    """Write every evaluated trajectory to `export_path`/dumped_evals."""

    dump_trajectories: bool = True
    """Write every training trajectory to the run folder (tokens, log-probs, masks, rewards, versions), and fingerprints
    of each step's batch and weights for `python -m skyrl_train.diff`."""

    dump_token_columns: bool = True
    """With `dump_trajectories`, also write log-prob, entropy, advantage and mask of each token as trained. About 15
    bytes per token."""

    compress_trajectories: bool = False
    """Compress trajectories and per-token training values in the run folder with gzip: about a third of the size, 7 ms
    per MB."""

    max_trajectories_gb: float | None = None
    """Limit in GB (1e9 bytes) on stored trajectories of training steps; beyond it the oldest steps are deleted. null:
    no limit."""

    max_consecutive_skipped_updates: int | None = 10
    """Number of consecutive optimizer steps skipped because of a non-finite gradient after which the run ends with an
    error that names the non-finite quantity. null: no limit."""

    stop_timeout_seconds: float = 20.0
    """Time for a checkpoint after SIGTERM, in seconds. During generation the checkpoint is of the previous step,
    otherwise of the current step once it ends. A second SIGTERM ends the run at once. 0, or `trainer.ckpt_interval` <=
    0: no checkpoint. Must be less than the scheduler's time until SIGKILL (30 s in Kubernetes and Slurm)."""

    worker_timeout_seconds: float = 3600.0
    """Timeout of one call to a training worker, in seconds; the run then ends with an error that names the worker and
    the call."""

    @property
    def num_reference_models(self) -> int:
        """Number of models that workers hold like the reference model: the reference model, and teachers without
        engines.
        """
        teachers = [each for each in self.distillation.teachers.values() if not (each.engines or each.urls)]
        return int(self.algorithm.uses_reference_model) + len(teachers)

    @property
    def records_token_columns(self) -> bool:
        """True if per-token training values are written to the run folder."""
        return self.dump_trajectories and self.dump_token_columns

    @property
    def loggers(self) -> list[str]:
        """Names of `logger`, as a list."""
        return [self.logger] if isinstance(self.logger, str) else list(self.logger)

    @property
    def log_folder(self) -> Path | None:
        """Folder of this run's logs below `log_path`."""
        return (
            None
            if self.log_path is None
            else Path(self.log_path).expanduser().absolute() / self.project_name / self.run_name
        )

    def __post_init__(self) -> None:
        self.resume_mode = self.resume_mode or "none"


@dataclass(kw_only=True)
class SkyRLGymConfig(BaseConfig):
    """Execution of environments. A section named after an environment's id, such as
    `environment.skyrl_gym.multiply.digits=3`, is passed to that environment as its `env_config`.
    """

    max_env_workers: int = 32
    """Threads that run environments. 0: environments run on the generator's event loop (they must not block).
    Environments that wait for services or programs need as many as there are rollouts in flight."""

    env_timeout_seconds: float = 600.0
    """Timeout of one call to an environment, in seconds; the rollout then fails as an environment failure."""

    env_configs: dict[str, dict[str, Any]] = field(default_factory=dict, metadata=REST)
    """Environment id -> `env_config` passed to the environment."""

    def get_env_config(self, env_class: str) -> dict[str, Any]:
        """Return the section of the environment `env_class`, or an empty one.

        The section of an environment given as "package.module:Class" is named after the class.
        """
        return self.env_configs.get(env_class.rpartition(":")[2], {})


@dataclass(kw_only=True)
class EnvironmentConfig(BaseConfig):
    """Environments that respond to the model and compute rewards."""

    env_class: str | None = "gsm8k"
    """Environment of data rows without an `env_class`: a registered id, or `package.module:Class` (its settings are
    then `environment.skyrl_gym.Class`). Ignored with `generator.task`, where it may be null."""

    skyrl_gym: SkyRLGymConfig = field(default_factory=SkyRLGymConfig)


@dataclass(kw_only=True)
class SkyRLConfig(BaseConfig):
    """Settings of a run."""

    data: DataConfig = field(default_factory=DataConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    deepspeed_config: DeepSpeedConfig = field(default_factory=DeepSpeedConfig)
    generator: GeneratorConfig = field(default_factory=GeneratorConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)

    @property
    def pause_at_sync(self) -> Literal["keep", "wait", "abort"]:
        """Handling of running requests at a weight sync."""
        return self.trainer.fully_async.pause or self.generator.weight_sync_pause

    def __post_init__(self) -> None:
        resolve_references(self)
        if self.trainer.algorithm.max_seq_len is None:
            self.trainer.algorithm.max_seq_len = self.generator.longest_context


def get_config_as_dict(config: "BaseConfig | Mapping[str, Any] | DictConfig") -> dict[str, Any]:
    """Convert settings of any form to plain values, with interpolations resolved."""
    return to_dict(config) if isinstance(config, BaseConfig) else to_plain_values(config)


def get_config_as_yaml_str(config: "BaseConfig | Mapping[str, Any] | DictConfig") -> str:
    """Convert settings of any form to YAML that `SkyRLConfig.from_dict` reads back as equal settings."""
    return yaml.dump(get_config_as_dict(config), Dumper=_SettingsDumper, sort_keys=False, allow_unicode=True)


def apply_overrides(cfg: SkyRLConfig, overrides: Mapping[str, object]) -> SkyRLConfig:
    """Return settings with other values, by dotted name. Sections that do not change are shared."""
    changed = copy.copy(cfg)
    for name, value in overrides.items():
        section: Any = changed
        *path, last = name.split(".")
        for part in path:
            setattr(section, part, copy.copy(getattr(section, part)))
            section = getattr(section, part)
        setattr(section, last, value)
    return changed


class _SettingsDumper(yaml.CSafeDumper):
    """YAML writer whose output OmegaConf reads back unchanged. OmegaConf, unlike YAML 1.1, reads texts such as `1e-6`
    as numbers."""

    def ignore_aliases(self, data: object) -> bool:
        return True

    def represent_text(self, text: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", text, style="'" if _is_number(text) else None)


_SettingsDumper.add_representer(str, _SettingsDumper.represent_text)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True

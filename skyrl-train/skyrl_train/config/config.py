"""Settings of the trainer, the one home of every name, type, default and meaning.

Hydra's defaults (`store.py`), the checks (`validation.py`) and the reference page (`document.py`) are made from these
dataclasses. A text `${trainer.seed}` as a default means "the value of that setting": `SkyRLConfig` resolves it, a
section made on its own keeps the text. Imports no torch, no Ray, no Hydra.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Annotated, Any, Literal

import yaml

from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.config.asynchronous import FullyAsyncConfig
from skyrl_train.config.base import BaseConfig, plain
from skyrl_train.config.deepspeed import DeepSpeedConfig
from skyrl_train.config.generation import Device, GeneratorConfig
from skyrl_train.config.models import CriticConfig, PolicyConfig, RefConfig
from skyrl_train.config.training_backends import TrainingBackendRegistry
from skyrl_train.config.typed import REST, Choices, resolve_references, to_dict

if TYPE_CHECKING:
    from omegaconf import DictConfig

TrackerName = Literal[
    "console", "tensorboard", "wandb", "mlflow", "swanlab", "trackio", "aim", "clearml", "comet_ml", "dvclive"
]


@dataclass(kw_only=True)
class DataConfig(BaseConfig):
    """Data of training and of evaluation."""

    train_data: list[str] = field(default_factory=lambda: ["~/data/gsm8k/train.parquet"])
    """Training sets: paths of .parquet, .json or .jsonl files, or names on the Hugging Face hub as `name[:split]`.
    Several are joined."""

    val_data: list[str] = field(default_factory=lambda: ["~/data/gsm8k/validation.parquet"])
    """Evaluation sets, in the same forms. Empty means no evaluation."""


@dataclass(kw_only=True)
class PlacementConfig(BaseConfig):
    """Placement of the models. Without a GPU, every count of GPUs is a count of worker processes."""

    launcher: Literal["ray", "inline"] = "ray"
    """Launcher of workers and engines. `ray`: a process for each, on one machine or on the cluster of RAY_ADDRESS.
    `inline`: all are objects of the process that starts the run, without Ray, on a CPU or one GPU, with the same
    results; breakpoints work in all code. Each model then has one rank, and engines are native or servers started
    elsewhere."""

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

    critic_num_nodes: int = 1
    """Machines that train the critic."""

    critic_num_gpus_per_node: int = 1
    """Critic workers on each of them: one a GPU, or that many processes on a CPU."""

    ref_num_nodes: int = 1
    """Machines that hold the reference model."""

    ref_num_gpus_per_node: int = 1
    """Reference workers on each of them: one a GPU, or that many processes on a CPU."""

    @property
    def policy_world_size(self) -> int:
        """Policy workers in all."""
        return self.policy_num_nodes * self.policy_num_gpus_per_node

    @property
    def critic_world_size(self) -> int:
        """Critic workers in all."""
        return self.critic_num_nodes * self.critic_num_gpus_per_node

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
class TrainerConfig(BaseConfig):
    """The run: models, batches, and what is written when."""

    placement: PlacementConfig = field(default_factory=PlacementConfig)

    strategy: Annotated[str, Choices(TrainingBackendRegistry.registrations)] = "fsdp2"
    """Training backend: how models are held, divided over ranks and stepped."""

    policy: PolicyConfig = field(default_factory=PolicyConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    ref: RefConfig = field(default_factory=RefConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)

    seed: int = 42
    """Seeds the order of the data, every worker, and (through `generator.seed`) sampling."""

    epochs: int = 1
    """Passes over the training data, which give the number of training steps. (Dynamic sampling takes further prompts
    for the same number of steps.)"""

    max_training_steps: int | None = None
    """Training ends after this many steps, if the epochs have not ended it before."""

    train_batch_size: int = 1024
    """Prompts a training step."""

    policy_mini_batch_size: int = 256
    """Prompts an optimizer step."""

    critic_mini_batch_size: int = 256
    """Prompts an optimizer step of the critic."""

    update_epochs_per_batch: int = 1
    """Times that a training step goes over its batch."""

    micro_train_batch_size_per_gpu: int = 1
    """Sequences in one forward and backward of one worker. Changes memory and speed, not the result."""

    micro_forward_batch_size_per_gpu: int = 1
    """Sequences in one forward of one worker for the reference model's log-probs and the critic's values. (The policy's
    own, at the start of a step, are computed in its training micro-batches, so that the first ratios are exactly 1.)"""

    max_tokens_per_microbatch: int | None = None
    """Tokens in one forward of one worker, in place of the two counts of sequences above: sequences are sorted into
    micro-batches that hold at most this many (a longer sequence has one of its own). Needs `use_sample_packing`."""

    use_sample_packing: bool = True
    """The sequences of a micro-batch are laid end to end, so that no padding is computed."""

    logprobs_chunk_size: int = 1024
    """Tokens whose logits are in memory at the same time."""

    sequence_parallel_backend: Literal["ulysses"] = "ulysses"
    """How `sequence_parallel_size` workers share a sequence."""

    update_ref_every_epoch: bool = False
    """At the end of every epoch but the last, the policy as it is becomes the reference model."""

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
    """Use the tokenizer's Python form. An error where the installed transformers has none."""

    project_name: str = "skyrl"
    """The tracker's name for a group of runs."""

    run_name: str = "run-{fingerprint}"
    """The tracker's name for this run. `{fingerprint}`, here and in paths, is a short hash of the settings that make
    the experiment what it is: all but those about placement, memory, intervals, names and the number of steps. So other
    experiments have other names, and the same command finds its run again. (On the command line Hydra wants quotes:
    `"trainer.run_name='sweep-{fingerprint}'"`.)"""

    run_dir: str = "~/skyrl-runs/${trainer.project_name}/${trainer.run_name}"
    """The run's folder: its settings, metrics, trajectories, logs, and unless set otherwise checkpoints and exports."""

    logger: TrackerName | list[TrackerName] = "console"
    """Sinks of the metrics, one name or several: the console, and services of accelerate.tracking (the extra `tracking`
    installs the first four). metrics.jsonl in the run folder is always written."""

    print_example_interval: int = 10
    """Show one trajectory on the console every so many steps. <= 0: never."""

    ckpt_path: str = "${trainer.run_dir}/ckpts"
    """Folder of the checkpoints, `global_step_N` each, on a file system that all nodes share; or a URL of an object
    store, `s3://bucket/folder`, `gs://…` (the extra `cloud`): each rank writes its files there itself."""

    ckpt_interval: int = 10
    """Write a checkpoint every so many steps, and after the last. <= 0: never."""

    ckpt_async: bool = False
    """Write checkpoints beside the training: ranks copy their share to host memory (12 bytes a parameter, divided over
    ranks) and train on while threads write, hash and upload it. The next checkpoint and the end of the run wait for
    it. A run that is killed meanwhile resumes from the checkpoint before."""

    max_ckpts_to_keep: int = -1
    """Older checkpoints are removed when there are more. -1: none is."""

    resume_mode: Literal["none", "latest", "from_path"] | None = "latest"
    """`latest` goes on from the newest complete checkpoint in `ckpt_path`, or starts anew if there is none; `from_path`
    goes on from `resume_path`; `none` (or null) starts anew."""

    resume_path: str | None = None
    """The `global_step_N` folder, or its URL, for `resume_mode=from_path`."""

    resume_allow_changes: bool = False
    """Go on from a checkpoint of another experiment. Without it a run is refused whose training data (by content),
    environment, models, seeds, batch sizes, samples a prompt, advantage estimator or policy loss are not those of the
    checkpoint. Other settings, such as the learning rate, may always change; what differs is logged. (The place in the
    data is kept as a number of batches, whatever their size.)"""

    export_path: str = "${trainer.run_dir}/exports"
    """Folder, or URL, of exported models, dumped batches and evaluations."""

    hf_save_interval: int = -1
    """Export the policy in Hugging Face format every so many steps. <= 0: never."""

    fully_async: FullyAsyncConfig = field(default_factory=FullyAsyncConfig)

    dump_data_batch: bool = False
    """Write every training batch to `export_path`/dumped_data."""

    dump_eval_results: bool = True
    """Write every evaluated trajectory to `export_path`/dumped_evals."""

    dump_trajectories: bool = True
    """Write every training trajectory to the run folder, readable: tokens, log-probs, masks, rewards, versions."""

    max_consecutive_skipped_updates: int | None = 10
    """An optimizer step whose gradient is not finite is skipped; after so many in a row the run ends with an error that
    says what was not finite. A run that ends without a single update is an error, too. null: no limit."""

    worker_timeout_seconds: float = 3600.0
    """The longest that one call to a training worker may take before the run ends with an error that names it."""

    @property
    def loggers(self) -> list[str]:
        """`logger` as a list."""
        return [self.logger] if isinstance(self.logger, str) else list(self.logger)

    def __post_init__(self) -> None:
        self.resume_mode = self.resume_mode or "none"


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
        """Return the section of the environment `env_class`, which is empty if it has none.

        The section of an environment given as "package.module:Class" is named like the class.
        """
        return self.env_configs.get(env_class.rpartition(":")[2], {})


@dataclass(kw_only=True)
class EnvironmentConfig(BaseConfig):
    """Environments that answer and grade the model."""

    env_class: str | None = "gsm8k"
    """Environment for rows of the data without an `env_class` of their own: a registered id, or `package.module:Class`
    (its settings are then `environment.skyrl_gym.Class`). Not read with `generator.task`, where it may be null."""

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
        """Treatment of running requests at a weight sync."""
        return self.trainer.fully_async.pause or self.generator.weight_sync_pause

    def __post_init__(self) -> None:
        resolve_references(self)
        if self.trainer.algorithm.max_seq_len is None:
            self.trainer.algorithm.max_seq_len = self.generator.longest_context


def default_values(config_type: type[BaseConfig] = SkyRLConfig) -> dict[str, Any]:
    """The defaults as plain values, references to other settings kept as text (so that Hydra may resolve them last)."""
    return {section.name: to_dict(section.default_factory()) for section in fields(config_type)}  # type: ignore[misc]


def get_config_as_dict(config: "BaseConfig | Mapping[str, Any] | DictConfig") -> dict[str, Any]:
    """Convert settings of any form to plain values, with interpolations resolved."""
    return to_dict(config) if isinstance(config, BaseConfig) else plain(config)


def get_config_as_yaml_str(config: "BaseConfig | Mapping[str, Any] | DictConfig") -> str:
    """Convert settings of any form to YAML, from whose content `SkyRLConfig.from_dict` makes the same settings."""
    return yaml.dump(get_config_as_dict(config), Dumper=_SettingsDumper, sort_keys=False, allow_unicode=True)


class _SettingsDumper(yaml.CSafeDumper):
    """Writer of YAML that OmegaConf reads back unchanged: it takes texts such as `1e-6` for numbers, which YAML 1.1
    does not."""

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

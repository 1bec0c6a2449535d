"""Settings of supervised training: `main_sft` (demonstrations) and `main_dpo` (preference pairs).

Settings shared with reinforcement learning keep their names: models, optimizer, workers, batches, checkpoints are
`trainer.*`. Changing a setting of `trainer` that supervised training ignores is an error.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.config.base import BaseConfig, get_default_values, to_plain_values
from skyrl_train.config.config import PlacementConfig, SkyRLConfig, TrainerConfig
from skyrl_train.config.deepspeed import DeepSpeedConfig
from skyrl_train.config.other_releases import translate_settings
from skyrl_train.config.typed import build, is_among, iter_settings, resolve_references
from skyrl_train.errors import ConfigError

if TYPE_CHECKING:
    from typing import Self

    from omegaconf import DictConfig


@dataclass(kw_only=True)
class SupervisedDataConfig(BaseConfig):
    """Data of supervised training."""

    train_data: list[str] = field(default_factory=list)
    """Training sets: paths of .parquet, .json or .jsonl files, or names on the Hugging Face hub as `name[:split]`.
    Several are concatenated. A null field of Parquet or of the hub counts as absent; nulls in lists and JSON text
    stay."""

    val_data: list[str] = field(default_factory=list)
    """Evaluation sets, in the same forms. Empty: no evaluation."""

    cache_dir: str | None = None
    """Cache folder of tokenized examples, reused with the same files, tokenizer and chat template. null: a folder next
    to the datasets cache of Hugging Face (HF_DATASETS_CACHE)."""

    format: Literal["auto", "chat", "alpaca", "preference"] = "auto"
    """Columns of a row. `chat`: `messages` (and optionally `tools`, also as JSON text). `alpaca`: `instruction`,
    `input`, `output`. `preference`: `prompt`, `chosen`, `rejected`, each text or messages. `auto`: inferred from the
    columns."""

    train_on: Literal["all_assistant", "last_assistant", "all"] = "all_assistant"
    """Trained tokens: all assistant messages, the last assistant message, or all tokens. An assistant message
    contributes its text and its end token, not its header."""

    max_length: int = 4096
    """Maximum number of tokens of an example."""

    too_long: Literal["drop", "truncate"] = "drop"
    """Handling of longer examples. Their number is logged."""


@dataclass(kw_only=True)
class SupervisedConfig(BaseConfig):
    """Settings of supervised training."""

    data: SupervisedDataConfig = field(default_factory=SupervisedDataConfig)
    trainer: TrainerConfig = field(
        default_factory=lambda: TrainerConfig(
            placement=PlacementConfig(colocate_all=False),
            algorithm=AlgorithmConfig(policy_loss_type="cross_entropy", use_kl_loss=False),
            train_batch_size=64,
            eval_batch_size=64,
        )
    )
    deepspeed_config: DeepSpeedConfig = field(default_factory=DeepSpeedConfig)

    @classmethod
    def from_dict(cls, values: "Mapping[str, object] | DictConfig") -> "Self":
        """Build the settings. Missing values get the defaults of this class, not the defaults of reinforcement
        learning.
        """
        defaults = get_default_values(cls)
        return build(cls, _merge_values(defaults, translate_settings(to_plain_values(values), lambda: defaults)))

    def __post_init__(self) -> None:
        resolve_references(self)

    def to_training_config(self) -> SkyRLConfig:
        """Convert to worker settings. The divisor of `seq_mean_token_sum_norm` defaults to `data.max_length`."""
        algorithm = self.trainer.algorithm
        if algorithm.max_seq_len is None:
            algorithm.max_seq_len = self.data.max_length
        return SkyRLConfig(trainer=self.trainer)


@dataclass(kw_only=True)
class PreferenceConfig(SupervisedConfig):
    """Settings of training on preference pairs."""

    data: SupervisedDataConfig = field(default_factory=lambda: SupervisedDataConfig(train_on="last_assistant"))
    trainer: TrainerConfig = field(
        default_factory=lambda: TrainerConfig(
            placement=PlacementConfig(colocate_all=False),
            algorithm=AlgorithmConfig(policy_loss_type="dpo", use_kl_loss=False, loss_reduction="sequence_mean"),
            train_batch_size=64,
            eval_batch_size=64,
        )
    )


def _merge_values(base: dict[str, object], changes: Mapping[str, object]) -> dict[str, object]:
    """Merge the values of `changes` into a copy of `base`."""
    merged = dict(base)
    for name, value in changes.items():
        known = merged.get(name)
        merged[name] = _merge_values(known, value) if isinstance(known, dict) and isinstance(value, Mapping) else value
    return merged


# fmt: off
_SHARED = (
    "placement.launcher", "placement.device", "placement.policy_num_nodes", "placement.policy_num_gpus_per_node",
    "strategy", "policy.",
    "seed", "epochs", "max_training_steps", "train_batch_size",
    "micro_train_batch_size_per_gpu", "max_tokens_per_microbatch",
    "use_sample_packing", "use_shared_prefixes", "logprobs_chunk_size", "sequence_parallel_backend",
    "eval_batch_size", "eval_before_train", "on_diagnostic",
    "eval_interval", "bf16", "flash_attn", "gradient_checkpointing", "gradient_checkpointing_use_reentrant",
    "compile_layers", "use_expandable_segments", "enable_ray_gpu_monitor", "log_path", "tags",
    "project_name", "run_name", "run_dir", "logger", "ckpt_path", "ckpt_interval", "ckpt_async",
    "max_ckpts_to_keep", "resume_mode", "resume_path", "resume_allow_changes", "export_path",
    "hf_save_interval", "worker_timeout_seconds", "stop_timeout_seconds", "max_consecutive_skipped_updates",
)
# fmt: on
_OF_DEMONSTRATIONS = ("algorithm.loss_reduction", "algorithm.max_seq_len")
_OF_PREFERENCES = (
    "ref.",
    "placement.ref_num_nodes",
    "placement.ref_num_gpus_per_node",
    "placement.colocate_policy_ref",
    "placement.offload",
)
_OF_ROLLOUTS = ("trainer.policy.routing_replay", "trainer.policy.sampling_mask_replay")
"""Settings that supervised training rejects: they replay rollout routing or sampling."""


def check_unread_settings(config: SupervisedConfig) -> None:
    """Raise ConfigError if a setting of `trainer` was changed that this kind of training ignores."""
    own = _OF_PREFERENCES if isinstance(config, PreferenceConfig) else _OF_DEMONSTRATIONS
    of_loss = f"algorithm.{config.trainer.algorithm.policy_loss_type}."
    read = tuple(f"trainer.{name}" for name in (*_SHARED, *own, of_loss))
    same_model = {
        "trainer": {"policy": {"model": {"path": config.trainer.policy.model.path}}}
    }  # other settings refer to it
    unchanged = type(config).from_dict(same_model)
    defaults = {name: getattr(section, leaf.name) for name, section, leaf in iter_settings(unchanged)}
    for name, section, leaf in iter_settings(config):
        is_read = not name.startswith("trainer.") or (is_among(name, read) and name not in _OF_ROLLOUTS)
        if not is_read and getattr(section, leaf.name) != defaults[name]:
            kind = "preference" if isinstance(config, PreferenceConfig) else "supervised"
            raise ConfigError(
                f"{name}={getattr(section, leaf.name)!r} has no effect in {kind} training; keep it at "
                f"{defaults[name]!r}"
            )

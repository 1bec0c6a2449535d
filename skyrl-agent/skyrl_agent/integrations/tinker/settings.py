"""Settings of `tinker_train`, as `key=value` on the command line."""

from collections.abc import Sequence
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from skyrl_agent.errors import ConfigError
from skyrl_agent.types import JsonObject


class Config(BaseModel):
    """A training run."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=())

    skyrl_agent_task_yaml: str
    """Path of the task file, whatever backend it names."""
    dataset_file: str
    """Dataset file: `.jsonl` or `.parquet`."""
    eval_dataset_file: str | None = None
    model_name: str = "Qwen/Qwen3-32B"
    base_url: str | None = None
    """URL of the server. None: set by the SDK's environment variables."""
    batch_size: int = Field(default=64, ge=1)
    """Instances per training step."""
    eval_batch_size: int = Field(default=1024, ge=1)
    group_size: int | None = Field(default=None, ge=1)
    """Trajectories per instance. None: as the task file says."""
    learning_rate: float = Field(default=4e-5, gt=0)
    lora_rank: int = Field(default=16, ge=1)
    seed: int = 0
    max_steps: int = Field(default=200, ge=1)
    save_every: int = Field(default=2, ge=0)
    """Steps between checkpoints; 0: none."""
    eval_every: int = Field(default=10, ge=0)
    """Steps between evaluations; 0: none."""
    resume_exp_name: str | None = None
    """`wandb_name` of the run to resume."""
    loss_fn: Literal["ppo", "importance_sampling"] = "ppo"
    loss_fn_config: dict[str, float] = Field(default_factory=dict)
    """Arguments of the loss, such as `{clip_high_threshold: 1.28}`."""
    normalize_advantages: bool = True
    """Divide advantages by their standard deviation over the batch."""
    wandb_project: str | None = None
    wandb_name: str = "skyrl-agent"
    """Name of the run, and of its folder under `log_dir`."""
    log_dir: str = "./tinker_output"


def read_config(arguments: Sequence[str]) -> Config:
    """
    Raises:
        ConfigError: an argument is not `key=value`, a key unknown or its value wrong.
    """
    values: JsonObject = {}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals:
            raise ConfigError(f"{argument!r} must be key=value; keys are {', '.join(Config.model_fields)}")
        values[key] = yaml.safe_load(value)
    values = {key: value for key, value in values.items() if value is not None}
    for key in ("model_name", "wandb_name", "resume_exp_name"):
        if key in values:
            values[key] = str(values[key])
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError("\n".join(_format_error(item) for item in error.errors())) from None


def _format_error(item: ErrorDetails) -> str:
    key = ".".join(map(str, item["loc"]))
    if item["type"] == "missing":
        return f"{key} is missing: set {key}=..."
    if item["type"] == "extra_forbidden":
        return f"unknown key {key}; keys are {', '.join(Config.model_fields)}"
    return f"{key}={item['input']!r}: {item['msg']}"

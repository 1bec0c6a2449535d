"""`tx train`: supervised training, done by skyrl_train's supervised trainer. Here options become its settings."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tx.errors import ConfigError
from tx.tinker.command_line import parse_json_object

_OPTIMIZER_ARGS = {"learning_rate", "weight_decay", "b1", "b2"}
_TRACKER_ARGS = {"project": "project_name", "name": "run_name"}


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Options of the command line."""

    model: str
    dataset: str
    output_dir: str
    batch_size: int
    loader: str = "tx.loaders.chat"
    split: str = "train"
    load_checkpoint_path: str | None = None
    save_steps: int = 500
    max_steps: int | None = None
    optimizer: str = "adamw"
    optimizer_args: str = '{"learning_rate": 1e-5, "weight_decay": 0.1}'
    tp_size: int = 1
    tracker: str | None = None
    tracker_args: str = "{}"


def run(options: TrainOptions) -> None:
    """Train to the end, and export the model to `output_dir`/exports.

    Raises:
        ConfigError: an invalid option; nothing was started.
        SystemExit: the run failed; the log says why.
    """
    values = build_trainer_settings(options)
    from skyrl_train.config.supervised import SupervisedConfig
    from skyrl_train.config.validation import validate_supervised_cfg
    from skyrl_train.entrypoints.main_base import run_experiment
    from skyrl_train.entrypoints.main_sft import SupervisedExp
    from skyrl_train.errors import SkyRLError

    try:
        settings = validate_supervised_cfg(values, SupervisedConfig)
    except SkyRLError as error:
        raise ConfigError(str(error)) from None
    run_experiment(settings.to_training_config(), lambda _: SupervisedExp(settings))


def build_trainer_settings(options: TrainOptions) -> dict[str, Any]:
    """Build the trainer settings that differ from its defaults.

    Raises:
        ConfigError: the trainer does not support an option.
    """
    if options.loader != "tx.loaders.chat":
        raise ConfigError(
            f"--loader must be tx.loaders.chat (rows with `messages`, or `instruction` and `output`); "
            f"got {options.loader!r}"
        )
    if options.optimizer != "adamw":
        raise ConfigError(f"--optimizer must be adamw; got {options.optimizer!r}")
    if options.tp_size != 1:
        raise ConfigError(
            f"--tp-size must be 1, got {options.tp_size}: FSDP2 shards the model over several GPUs; use python -m "
            "skyrl_train.entrypoints.main_sft with trainer.placement.policy_num_gpus_per_node"
        )
    for name in ("batch_size", "save_steps", "max_steps"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1; got {value}")
    trainer: dict[str, Any] = {
        "policy": {
            "model": {"path": options.model},
            "optimizer_config": _build_optimizer_settings(options.optimizer_args),
        },
        "train_batch_size": options.batch_size,
        "run_dir": options.output_dir,
        "ckpt_interval": options.save_steps,
        "hf_save_interval": options.save_steps,
        "max_training_steps": options.max_steps,
        "logger": ["console", options.tracker] if options.tracker not in (None, "console") else ["console"],
        **_build_tracker_settings(options.tracker_args),
    }
    if options.load_checkpoint_path:
        trainer |= {"resume_mode": "from_path", "resume_path": options.load_checkpoint_path}
    return {"data": {"train_data": [_resolve_source(options)]}, "trainer": trainer}


def _resolve_source(options: TrainOptions) -> str:
    is_file = Path(options.dataset).expanduser().suffix in (".parquet", ".json", ".jsonl")
    return options.dataset if is_file else f"{options.dataset}:{options.split}"


def _build_optimizer_settings(text: str) -> dict[str, Any]:
    given = _parse_object(text, "--optimizer-args", _OPTIMIZER_ARGS)
    settings: dict[str, Any] = {}
    if "learning_rate" in given:
        settings["lr"] = given["learning_rate"]
    if "weight_decay" in given:
        settings["weight_decay"] = given["weight_decay"]
    if "b1" in given or "b2" in given:
        settings["adam_betas"] = [given.get("b1", 0.9), given.get("b2", 0.999)]
    return settings


def _build_tracker_settings(text: str) -> dict[str, Any]:
    given = _parse_object(text, "--tracker-args", set(_TRACKER_ARGS))
    return {_TRACKER_ARGS[name]: value for name, value in given.items()}


def _parse_object(text: str, option: str, known: set[str]) -> dict[str, Any]:
    value = parse_json_object(text, option)
    if unknown := sorted(set(value) - known):
        raise ConfigError(f"{option}: {unknown[0]!r} is unknown; known: {', '.join(sorted(known))}")
    return value

"""Rules of the run: paths, trackers, checkpoints."""

import os
import warnings

from skyrl_train.config.bounds import check_bounds
from skyrl_train.config.config import SAMPLE_TRACKERS, TAG_TRACKERS, SkyRLConfig
from skyrl_train.config.rules.checks import check_rule, get_setting

_PATHS = ("trainer.run_dir", "trainer.ckpt_path", "trainer.export_path", "trainer.resume_path", "trainer.log_path")
_LOCAL = ("trainer.log_path", "trainer.policy.torch_profiler_config.save_path")
_MODELS = ("trainer.policy.model.path", "trainer.ref.model.path", "trainer.critic.model.path", "generator.model_name")


def check_paths(config: SkyRLConfig) -> None:
    """Check that folders are configured and are not files."""
    for name in _PATHS:
        path = get_setting(config, name)
        if path is None:
            continue
        check_rule(path != "", f"{name} is empty; set it to a folder, or remove the setting")
    check_rule(
        "://" not in config.trainer.run_dir,
        f"trainer.run_dir={config.trainer.run_dir} must be a folder on a file system: metrics, logs and the rollout "
        "journal are appended line by line, which an object store does not support. Set trainer.ckpt_path and "
        "trainer.export_path to URLs instead",
    )
    for name in _LOCAL:
        path = get_setting(config, name)
        check_rule(
            path is None or (path != "" and "://" not in path),
            f"{name}={path} must be a folder on a file system; remove it to use a folder in trainer.run_dir",
        )
    for name in _MODELS:
        check_rule(
            get_setting(config, name) != "", f"{name} is empty; set it to a folder or a name on the Hugging Face hub"
        )


def check_loggers(config: SkyRLConfig) -> None:
    """Check that trackers have the keys they need and support the data to be sent."""
    trainer = config.trainer
    sent = {
        "trainer.tags": (bool(trainer.tags), TAG_TRACKERS),
        "trainer.num_logger_train_samples": (trainer.num_logger_train_samples > 0, SAMPLE_TRACKERS),
        "trainer.num_logger_eval_samples": (trainer.num_logger_eval_samples > 0, SAMPLE_TRACKERS),
    }
    for name, (is_set, trackers) in sent.items():
        if is_set and not set(trackers) & set(trainer.loggers):
            warnings.warn(
                f"{name} has no effect with trainer.logger={','.join(trainer.loggers)}: it is used by "
                f"{', '.join(trackers)}",
                stacklevel=4,
            )
    if "wandb" not in config.trainer.loggers or os.environ.get("WANDB_API_KEY"):
        return
    check_rule(
        os.environ.get("WANDB_MODE") in ("offline", "disabled"),
        "trainer.logger=wandb needs the environment variable WANDB_API_KEY; set it, or WANDB_MODE=offline to keep the "
        "run on this machine, or trainer.logger=console",
    )


def check_checkpoints(config: SkyRLConfig) -> None:
    """Check that the settings for keeping and resuming checkpoints do not contradict each other."""
    trainer = config.trainer
    check_rule(
        trainer.max_ckpts_to_keep == -1 or trainer.max_ckpts_to_keep > 0,
        f"trainer.max_ckpts_to_keep must be -1 (keep all) or greater than 0; got {trainer.max_ckpts_to_keep}"
        + (" (to write none, set trainer.ckpt_interval=0)" if trainer.max_ckpts_to_keep == 0 else ""),
    )
    limit = trainer.max_trajectories_gb
    check_rule(
        limit is None or limit > 0,
        f"trainer.max_trajectories_gb must be greater than 0, or null for no limit; got {limit}"
        " (to write none, set trainer.dump_trajectories=false)",
    )
    check_rule(
        trainer.resume_mode != "from_path" or trainer.resume_path is not None,
        "trainer.resume_mode=from_path needs trainer.resume_path, the global_step_N folder to resume from",
    )
    check_rule(
        trainer.resume_mode == "from_path" or trainer.resume_path is None,
        f"trainer.resume_path={trainer.resume_path} has an effect only with trainer.resume_mode=from_path; got "
        f"trainer.resume_mode={trainer.resume_mode}",
    )


def check_profiler(config: SkyRLConfig) -> None:
    """Check the profiler settings of the policy."""
    name, settings = "trainer.policy.torch_profiler_config", config.trainer.policy.torch_profiler_config
    check_bounds(settings, name)
    if not settings.enable:
        return
    size = config.trainer.placement.policy_world_size
    check_rule(
        bool(settings.ranks) and all(0 <= rank < size for rank in settings.ranks),
        f"{name}.ranks={settings.ranks} must name ranks of the policy, from 0 to {size - 1}",
    )
    check_rule(
        "cpu" in settings.activities or ("cuda" in settings.activities and config.trainer.placement.device != "cpu"),
        f"{name}.activities={settings.activities} records nothing on {config.trainer.placement.device}; add cpu",
    )
    check_rule(
        settings.export_type != "stacks" or settings.with_stack,
        f"{name}.export_type=stacks needs {name}.with_stack=true",
    )

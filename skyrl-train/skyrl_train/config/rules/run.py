"""Rules of the run around the training: paths, trackers, checkpoints."""

import os

from skyrl_train.config.config import SkyRLConfig
from skyrl_train.config.rules.checks import require, value_of

_PATHS = ("trainer.run_dir", "trainer.ckpt_path", "trainer.export_path", "trainer.resume_path")
_MODELS = ("trainer.policy.model.path", "trainer.ref.model.path", "trainer.critic.model.path", "generator.model_name")


def check_paths(config: SkyRLConfig) -> None:
    """Check that folders are named, and are folders."""
    for name in _PATHS:
        path = value_of(config, name)
        if path is None:
            continue
        require(path != "", f"{name} is empty; give a folder, or leave the setting out")
    require(
        "://" not in config.trainer.run_dir,
        f"trainer.run_dir={config.trainer.run_dir} must be a folder on a file system: metrics, logs and the journal of "
        "asynchronous training are appended to line by line, which an object store cannot do. Set trainer.ckpt_path "
        "and trainer.export_path to URLs instead",
    )
    for name in _MODELS:
        require(value_of(config, name) != "", f"{name} is empty; give a folder or a name on the Hugging Face hub")


def check_loggers(config: SkyRLConfig) -> None:
    """A tracker that needs a key has one."""
    if "wandb" not in config.trainer.loggers or os.environ.get("WANDB_API_KEY"):
        return
    require(
        os.environ.get("WANDB_MODE") in ("offline", "disabled"),
        "trainer.logger=wandb needs the environment variable WANDB_API_KEY; set it, or WANDB_MODE=offline to keep the "
        "run on this machine, or trainer.logger=console",
    )


def check_checkpoints(config: SkyRLConfig) -> None:
    """Check that the settings of keeping and of resuming checkpoints do not contradict each other."""
    trainer = config.trainer
    require(
        trainer.max_ckpts_to_keep == -1 or trainer.max_ckpts_to_keep > 0,
        f"trainer.max_ckpts_to_keep must be -1 (keep all) or greater than 0; got {trainer.max_ckpts_to_keep}"
        + (" (to write none, set trainer.ckpt_interval=0)" if trainer.max_ckpts_to_keep == 0 else ""),
    )
    limit = trainer.max_trajectories_gb
    require(
        limit is None or limit > 0,
        f"trainer.max_trajectories_gb must be greater than 0, or null for no limit; got {limit}"
        " (to write none, set trainer.dump_trajectories=false)",
    )
    require(
        trainer.resume_mode != "from_path" or trainer.resume_path is not None,
        "trainer.resume_mode=from_path needs trainer.resume_path, the global_step_N folder to go on from",
    )
    require(
        trainer.resume_mode == "from_path" or trainer.resume_path is None,
        f"trainer.resume_path={trainer.resume_path} is read only with trainer.resume_mode=from_path; got "
        f"trainer.resume_mode={trainer.resume_mode}",
    )

"""Hooks: user-defined classes that observe a training run, add metrics, and annotate its failure (`trainer.hooks`)."""

from typing import Protocol

from skyrl_train.config import SkyRLConfig
from skyrl_train.errors import ConfigError
from skyrl_train.utils.import_path import import_object
from skyrl_train.utils.run_folder import RunFolder


class ObservedRun(Protocol):
    """Interface of a run for hooks, for reinforcement learning and supervised training. `RayPPOTrainer` has more."""

    cfg: SkyRLConfig
    global_step: int
    all_metrics: dict[str, float | None]
    """Metrics of the current step, to read and to extend."""
    all_timings: dict[str, float]
    """Seconds of the phases of the current step."""
    run_folder: RunFolder

    def request_stop(self, reason: Exception) -> None:
        """End the run after this step, with a checkpoint and this error."""
        ...


class TrainerHook:
    """Base of hooks. All methods do nothing by default.

    Args:
        run: the observed run.

    Example (in my_hooks.py, with `trainer.hooks=[my_hooks.RewardPerToken]`):

        class RewardPerToken(TrainerHook):
            def on_log(self) -> None:
                metrics = self.run.all_metrics
                if "reward/avg_raw_reward" in metrics:
                    metrics["reward/per_token"] = metrics["reward/avg_raw_reward"] / metrics["generate/avg_num_tokens"]
    """

    def __init__(self, run: ObservedRun):
        self.run = run

    @classmethod
    def check_settings(cls, cfg: SkyRLConfig) -> None:
        """Check settings and files before anything starts. Raises ConfigError."""

    def on_start(self) -> None:
        """Handle the start, with models loaded, before a checkpoint is read. Runs in a thread."""

    def on_resume(self) -> None:
        """Handle a loaded checkpoint. `run.run_folder.read_metrics()` has the metrics of earlier steps."""

    async def on_step_end(self) -> None:
        """Handle the end of a step: models and engines are updated, evaluation has not run yet."""

    def on_log(self) -> None:
        """Read or change the metrics of a step before they are logged. Hooks run in the order of `trainer.hooks`."""

    def on_error(self, error: Exception) -> None:
        """Handle the error that ends the run. `error.add_note` adds lines to its message."""


def load_hooks(cfg: SkyRLConfig) -> list[type[TrainerHook]]:
    """Import the classes in `trainer.hooks`. Raises ConfigError."""
    hooks = []
    for path in cfg.trainer.hooks:
        hook = import_object("trainer.hooks", path)
        if not (isinstance(hook, type) and issubclass(hook, TrainerHook)):
            raise ConfigError(
                f"trainer.hooks={path!r} must be a subclass of skyrl_train.hooks.TrainerHook, not {hook!r}"
            )
        hooks.append(hook)
    return hooks

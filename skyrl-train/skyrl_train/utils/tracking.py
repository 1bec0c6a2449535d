"""Where the metrics of a run go: the console, the run folder, and the trackers people use.

`Tracking` hands every `log` to each of its backends; a backend is a small class that knows one service.
"""

import importlib
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, Self

from loguru import logger
from omegaconf import DictConfig, OmegaConf

from skyrl_train.config.typed import to_dict
from skyrl_train.errors import ConfigError
from skyrl_train.utils.process_log import log_level
from skyrl_train.utils.run_folder import RunFolder


class TrackingBackend(Protocol):
    """One place that metrics go to."""

    def log(self, data: Mapping[str, Any], step: int, commit: bool) -> None: ...

    def finish(self) -> None: ...


class Tracking:
    """Sends the metrics of a run to every backend asked for, and to `metrics.jsonl` of the run folder if there is one.

    Args:
        project_name: groups runs.
        experiment_name: names this run.
        backends: one or several of `console`, `wandb`, `tensorboard`, `mlflow`, `swanlab`.
        config: the run's settings (a dataclass, a mapping or an OmegaConf node), shown by the trackers.
        run_folder: also keep the metrics there, and the trackers' local files below it.

    Raises:
        ConfigError: a backend is unknown, not installed, or cannot start as it is set up (no API key, say).
    """

    supported_backends = ("console", "wandb", "tensorboard", "mlflow", "swanlab")

    def __init__(
        self,
        project_name: str,
        experiment_name: str,
        backends: str | Sequence[str] = "console",
        config: Any = None,
        run_folder: RunFolder | None = None,
    ):
        names = [backends] if isinstance(backends, str) else list(backends)
        if unknown := [name for name in names if name not in self.supported_backends]:
            raise ConfigError(
                f"trainer.logger must be one or several of {', '.join(self.supported_backends)}; got {unknown[0]!r}"
            )
        self.total_steps: int | None = None
        """Shown by the console as `step 3/60`. The trainer sets it once it knows."""
        self._backends: list[TrackingBackend] = [_RunFolderBackend(run_folder)] if run_folder else []
        settings = plain_config(config)
        for name in dict.fromkeys(names):
            if name == "console":
                self._backends.append(_ConsoleBackend(lambda: self.total_steps))
            else:
                self._backends.append(_SERVICES[name](project_name, experiment_name, settings, run_folder))

    def log(self, data: Mapping[str, Any], step: int, commit: bool = False) -> None:
        """Records metrics of a step, at once. Several calls for a step add up.

        Args:
            data: numbers by name; `/` in a name groups.
            commit: this was the last call for this step (only W&B wants to know).
        """
        for backend in self._backends:
            backend.log(data, step, commit)

    def finish(self) -> None:
        """Waits until everything is written or sent. Later calls do nothing."""
        while self._backends:
            self._backends.pop().finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()


def plain_config(config: Any) -> dict[str, Any]:
    """Settings as nested dictionaries, whichever way they are held."""
    if config is None:
        return {}
    if is_dataclass(config) and not isinstance(config, type):
        return to_dict(config)
    items: Any = OmegaConf.to_container(config, resolve=True) if isinstance(config, DictConfig) else config
    return {str(key): value for key, value in items.items()}


# --- the console and the run folder


CONSOLE_METRICS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("reward", ("reward/avg_raw_reward", "loss/avg_final_rewards"), ".3f"),
    ("eval", ("eval/all/avg_score",), ".3f"),
    ("loss", ("policy/final_loss", "policy/policy_loss", "policy_loss"), ".4f"),
    ("kl", ("policy/policy_kl", "loss/avg_kl"), ".4f"),
    ("entropy", ("policy/policy_entropy",), ".3f"),
    ("grad", ("policy/grad_norm", "policy/raw_grad_norm"), ".2f"),
    ("clipped", ("policy/loss_metrics/clip_ratio",), ".3f"),
    ("length", ("generate/avg_num_tokens", "policy/response_length"), ".1f"),
    ("stale", ("async/staleness_mean",), ".2f"),
)
"""What the console shows of a step: a label, the metrics it may come from (the first one there), and the format."""

_STAGES = (
    ("generate", "timing/generate"),
    ("train", "timing/train_critic_and_policy"),
    ("sync", "timing/sync_weights"),
)


def console_line(data: Mapping[str, Any], step: int, total_steps: int | None = None) -> str:
    """A step in a line: the metrics one looks at first, and where the seconds went."""
    parts = [f"step {step}/{total_steps}" if total_steps else f"step {step}"]
    for label, names, form in CONSOLE_METRICS:
        if (name := next((name for name in names if isinstance(data.get(name), int | float)), None)) is not None:
            parts.append(f"{label} {data[name]:{form}}")
    if len(parts) == 1:  # none that we know: the first few as they come
        parts += [f"{name} {_four_decimals(value)}" for name, value in list(data.items())[:8]]
    stages = [f"{label} {data[name]:.1f}" for label, name in _STAGES if name in data]
    if "timing/step" in data:
        parts.append(f"{data['timing/step']:.1f} s" + (f" ({', '.join(stages)})" if stages else ""))
    return "  ".join(parts)


def _four_decimals(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)


class _ConsoleBackend:
    def __init__(self, total_steps: Callable[[], int | None]):
        self._total_steps = total_steps
        self._in_full = log_level() in ("TRACE", "DEBUG")

    def log(self, data: Mapping[str, Any], step: int, commit: bool) -> None:
        logger.info("{}", console_line(data, step, self._total_steps()))
        if self._in_full:
            logger.debug("{}", "  ".join(f"{name}: {_four_decimals(value)}" for name, value in data.items()))

    def finish(self) -> None:
        pass


class _RunFolderBackend:
    def __init__(self, run_folder: RunFolder):
        self._run_folder = run_folder

    def log(self, data: Mapping[str, Any], step: int, commit: bool) -> None:
        self._run_folder.append_metrics(step, data)

    def finish(self) -> None:
        pass


# --- services


class _WandbBackend:
    """Weights & Biases. Online needs an API key; `WANDB_MODE=offline` keeps files for `wandb sync`."""

    def __init__(self, project_name: str, run_name: str, config: dict[str, Any], run_folder: RunFolder | None):
        wandb = _installed("wandb")
        starts_anew = config.get("trainer", {}).get("resume_mode") == "none"
        run_id, is_resumed = _kept_run_id(run_folder, "wandb", starts_anew)
        try:
            self._run = wandb.init(
                project=project_name,
                name=run_name,
                config=config,
                dir=_local_folder(run_folder, None),
                id=run_id,
                resume="allow" if is_resumed else None,
            )
        except wandb.errors.Error as error:
            raise ConfigError(
                f"trainer.logger=wandb cannot start: {error} "
                "Set WANDB_API_KEY, or WANDB_MODE=offline to keep the files here"
            ) from error

    def log(self, data: Mapping[str, Any], step: int, commit: bool) -> None:
        self._run.log({name: value for name, value in data.items() if value is not None}, step=step, commit=commit)

    def finish(self) -> None:
        self._run.finish()


class _TensorboardBackend:
    """TensorBoard event files, in `TENSORBOARD_DIR`, or else in the run folder, or else in `tensorboard_log`."""

    def __init__(self, project_name: str, run_name: str, config: dict[str, Any], run_folder: RunFolder | None):
        _installed("tensorboard")
        self._writer_class: Any = importlib.import_module("torch.utils.tensorboard").SummaryWriter
        folder = run_folder.trackers_folder / "tensorboard" if run_folder else Path("tensorboard_log")
        self._folder = os.environ.get("TENSORBOARD_DIR") or str(folder)
        self._config = config
        self._writer: Any = None

    def log(self, data: Mapping[str, Any], step: int, commit: bool) -> None:
        if self._writer is None:
            # A resumed run starts earlier than the last event: purge_step makes TensorBoard forget what it repeats.
            self._writer = self._writer_class(self._folder, purge_step=step)
            self._writer.add_text("config", f"```\n{OmegaConf.to_yaml(OmegaConf.create(self._config))}\n```", step)
        for name, value in _numbers(data).items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def finish(self) -> None:
        if self._writer is not None:
            self._writer.close()


class _MlflowBackend:
    """MLflow: the server of `MLFLOW_TRACKING_URI`, or else files in the run folder (or in `mlruns`)."""

    def __init__(self, project_name: str, run_name: str, config: dict[str, Any], run_folder: RunFolder | None):
        self._mlflow = _installed("mlflow")
        self._error: type[Exception] = self._mlflow.exceptions.MlflowException
        self._has_warned = False
        if not os.environ.get("MLFLOW_TRACKING_URI"):
            # The only local store that needs no database packages; MLflow asks to be told that it is wanted.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            folder = run_folder.trackers_folder / "mlruns" if run_folder else Path("mlruns").absolute()
            self._mlflow.set_tracking_uri(folder.as_uri())
        try:
            self._mlflow.set_experiment(project_name)
            self._run = self._mlflow.start_run(run_name=run_name)
            self._mlflow.log_params(_flat(config))
        except self._error as error:
            raise ConfigError(f"trainer.logger=mlflow cannot start: {error} Check MLFLOW_TRACKING_URI") from error

    def log(self, data: Mapping[str, Any], step: int, commit: bool) -> None:
        try:
            metrics = {name.replace("@", "_at_"): value for name, value in _numbers(data).items()}
            self._mlflow.log_metrics(metrics, step=step)
        except self._error as error:  # a server that is away for a while must not end the run
            if not self._has_warned:
                logger.warning(f"MLflow did not take the metrics of step {step} (said once): {error}")
            self._has_warned = True

    def finish(self) -> None:
        self._mlflow.end_run()


class _SwanlabBackend:
    """SwanLab, in the mode of `SWANLAB_MODE` (`online`; `offline` and `local` keep files), below `SWANLAB_LOG_DIR`."""

    def __init__(self, project_name: str, run_name: str, config: dict[str, Any], run_folder: RunFolder | None):
        self._swanlab = _installed("swanlab")
        mode = os.environ.get("SWANLAB_MODE", "online")
        folder = os.environ.get("SWANLAB_LOG_DIR") or _local_folder(run_folder, "swanlab") or "swanlog"
        try:
            self._swanlab.init(
                project=project_name,
                name=run_name,
                config=config,
                log_dir=str(folder),
                mode="online" if mode == "cloud" else mode,
            )
        except (RuntimeError, ValueError, AssertionError) as error:  # the last for an empty API key
            raise ConfigError(
                f"trainer.logger=swanlab cannot start: {error} "
                "Set SWANLAB_API_KEY, or SWANLAB_MODE=offline to keep the files here"
            ) from error

    def log(self, data: Mapping[str, Any], step: int, commit: bool) -> None:
        self._swanlab.log(_numbers(data), step=step)

    def finish(self) -> None:
        self._swanlab.finish()


_SERVICES: dict[str, Callable[[str, str, dict[str, Any], RunFolder | None], TrackingBackend]] = {
    "wandb": _WandbBackend,
    "tensorboard": _TensorboardBackend,
    "mlflow": _MlflowBackend,
    "swanlab": _SwanlabBackend,
}


def _installed(package: str) -> ModuleType:
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise ConfigError(
            f"trainer.logger={package} needs the package {package}, which is not installed; "
            "install the extra `tracking`, or use trainer.logger=console"
        ) from error


def _local_folder(run_folder: RunFolder | None, name: str | None) -> Path | None:
    """A folder below the run's for a tracker's files, made if need be; None without a run folder."""
    if run_folder is None:
        return None
    folder = run_folder.trackers_folder / name if name else run_folder.trackers_folder
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _kept_run_id(run_folder: RunFolder | None, service: str, starts_anew: bool) -> tuple[str | None, bool]:
    """The id under which a service knows this run, kept in its folder, so that a resumed run goes on as the same one.

    Returns:
        The id, and whether it was there already.
    """
    if (folder := _local_folder(run_folder, None)) is None:
        return None, False
    path = folder / f"{service}_run_id"
    if is_resumed := path.exists() and not starts_anew:
        return path.read_text().strip(), is_resumed
    run_id = secrets.token_hex(4)
    path.write_text(run_id + "\n")
    return run_id, is_resumed


def _numbers(data: Mapping[str, Any]) -> dict[str, float]:
    """What a plot can show of the metrics."""
    values = {name: value.item() if hasattr(value, "item") else value for name, value in data.items()}
    return {name: float(value) for name, value in values.items() if isinstance(value, int | float)}


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as `trainer/algorithm/kl_loss_coef: value`; `@`, which MLflow refuses in names, as `_at_`."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{prefix}{key}".replace("@", "_at_")
        flat |= _flat(value, f"{name}/") if isinstance(value, Mapping) and value else {name: value}
    return flat

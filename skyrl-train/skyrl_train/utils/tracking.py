"""Sinks of a run's metrics: the console, the run folder, and the tracking services supported by accelerate."""

import html
import importlib
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, Protocol, Self, get_args

from loguru import logger
from omegaconf import DictConfig, OmegaConf

from skyrl_train.config.config import SAMPLE_TRACKERS, TAG_TRACKERS, TrackerName
from skyrl_train.config.typed import to_dict
from skyrl_train.errors import ConfigError
from skyrl_train.utils.process_log import log_level
from skyrl_train.utils.run_folder import RunFolder

SampleRow = tuple[str, str, float | None]
"""Prompt, response and reward of a sample."""


class TrackingBackend(Protocol):
    """Sink of metrics."""

    def log(self, data: Mapping[str, object], step: int, commit: bool) -> None: ...

    def log_samples(self, name: str, samples: Sequence[SampleRow], step: int) -> None: ...

    def finish(self) -> None: ...


class Tracking:
    """Metrics of a run, sent to all backends and to `metrics.jsonl` of the run folder, if any.

    Args:
        project_name: groups runs.
        experiment_name: names this run.
        backends: one or several of `supported_backends`.
        config: the run's settings (a dataclass, a mapping or an OmegaConf node), shown by the services.
        run_folder: folder of `metrics.jsonl` and of the services' local files.
        tags: tags of this run, for services that support them.

    Raises:
        ConfigError: a backend is unknown, not installed, or cannot start (such as without an API key).
    """

    supported_backends = get_args(TrackerName)

    def __init__(
        self,
        project_name: str,
        experiment_name: str,
        backends: str | Sequence[str] = "console",
        config: Any = None,
        run_folder: RunFolder | None = None,
        tags: Sequence[str] | None = None,
    ):
        names = [backends] if isinstance(backends, str) else list(backends)
        if unknown := [name for name in names if name not in self.supported_backends]:
            raise ConfigError(
                f"trainer.logger must be one or several of {', '.join(self.supported_backends)}; got {unknown[0]!r}"
            )
        self.total_steps: int | None = None
        """Steps of the run, for the console's `step 3/60`; set by the trainer."""
        self._backends: list[TrackingBackend] = [_RunFolderBackend(run_folder)] if run_folder else []
        settings = to_plain_config(config)
        for name in dict.fromkeys(names):
            if name == "console":
                self._backends.append(_ConsoleBackend(lambda: self.total_steps))
            else:
                self._backends.append(_ServiceBackend(name, project_name, experiment_name, settings, run_folder, tags))

    def log(self, data: Mapping[str, object], step: int, commit: bool = False) -> None:
        """Record metrics of a step at once. Several calls for a step add up.

        Args:
            data: numbers by name; `/` in a name groups.
            commit: this is the last call for this step (only read by W&B).
        """
        for backend in self._backends:
            backend.log(data, step, commit)

    def log_samples(self, name: str, samples: Sequence[SampleRow], step: int) -> None:
        """Record samples of a step as a table, in the services of `SAMPLE_TRACKERS`."""
        for backend in self._backends:
            backend.log_samples(name, samples, step)

    def finish(self) -> None:
        """Wait until everything is written or sent. Later calls do nothing."""
        while self._backends:
            self._backends.pop().finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()


def to_plain_config(config: object) -> dict[str, Any]:
    """Convert settings (dataclass, mapping or OmegaConf node) to nested dictionaries."""
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
"""Metrics of a step on the console: label, candidate names (the first one present), and format."""

_PHASES = (
    ("generate", "timing/generate"),
    ("train", "timing/train_critic_and_policy"),
    ("sync", "timing/sync_weights"),
)


def format_console_line(data: Mapping[str, object], step: int, total_steps: int | None = None) -> str:
    """Format a step as one line: its main metrics and the seconds of its phases."""
    parts = [f"step {step}/{total_steps}" if total_steps else f"step {step}"]
    for label, names, form in CONSOLE_METRICS:
        if (name := next((name for name in names if isinstance(data.get(name), int | float)), None)) is not None:
            parts.append(f"{label} {data[name]:{form}}")
    if len(parts) == 1:  # none of the main metrics: the first few
        parts += [f"{name} {_format_four_decimals(value)}" for name, value in list(data.items())[:8]]
    phases = [f"{label} {data[name]:.1f}" for label, name in _PHASES if name in data]
    if "timing/step" in data:
        parts.append(f"{data['timing/step']:.1f} s" + (f" ({', '.join(phases)})" if phases else ""))
    return "  ".join(parts)


def _format_four_decimals(value: object) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)


class _ConsoleBackend:
    def __init__(self, total_steps: Callable[[], int | None]):
        self._total_steps = total_steps
        self._in_full = log_level() in ("TRACE", "DEBUG")

    def log(self, data: Mapping[str, object], step: int, commit: bool) -> None:
        logger.info("{}", format_console_line(data, step, self._total_steps()))
        if self._in_full:
            logger.debug("{}", "  ".join(f"{name}: {_format_four_decimals(value)}" for name, value in data.items()))

    def log_samples(self, name: str, samples: Sequence[SampleRow], step: int) -> None:
        """Show nothing: the console prints samples by `trainer.print_example_interval`."""

    def finish(self) -> None:
        pass


class _RunFolderBackend:
    def __init__(self, run_folder: RunFolder):
        self._run_folder = run_folder

    def log(self, data: Mapping[str, object], step: int, commit: bool) -> None:
        self._run_folder.append_metrics(step, data)

    def log_samples(self, name: str, samples: Sequence[SampleRow], step: int) -> None:
        """Write nothing: all trajectories are in the run folder."""

    def finish(self) -> None:
        pass


# --- services


class _ServiceBackend:
    """Tracker of a service, implemented by accelerate (`accelerate.tracking`), with local files below the run folder. A
    failure after the start is logged once and does not end the run."""

    def __init__(
        self,
        name: str,
        project: str,
        run_name: str,
        config: dict[str, object],
        run_folder: RunFolder | None,
        tags: Sequence[str] | None,
    ):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name:
                raise
            raise ConfigError(
                f"trainer.logger={name} needs the package {name}, which is not installed; install it (the extra "
                "`tracking` has wandb, tensorboard, mlflow and swanlab), or use trainer.logger=console"
            ) from error
        from accelerate import PartialState  # both import torch, which a run without a service may do later
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS
        from accelerate.utils import clear_environment

        with clear_environment():  # LOCAL_RANK, which DeepSpeed sets, would make it wait for other ranks
            PartialState(cpu=True)  # accelerate's loggers require it
        self._name = name
        self._config = config
        self._has_warned = False
        self._has_started = False
        options = _options(name, project, run_name, config, run_folder)
        if tags and name in TAG_TRACKERS:
            options["tags"] = list(tags)
        try:
            self._tracker = LOGGER_TYPE_TO_CLASS[name](**options)
            if name != "tensorboard":  # which must know the first step
                self._start()
        except Exception as error:  # every service has its own error types
            raise ConfigError(f"trainer.logger={name} cannot start: {error}{_HINTS.get(name, '')}") from error

    def _start(self) -> None:
        self._tracker.start()
        self._has_started = True
        if self._name == "tensorboard":
            self._tracker.writer.add_text("config", f"```\n{OmegaConf.to_yaml(OmegaConf.create(self._config))}\n```")
        elif self._name not in ("wandb", "swanlab"):  # these have it from `_get_options`
            self._tracker.store_init_configuration(_flatten_settings(self._config))

    def log(self, data: Mapping[str, object], step: int, commit: bool) -> None:
        values = _select_numbers(data)
        if self._name == "mlflow":  # rejects `@` in names
            values = {name.replace("@", "_at_"): value for name, value in values.items()}
        options = {"commit": commit} if self._name == "wandb" else {}
        self._send(step, lambda: self._tracker.log(values, step=step, **options))

    def log_samples(self, name: str, samples: Sequence[SampleRow], step: int) -> None:
        if self._name in SAMPLE_TRACKERS:
            self._send(step, lambda: self._log_table(name, samples, step))

    def _log_table(self, name: str, samples: Sequence[SampleRow], step: int) -> None:
        if self._name == "wandb":
            self._tracker.log_table(name, columns=[*_COLUMNS], data=[list(sample) for sample in samples], step=step)
        elif self._name == "tensorboard":
            self._tracker.writer.add_text(name, format_markdown_table(samples), step)
        else:
            texts = [f"{prompt}\n{response}\nreward: {reward}" for prompt, response, reward in samples]
            text = importlib.import_module("swanlab").Text
            self._tracker.log({name: [text(each) for each in texts]}, step=step)

    def _send(self, step: int, send: Callable[[], None]) -> None:
        """Start the service if it has not started, and call `send`. The first failure is logged."""
        try:
            if not self._has_started:
                # A resumed run starts before the last event: purge_step makes TensorBoard discard the repeated steps.
                self._tracker.init_kwargs["purge_step"] = step
                self._start()
            send()
        except Exception as error:  # every service has its own error types, and may be temporarily unavailable
            if not self._has_warned:
                logger.warning(f"{self._name} rejected the metrics of step {step} (reported once): {error}")
            self._has_warned = True

    def finish(self) -> None:
        if self._has_started:
            self._tracker.finish()


_HINTS = {
    "wandb": ". Set WANDB_API_KEY, or WANDB_MODE=offline to keep the files here",
    "mlflow": ". Check MLFLOW_TRACKING_URI",
    "swanlab": ". Set SWANLAB_API_KEY, or SWANLAB_MODE=offline to keep the files here",
}


def _options(
    name: str, project: str, run_name: str, config: dict[str, Any], run_folder: RunFolder | None
) -> dict[str, object]:
    """Return the arguments of a service's tracker. Most call the project `run_name`."""
    match name:
        case "wandb":
            starts_anew = config.get("trainer", {}).get("resume_mode") == "none"
            run_id, is_resumed = _load_run_id(run_folder, "wandb", starts_anew)
            resume = "allow" if is_resumed else None
            folder = _create_local_folder(run_folder, None)
            return {
                "run_name": project,
                "name": run_name,
                "config": config,
                "dir": folder,
                "id": run_id,
                "resume": resume,
            }
        case "tensorboard":
            folder = run_folder.trackers_folder / "tensorboard" if run_folder else "tensorboard_log"
            return {"run_name": "", "logging_dir": os.environ.get("TENSORBOARD_DIR") or folder}
        case "mlflow":
            if not os.environ.get("MLFLOW_TRACKING_URI"):
                # The only local store that needs no database packages; MLflow requires explicit consent.
                os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
                folder = run_folder.trackers_folder / "mlruns" if run_folder else Path("mlruns").absolute()
                importlib.import_module("mlflow").set_tracking_uri(folder.as_uri())
            return {"experiment_name": project, "run_name": run_name}
        case "swanlab":
            mode = os.environ.get("SWANLAB_MODE", "online")
            folder = os.environ.get("SWANLAB_LOG_DIR") or _create_local_folder(run_folder, "swanlab") or "swanlog"
            mode = "online" if mode == "cloud" else mode
            return {
                "run_name": project,
                "name": run_name,
                "config": config,
                "log_dir": str(folder),
                "mode": mode,
            }
        case _:
            return {"run_name": project}


def _create_local_folder(run_folder: RunFolder | None, name: str | None) -> Path | None:
    """Create a folder below the run's for a service's files. Returns: None without a run folder."""
    if run_folder is None:
        return None
    folder = run_folder.trackers_folder / name if name else run_folder.trackers_folder
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _load_run_id(run_folder: RunFolder | None, service: str, starts_anew: bool) -> tuple[str | None, bool]:
    """Read or create a service's id of this run, stored in its folder, so that a resumed run continues the same one.

    Returns:
        the id, and True if it existed already.
    """
    if (folder := _create_local_folder(run_folder, None)) is None:
        return None, False
    path = folder / f"{service}_run_id"
    if is_resumed := path.exists() and not starts_anew:
        return path.read_text().strip(), is_resumed
    run_id = secrets.token_hex(4)
    path.write_text(run_id + "\n")
    return run_id, is_resumed


_COLUMNS = ("prompt", "response", "reward")


def format_markdown_table(samples: Sequence[SampleRow]) -> str:
    """Format samples as a table whose cells show line breaks and markup as text."""

    def cell(value: object) -> str:
        text = html.escape(str(value)).replace("|", "&#124;")
        return "<br>".join(text.splitlines())

    rows = [" | ".join(map(cell, row)) for row in samples]
    return "\n".join(f"| {row} |" for row in (" | ".join(_COLUMNS), "---|---|---", *rows))


def _select_numbers(data: Mapping[str, Any]) -> dict[str, float]:
    """Select the metrics that are numbers."""
    values = {name: value.item() if hasattr(value, "item") else value for name, value in data.items()}
    return {name: float(value) for name, value in values.items() if isinstance(value, int | float)}


def _flatten_settings(config: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Flatten settings to `trainer/algorithm/kl_loss_coef: value`; `@`, which MLflow rejects in names, becomes
    `_at_`."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{prefix}{key}".replace("@", "_at_")
        flat |= _flatten_settings(value, f"{name}/") if isinstance(value, Mapping) and value else {name: value}
    return flat

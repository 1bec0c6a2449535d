"""Data of a run's page, read from its folder. Knows no HTML."""

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypeVar

import yaml

from skyrl_train.errors import DataError
from skyrl_train.report.swim_lanes import swim_lanes
from skyrl_train.types import JsonObject
from skyrl_train.utils.run_folder import RunFolder, TrajectoryFile, read_json_lines

T = TypeVar("T")

MAX_FILES = 60
"""Trajectory files that are read, spread over the run: those of a long run are gigabytes."""
MAX_TOKENS_OF_A_SAMPLE = 4000
"""Maximum number of tokens shown of a sample; the middle of a longer one is left out."""
MAX_FAILURES = 200

_SUMMARY = (
    ("Model", "trainer.policy.model.path"),
    ("Environment", "environment.env_class"),
    ("Estimator", "trainer.algorithm.advantage_estimator"),
    ("Policy loss", "trainer.algorithm.policy_loss_type"),
    ("Learning rate", "trainer.policy.optimizer_config.lr"),
    ("Prompts a step", "trainer.train_batch_size"),
    ("Samples a prompt", "generator.n_samples_per_prompt"),
    ("Mini-batch", "trainer.policy_mini_batch_size"),
    ("New tokens", "generator.sampling_params.max_generate_length"),
    ("Temperature", "generator.sampling_params.temperature"),
    ("Strategy", "trainer.strategy"),
    ("Engine", "generator.backend"),
    ("Seed", "trainer.seed"),
)
"""Settings named at the top of the page; the rest is below them in full."""


@dataclass
class Trajectories:
    """Some of a run's trajectories."""

    samples: list[JsonObject] = field(default_factory=list)
    failures: list[dict[str, object]] = field(default_factory=list)
    """Failed trajectories, at most `MAX_FAILURES`, oldest first."""
    failure_counts: Counter[str] = field(default_factory=Counter)
    """Number of failures by kind, over the files that were read."""
    num_read: int = 0
    num_files_read: int = 0
    num_files: int = 0


def curves(rows: Iterable[JsonObject]) -> dict[str, tuple[list[int], list[float | None]]]:
    """Return every metric as steps and values, by step. Of several lines of a step the last that has the metric
    counts."""
    found: dict[str, dict[int, float | None]] = {}
    for row in rows:
        for name, value in row.items():
            if name not in ("step", "time") and (value is None or isinstance(value, int | float)):
                found.setdefault(name, {})[row["step"]] = None if value is None else float(f"{value:.6g}")
    return {name: (sorted(points), [points[step] for step in sorted(points)]) for name, points in found.items()}


def config_summary(text: str) -> list[tuple[str, str]]:
    """The settings one asks for first, by a short name. Empty if the text is no configuration of ours."""
    try:
        config = yaml.safe_load(text)
    except yaml.YAMLError:
        return []
    found = ((label, _at(config, key.split("."))) for label, key in _SUMMARY)
    return [(label, str(value)) for label, value in found if value is not None]


def run_name(run: RunFolder, text: str) -> str:
    """The name given in the settings, or else the folder's."""
    try:
        name = _at(yaml.safe_load(text), ["trainer", "run_name"])
    except yaml.YAMLError:
        name = None
    return str(name or run.path.name)


def run_times(rows: list[JsonObject]) -> dict[str, float | None]:
    """Return when the run started and last wrote (Unix seconds), and the durations between. The first line ends the
    first step."""
    if not rows:
        return {"started": None, "updated": None, "seconds": None}
    started = rows[0]["time"] - (rows[0].get("timing/step") or 0.0)
    return {"started": started, "updated": rows[-1]["time"], "seconds": rows[-1]["time"] - started}


def read_trajectories(run: RunFolder, max_samples: int) -> Trajectories:
    """Read samples spread over the steps of a run and the prompts of each, and the failures of the files they are
    from."""
    files = run.trajectory_files()
    chosen = spread(files, min(MAX_FILES, max(1, max_samples)))
    found = Trajectories(num_files=len(files), num_files_read=len(chosen))
    for index, file in enumerate(chosen):
        share = max_samples * (index + 1) // len(chosen) - max_samples * index // len(chosen)
        _read_file(file, share, found)
    return found


def _read_file(file: TrajectoryFile, num_samples: int, found: Trajectories) -> None:
    rows = [row for _, row in read_json_lines(file.path)]
    found.num_read += len(rows)
    failed = [row for row in rows if row["failure"]]
    chosen = spread(rows, num_samples)
    if failed and chosen and not any(row["failure"] for row in chosen):
        chosen[-1] = failed[0]  # one of what went wrong is worth more than another of what went well
    found.samples += [_sample(file, row) for row in chosen]
    found.failure_counts.update(row["failure"]["kind"] for row in failed)
    found.failures += [
        {"step": file.step, "phase": file.phase, "uid": row["uid"], **row["failure"]}
        for row in failed[: MAX_FAILURES - len(found.failures)]
    ]


def _sample(file: TrajectoryFile, row: JsonObject) -> JsonObject:
    """A row with short names for what there is one of a token, and without the middle of a very long response."""
    tokens = row["tokens"]
    num_tokens = len(tokens["ids"])
    left_out = max(0, num_tokens - MAX_TOKENS_OF_A_SAMPLE)
    head = MAX_TOKENS_OF_A_SAMPLE * 3 // 4 if left_out else num_tokens

    def shorten(values: list[T] | None) -> list[T] | None:
        return None if values is None else values[:head] + values[head + left_out :]

    log_probs = shorten(tokens["log_probs"])
    return {
        "step": file.step,
        "phase": file.phase,
        **{name: row[name] for name in ("uid", "sample", "prompt", "reward", "stop_reason", "failure")},
        "num_tokens": num_tokens,
        "gap": {"at": head, "tokens": left_out} if left_out else None,
        "text": shorten(tokens["text"]),
        "ids": shorten(tokens["ids"]),
        "mask": shorten(tokens["loss_mask"]),
        "log_probs": log_probs and [None if value is None else round(value, 4) for value in log_probs],
        "rewards": shorten(tokens["rewards"]),
        "versions": shorten(tokens["weight_versions"]),
    }


def spread(items: list[T], count: int) -> list[T]:
    """Select at most `count` items at even distances, the first and the last among them."""
    if len(items) <= count:
        return list(items)
    if count < 2:
        return items[len(items) - count :]
    return [items[round(index * (len(items) - 1) / (count - 1))] for index in range(count)]


def _at(config: object, keys: list[str]) -> object:
    for key in keys:
        config = config.get(key) if isinstance(config, Mapping) else None
    return config


def existing_run(path: str | Path) -> RunFolder:
    """The run at a path.

    Raises:
        DataError: there is none.
    """
    run = RunFolder(path)
    if not (run.metrics_path.exists() or run.config_path.exists() or run.trajectories_folder.exists()):
        raise DataError(
            f"{run.path} is not a run folder: it holds neither config.yaml nor metrics.jsonl nor trajectories. "
            "Give the folder of trainer.run_dir"
        )
    return run


def page_data(run: RunFolder, max_samples: int) -> dict[str, object]:
    """Collect all data of the page, ready for JSON."""
    rows = run.read_metrics()
    text = run.config_path.read_text() if run.config_path.exists() else ""
    trajectories = read_trajectories(run, max_samples)
    return {
        "name": run_name(run, text),
        "folder": run.path.name,
        "written": time.time(),
        **run_times(rows),
        "steps": rows[-1]["step"] if rows else 0,
        "summary": config_summary(text),
        "config": text,
        "curves": curves(rows),
        "samples": trajectories.samples,
        "failures": trajectories.failures,
        "failure_counts": trajectories.failure_counts,
        "num_read": trajectories.num_read,
        "num_files_read": trajectories.num_files_read,
        "num_files": trajectories.num_files,
        "lanes": [asdict(lanes) for lanes in swim_lanes(run.read_timeline(), spread)],
    }

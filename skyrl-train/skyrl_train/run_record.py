"""Record of a run's software, data and per-step results, for comparison with another run (`skyrl_train.diff`).

At the start: versions of libraries, a digest of this project's code, the machine, digests of data, tokenizer and
    environments. At each step: fingerprints of the batch, row by row, and of the weights sent to the engines. A start
    costs less than a second, a step about 30 ms of CPU time for a million tokens. Independent of models.
"""

import hashlib
import inspect
import json
import math
import os
import platform
import re
import shlex
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
import xxhash
from transformers import PreTrainedTokenizerBase

import skyrl_gym
from skyrl_gym.error import Error as GymError
from skyrl_train.config import SkyRLConfig
from skyrl_train.dataset.dataloader import Dataset
from skyrl_train.library_versions import list_installed
from skyrl_train.provenance import data_digest
from skyrl_train.training_batch import TrainingInputBatch
from skyrl_train.types import JsonObject
from skyrl_train.utils.chat_templates import get_custom_chat_template

FORMAT = 1
"""Number of the form of these records."""

COMPUTED = (
    "base_action_log_probs",
    "teacher_log_probs",
    "values",
    "action_log_probs",
    "advantages",
    "returns",
    "loss_weights",
)
"""Columns of a batch that the trainer computes, in the order in which it does. The others are in the trajectories."""

_VARIABLES = ("OMP_NUM_THREADS", "MKL_CBWR", "CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO", "NVIDIA_TF32_OVERRIDE")
"""Environment variables that change the bits of sums."""

_DIGITS = 8
"""Hex digits of a fingerprint on disk: two different tensors share them once in 4 billion times."""


# ---- at a start


def describe_start(cfg: SkyRLConfig, dataset: Dataset | None, tokenizer: PreTrainedTokenizerBase) -> JsonObject:
    """Return the inputs of a run other than its settings, as JSON values."""
    return {
        "format": FORMAT,
        "command": shlex.join(sys.orig_argv),
        "folder": os.getcwd(),
        "libraries": list_installed(),
        "code": {package: code_digest(package) for package in ("skyrl_train", "skyrl_gym")},
        "machine": machine(),
        "data": None if dataset is None else data_digest(dataset).to_json(),
        "tokenizer": describe_tokenizer(tokenizer),
        "environments": {name: describe_environment(name) for name in environment_names(cfg, dataset)},
    }


def describe_sampling(
    cfg: SkyRLConfig, dataset: Dataset | None, tokenizer: PreTrainedTokenizerBase
) -> dict[str, object]:
    """Return hashes of the inputs of samples and rewards other than settings and data: tokenizer, chat template, task
    file and environments."""
    task = Path(cfg.generator.task).expanduser() if cfg.generator.task else None
    return {
        "tokenizer": describe_tokenizer(tokenizer),
        "chat template": _compute_digest(str(get_custom_chat_template(cfg.generator.chat_template))),
        "task file": _compute_digest(task.read_text()) if task is not None and task.is_file() else None,
        "environments": {name: describe_environment(name) for name in environment_names(cfg, dataset)},
    }


@cache
def code_digest(package: str) -> str:
    """Return a hash of the Python files of an imported package."""
    root = Path(sys.modules[package].__path__[0])
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root).as_posix()}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def machine() -> dict[str, str]:
    """Return the hardware and system properties that may change the bits of results. Does not start CUDA, which would
    use GPU memory."""
    facts = {"python": platform.python_version(), "system": f"{platform.system()} {platform.machine()}"}
    facts["cpu"] = _read_value(Path("/proc/cpuinfo"), "model name") or platform.processor()
    gpus = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    facts["gpus"] = ", ".join(_read_value(path, "Model") or "unknown" for path in gpus) or "none"
    facts["cuda"] = str(torch.version.cuda)
    return facts | {name: os.environ[name] for name in _VARIABLES if name in os.environ}


def _read_value(path: Path, key: str) -> str | None:
    """Return the value of `key : value` in a kernel file; None if the key is missing."""
    try:
        found = re.search(rf"^{key}\s*:\s*(.+)$", path.read_text(), re.MULTILINE)
    except OSError:
        return None
    return found[1].strip() if found else None


def describe_tokenizer(tokenizer: PreTrainedTokenizerBase) -> JsonObject:
    """Return the vocabulary size of a tokenizer, and hashes of its behaviour and its chat template."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        rules: Any = sorted(tokenizer.get_vocab().items())
    else:
        # Padding and truncation depend on the last call, not on the tokenizer.
        rules = {k: v for k, v in json.loads(backend.to_str()).items() if k not in ("padding", "truncation")}
    rules = [rules, tokenizer.special_tokens_map]
    return {
        "tokens": len(tokenizer),
        "digest": _compute_digest(json.dumps(rules, default=str)),
        "chat_template": _compute_digest(json.dumps(tokenizer.chat_template, default=str)),
    }


def environment_names(cfg: SkyRLConfig, dataset: Dataset | None) -> list[str]:
    """Return the ids of a run's environments, from the settings and the rows."""
    names = {cfg.environment.env_class} if cfg.generator.uses_environments else set()
    key = getattr(dataset, "env_class_key", None)
    if key is not None and cfg.generator.uses_environments:
        names |= set(dataset.find_distinct_values(key))  # type: ignore[union-attr]  it is a PromptDataset
    return sorted(name for name in names if name)


def describe_environment(name: str) -> JsonObject:
    """Return the class of an environment id and a hash of its source file; only `class` without a source file."""
    try:
        entry_point = skyrl_gym.spec(name).entry_point
        if isinstance(entry_point, str):
            module, _, attribute = entry_point.partition(":")
            __import__(module)
            entry_point = getattr(sys.modules[module], attribute)
    except (GymError, ImportError, AttributeError):  # a custom generator may have no environments
        return {"class": None}
    described = {"class": f"{entry_point.__module__}.{entry_point.__qualname__}"}  # type: ignore[union-attr]
    try:
        source = Path(inspect.getsourcefile(entry_point) or "").read_bytes()  # type: ignore[arg-type]
    except (OSError, TypeError):  # defined interactively
        return described
    return described | {"digest": hashlib.sha256(source).hexdigest()[:12]}


def _compute_digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


# ---- at a step


def describe_batch(batch: TrainingInputBatch, mask: str = "response_mask") -> JsonObject:
    """Return compact fingerprints of a batch: for each column the fingerprint of each row (`hashes`, 8 hex digits per
    row in one text), and the mean of each row (`means`), which shows the size of a difference.

    Args:
        mask: the column [B, R] that is 0 where numbers are meaningless and ignored.
    """
    where = batch.tensor(mask).cpu() != 0
    hashes: dict[str, str] = {}
    means: dict[str, list[float | None]] = {}
    for name in COMPUTED:
        column = batch.get(name)
        if column is None or column.shape[:2] != where.shape:
            continue
        inside = where.reshape(*where.shape, *[1] * (column.dim() - 2))
        column = torch.where(inside, column.cpu(), torch.zeros((), dtype=column.dtype))
        hashes[name] = row_fingerprints(column)
        # In float64, so that it shows a rounding difference in one token.
        sums = column.flatten(1).double().sum(dim=1) / where.sum(dim=1).clamp(min=1)
        means[name] = [float(f"{value:.12g}") if math.isfinite(value) else None for value in sums.tolist()]
    return {"hashes": hashes, "means": means}


def row_fingerprints(tensor: torch.Tensor) -> str:
    """Return 8 hex digits for the bytes of each row of `tensor` [B, ...]."""
    rows = tensor.detach().cpu().contiguous().flatten(1).view(torch.uint8).numpy()
    return "".join(f"{xxhash.xxh32_intdigest(row.data):0{_DIGITS}x}" for row in rows)


class WeightRecord:
    """Compact fingerprints of weight syncs: tensor names are written with the first sync and when they change."""

    def __init__(self) -> None:
        self._names: list[str] | None = None

    def record(self, fingerprints: Mapping[str, int]) -> JsonObject:
        """Return the new entries of one sync: `values`, 8 hex digits per tensor, and `names` if they changed."""
        names = sorted(fingerprints)
        values = "".join(f"{fingerprints[name] & 0xFFFFFFFF:0{_DIGITS}x}" for name in names)
        is_new, self._names = names != self._names, names
        return {"values": values, "names": names} if is_new else {"values": values}


def split_fingerprints(text: str) -> list[str]:
    """Split a text of this module into the fingerprints of rows or tensors."""
    return [text[start : start + _DIGITS] for start in range(0, len(text), _DIGITS)]

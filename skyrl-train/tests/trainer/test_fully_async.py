"""Asynchronous training: staleness 0 equals synchronous training, and nothing is lost, repeated or trained too old."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from skyrl_train.config import SkyRLConfig
from skyrl_train.utils.run_folder import RunFolder

ASYNC = {
    "placement": {"colocate_all": False},
    "fully_async": {"enabled": True, "max_staleness_steps": 0, "order": "exact"},
}


def steps_of(cfg: SkyRLConfig) -> list[dict[str, Any]]:
    """The metrics of each step that do not depend on the clock or on the schedule."""
    return [
        {
            name: value
            for name, value in row.items()
            if name != "time" and "seconds" not in name and not name.startswith(("timing/", "async/"))
        }
        for row in RunFolder(cfg.trainer.run_dir).read_metrics()
    ]


def weights_of(cfg: SkyRLConfig) -> dict[str, torch.Tensor]:
    """The weights that the run exported."""
    return {
        f"{file.parent.parent.name}/{name}": tensor
        for file in sorted(Path(cfg.trainer.run_dir).rglob("exports/*/policy/model.safetensors"))
        for name, tensor in load_file(file).items()
    }


def trajectories_of(cfg: SkyRLConfig) -> dict[str, bytes]:
    files = RunFolder(cfg.trainer.run_dir).trajectories_folder.glob("*.jsonl")
    return {file.name: file.read_bytes() for file in files}


def test_staleness_0_equals_synchronous_training_to_the_bit(settings: Any, merged: Any, run: Any, tmp_path: Path):
    changes = {"trainer": {"max_training_steps": 10, "epochs": 3, "hf_save_interval": 5, "eval_before_train": False}}
    changes = merged(changes, {"trainer": {"placement": {"colocate_all": False}}})
    synchronous = settings(tmp_path / "synchronous", changes)
    asynchronous = settings(tmp_path / "asynchronous", merged(changes, {"trainer": ASYNC}))
    run(synchronous)
    run(asynchronous)
    steps = steps_of(synchronous)
    assert len(steps) == 10 and steps_of(asynchronous) == steps
    assert trajectories_of(asynchronous) == trajectories_of(synchronous)
    weights, own = weights_of(synchronous), weights_of(asynchronous)
    assert len(weights) > 10 and own.keys() == weights.keys()
    assert all(torch.equal(own[name], tensor) for name, tensor in weights.items())

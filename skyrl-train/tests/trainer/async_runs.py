"""Asynchronous runs: their settings, what two of them have in common, and a process of their own."""

import asyncio
import functools
import multiprocessing
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import load_file

import skyrl_gym
from skyrl_train.config import SkyRLConfig
from skyrl_train.utils.run_folder import RunFolder
from skyrl_train_testing.tiny_runs import DifferentCharacters

APART = {"placement": {"colocate_all": False}}
CORRECTED = {"off_policy_correction": {"tis_ratio_type": "token"}}


def asynchronous(**settings: Any) -> dict[str, Any]:
    """Settings of `trainer` for asynchronous training, with a correction."""
    return {
        **APART,
        "algorithm": {"use_kl_loss": False, **CORRECTED},
        "fully_async": {"enabled": True, "max_staleness_steps": 2} | settings,
    }


def steps_of(cfg: SkyRLConfig) -> list[dict[str, Any]]:
    """The metrics of each step that do not depend on the clock or on the schedule."""
    return [
        {
            name: value
            for name, value in row.items()
            if name != "time"
            and "seconds" not in name
            and not name.startswith(("timing/", "async/", "memory/", "engines/"))
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


def assert_equal_runs(one: SkyRLConfig, other: SkyRLConfig) -> None:
    """Compare metrics, trajectories and weights of two runs to the bit."""
    assert steps_of(one) == steps_of(other)
    assert trajectories_of(one) == trajectories_of(other)
    weights, own = weights_of(one), weights_of(other)
    assert len(weights) > 10 and own.keys() == weights.keys()
    assert all(torch.equal(own[name], tensor) for name, tensor in weights.items())


def trained_samples(cfg: SkyRLConfig) -> Counter[tuple[str, int]]:
    """Number of steps that trained each sample of each prompt."""
    folder = RunFolder(cfg.trainer.run_dir)
    return Counter(
        (row["uid"].partition("#")[0], row["sample"])
        for file in folder.list_trajectory_files()
        if file.phase == "train"
        for row in folder.read_trajectories(file.step, file.phase)
        if row.get("is_last_step", True)
    )


def trained_tokens(cfg: SkyRLConfig) -> Counter[tuple[str, int]]:
    """Number of steps that trained at least one token of each sample of each prompt: masked rows do not count."""
    folder = RunFolder(cfg.trainer.run_dir)
    return Counter(
        (row["uid"].partition("#")[0], row["sample"])
        for file in folder.list_trajectory_files()
        if file.phase == "train"
        for row in folder.read_trajectories(file.step, file.phase)
        if any(row["tokens"]["loss_mask"])
    )


def trained_ages(cfg: SkyRLConfig) -> set[int]:
    """Ages in steps of all tokens that the run trained on."""
    folder, ages = RunFolder(cfg.trainer.run_dir), set[int]()
    for file in folder.list_trajectory_files():
        for row in folder.read_trajectories(file.step, file.phase) if file.phase == "train" else []:
            pairs = zip(row["tokens"]["loss_mask"], row["tokens"]["weight_versions"], strict=True)
            ages |= {file.step - 1 - version for mask, version in pairs if mask}
    return ages


class Uneven(DifferentCharacters):
    """Slow environment, ten times as slow for some prompts, whose grader raises for another one."""

    def init(self, prompt: Any) -> Any:
        self.number = int(prompt[-1]["content"].split()[-1])
        return super().init(prompt)

    async def step(self, action: str) -> Any:
        await asyncio.sleep(0.3 if self.number % 8 == 5 else 0.03)
        if self.number == 7:
            raise ZeroDivisionError("my grader")
        return super().step(action)


@functools.cache
def fork_server() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["skyrl_train_testing.rank_processes", "skyrl_train.entrypoints.main_base"])
    return context


def train(settings: dict[str, Any], log: str, environment: Mapping[str, str] = MappingProxyType({})) -> None:
    """A training run, in a process of its own, with further environment variables: a fork has those of its server."""
    from skyrl_train.entrypoints.main_base import run_experiment
    from skyrl_train.utils.process_log import capture_output

    capture_output(log)
    os.environ.update({"OMP_NUM_THREADS": "1"} | dict(environment))
    skyrl_gym.register(id="uneven", entry_point=Uneven)
    run_experiment(SkyRLConfig.from_dict(settings))

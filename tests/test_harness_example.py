"""Agents that know nothing of training learn the two-step repair of examples/harness."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from composed_scripts import REPOSITORY, load_script

from skyrl_gym.error import InfraError
from skyrl_gym.sandbox import make_sandbox
from skyrl_train.utils.run_folder import RunFolder

ASYNCHRONOUS = (
    "trainer.fully_async.enabled=true",
    "trainer.placement.colocate_all=false",
    "trainer.algorithm.off_policy_correction.tis_ratio_type=token",
)


@pytest.fixture
def repair() -> Any:
    try:
        make_sandbox("local")
    except InfraError as error:
        pytest.skip(f"no sandbox here: {error}")
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    return load_script(REPOSITORY / "examples" / "harness" / "repair.py")


def learned(repair: Any, folder: Path, agent: str, seed: int, steps: int, *settings: str) -> None:
    """Train, and check the reward, the certificates and that no harness failed."""
    repair.prepare(folder, seed, 400)
    rows = repair.run(agent, folder, seed, steps, list(settings))
    rewards = [row["reward/avg_raw_reward"] for row in rows]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.2
    assert all(row["tokens/exact_share"] == 1.0 for row in rows)
    assert sum(value for row in rows for name, value in row.items() if name.startswith("harness/num_")) == 0
    last = RunFolder(folder / agent).read_trajectories(steps, "train")
    assert all(row["certificate"]["exact"] == row["certificate"]["trained"] for row in last)


@pytest.mark.full
@pytest.mark.parametrize(
    "settings",
    [pytest.param((), id="synchronous"), pytest.param(ASYNCHRONOUS, id="asynchronous", marks=pytest.mark.full)],
)
def test_curl_shell_script_learns(repair: Any, settings: tuple[str, ...], tmp_path: Path):
    learned(repair, tmp_path, "shell_agent", 0, 10, *settings)


@pytest.mark.full
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_mini_swe_agent_learns_unchanged(repair: Any, seed: int, tmp_path: Path):
    """Run the package of the environment that MINI_SWE_AGENT names."""
    if not (Path(os.environ.get("MINI_SWE_AGENT", "")) / "bin" / "mini").exists():
        pytest.skip("MINI_SWE_AGENT names no environment with mini-swe-agent")
    settings = ("trainer.train_batch_size=2", "trainer.policy_mini_batch_size=2")
    learned(repair, tmp_path, "mini_swe_agent", seed, 10, *settings)

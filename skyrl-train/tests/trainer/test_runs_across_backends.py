"""A run goes on under another training backend: its loss curve is that of a run without interruption."""

import itertools
import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from async_runs import fork_server, train

from skyrl_train.config import SkyRLConfig, get_config_as_dict
from skyrl_train.utils.run_folder import RunFolder

pytestmark = [
    pytest.mark.slow,
    # DeepSpeed imports torch's compiler with its first engine.
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"),
]

BACKENDS = ("fsdp2", "deepspeed", "megatron")
Make = Callable[..., SkyRLConfig]
Curve = list[dict[str, float]]


@pytest.fixture(scope="module")
def under(settings: Any, tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Make `under(strategy, folder, num_steps)`: a run on one rank, with a checkpoint after each step."""
    root = tmp_path_factory.mktemp("runs")

    def make(strategy: str, folder: str, num_steps: int) -> SkyRLConfig:
        trainer = {"strategy": strategy, "ckpt_interval": 1, "max_training_steps": num_steps}
        environment = {"env_class": "own_environment:LetterEnv"}
        return settings(root / folder, {"trainer": trainer, "environment": environment})

    return make


@pytest.fixture(scope="module")
def uninterrupted(under: Make, run: Callable[[SkyRLConfig], Curve]) -> Curve:
    return run(under("fsdp2", "whole", 4))


@pytest.fixture(scope="module")
def begun(under: Make, run: Callable[[SkyRLConfig], Curve]) -> dict[str, Path]:
    """Run two steps under each backend. Returns: the run folders."""
    folders = {}
    for strategy in BACKENDS:
        cfg = under(strategy, strategy, 2)
        run(cfg)
        folders[strategy] = Path(cfg.trainer.run_dir)
    return folders


def assert_same_curve(found: Curve, expected: Curve) -> None:
    assert [row["step"] for row in found] == [row["step"] for row in expected]
    for row, wanted in zip(found, expected, strict=True):
        for name in ("policy/final_loss", "policy/grad_norm", "policy/policy_entropy", "reward/avg_raw_reward"):
            assert row[name] == pytest.approx(wanted[name], rel=1e-3, abs=1e-5), f"{name} of step {row['step']}"


@pytest.mark.parametrize(("first", "second"), [*itertools.permutations(BACKENDS, 2)])
def test_run_resumes_under_other_backend(
    first: str, second: str, begun: dict[str, Path], uninterrupted: Curve, under: Make, run: Any
):
    cfg = under(second, f"{first}, then {second}", 3)
    shutil.copytree(begun[first], cfg.trainer.run_dir)
    assert_same_curve(run(cfg), uninterrupted[:3])


@pytest.mark.process
@pytest.mark.timeout(300)
def test_killed_run_resumes_under_other_backend(uninterrupted: Curve, under: Make, run: Any, tmp_path: Path):
    cfg = under("deepspeed", "killed", 4)
    values = json.loads(json.dumps(get_config_as_dict(cfg)))
    process = fork_server().Process(target=train, args=(values, str(tmp_path / "console.log")))
    process.start()
    deadline = time.monotonic() + 240
    while not Path(cfg.trainer.ckpt_path, "global_step_2").exists():
        assert process.is_alive() and time.monotonic() < deadline, (tmp_path / "console.log").read_text()[-4000:]
        time.sleep(0.01)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    before = RunFolder(cfg.trainer.run_dir).read_metrics()
    assert len(before) < 4, "the run ended before it was killed: no proof"
    assert_same_curve(run(under("megatron", "killed", 4)), uninterrupted)

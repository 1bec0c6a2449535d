import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from loguru import logger
from omegaconf import OmegaConf

from skyrl_train.errors import ConfigError
from skyrl_train.utils.run_folder import RunFolder
from skyrl_train.utils.tracking import Tracking, format_console_line, format_markdown_table, to_plain_config

STEP = {
    "reward/avg_raw_reward": 0.43125,
    "policy/final_loss": -0.01234,
    "policy/policy_kl": 0.002,
    "policy/grad_norm": 0.5,
    "generate/avg_num_tokens": 42.0,
    "some/other": 1.0,
    "timing/generate": 3.1,
    "timing/train_critic_and_policy": 1.9,
    "timing/step": 6.25,
}


def test_console_prints_single_line_per_step():
    assert format_console_line(STEP, 12, 60) == (
        "step 12/60  reward 0.431  loss -0.0123  kl 0.0020  grad 0.50  length 42.0  6.2 s (generate 3.1, train 1.9)"
    )


def test_console_prints_unknown_metrics_unformatted():
    assert format_console_line({f"mine/{i}": i / 3 for i in range(60)}, 1).startswith(
        "step 1  mine/0 0.0000  mine/1 0.3333  "
    )
    assert len(format_console_line({f"mine/{i}": i / 3 for i in range(60)}, 1)) < 200


def test_samples_are_logged_as_text_rows():
    assert format_markdown_table([("2+2?", "4 | <b>\nfour", 1.0), ("a", "b", None)]).splitlines() == [
        "| prompt | response | reward |",
        "| ---|---|--- |",
        "| 2+2? | 4 &#124; &lt;b&gt;<br>four | 1.0 |",
        "| a | b | None |",
    ]


@pytest.fixture
def logged():
    messages: list[str] = []
    handler = logger.add(lambda message: messages.append(message.record["message"]), level="DEBUG")
    yield messages
    logger.remove(handler)


def test_metrics_are_logged_to_console_and_run_folder(tmp_path: Path, logged: list[str], monkeypatch):
    monkeypatch.delenv("LOG_LEVEL", raising=False)
    run = RunFolder(tmp_path)
    with Tracking("project", "run", "console", run_folder=run) as tracking:
        tracking.total_steps = 2
        tracking.log({"reward/avg_raw_reward": 0.25}, step=1, commit=True)
        tracking.log({"eval/all/avg_score": 0.5}, step=1)
    assert logged == ["step 1/2  reward 0.250", "step 1/2  eval 0.500"]
    assert [(row["step"], len(row)) for row in run.read_metrics()] == [(1, 3), (1, 3)]


def test_console_shows_all_metrics_at_debug_level(logged: list[str], monkeypatch):
    monkeypatch.setenv("LOG_LEVEL", "DEBUG")
    with Tracking("project", "run") as tracking:
        tracking.log(STEP, step=1)
    assert "some/other: 1.0000" in logged[1]


def test_unknown_backend_is_rejected():
    with pytest.raises(ConfigError, match=r"trainer\.logger"):
        Tracking("project", "run", ["console", "weights"])


@pytest.mark.parametrize("package", ["wandb", "tensorboard", "mlflow", "swanlab", "trackio"])
def test_uninstalled_backend_error_names_extra(package: str, monkeypatch):
    import_module = __import__("importlib").import_module

    def without_package(name: str, *arguments: Any) -> Any:
        if name == package:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return import_module(name, *arguments)

    monkeypatch.setattr("importlib.import_module", without_package)
    with pytest.raises(ConfigError, match=rf"trainer.logger={package} needs the package.*the extra `tracking`"):
        Tracking("project", "run", package)


@dataclass
class Optimizer:
    lr: float = 1e-6


@dataclass
class Config:
    optimizer: Optimizer = field(default_factory=Optimizer)
    seed: int = 1


@pytest.mark.parametrize("config", [Config(), OmegaConf.structured(Config()), {"optimizer": {"lr": 1e-6}, "seed": 1}])
def test_config_is_accepted_in_any_container(config: Any):
    assert to_plain_config(config) == {"optimizer": {"lr": 1e-6}, "seed": 1}
    assert to_plain_config(None) == {}


TWO_STEPS = """
import sys
from skyrl_train.utils.run_folder import RunFolder
from skyrl_train.utils.tracking import Tracking
tracking = Tracking("project", "first run", sys.argv[1], {"trainer": {"lr": 0.5}}, RunFolder(sys.argv[2]),
                    tags=["mine"])
first = int(sys.argv[3])
tracking.log_samples("trajectories/train", [("What is 2+2?", "4 | <b>four</b>\\nor so", 1.0)], first)
tracking.log({"reward/avg": first / 10, "pass@1": 0.5, "bad": float("nan")}, step=first, commit=True)
tracking.log({"reward/avg": (first + 1) / 10}, step=first + 1, commit=True)
tracking.finish()
tracking.finish()
"""


def track(service: str, run: Path, first_step: int = 1, **environment: str) -> subprocess.CompletedProcess[str]:
    """Two steps tracked by a process of their own: services keep threads, and state that outlives a run."""
    process = subprocess.run(
        [sys.executable, "-W", "error", "-c", TWO_STEPS, service, run, str(first_step)],
        capture_output=True,
        text=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "HOME": str(run), "OMP_NUM_THREADS": "1"} | environment,
    )
    return process


def tensorboard_scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = loader.EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


@pytest.mark.slow
def test_resumed_tensorboard_run_replaces_repeated_steps(tmp_path: Path):
    pytest.importorskip("tensorboard")
    for first_step in (1, 2):
        process = track("tensorboard", tmp_path, first_step)
        assert process.returncode == 0, process.stderr
    scalars = tensorboard_scalars(tmp_path / "trackers" / "tensorboard")
    assert scalars["reward/avg"] == [(1, pytest.approx(0.1)), (2, pytest.approx(0.2)), (3, pytest.approx(0.3))]
    assert scalars["pass@1"] == [(1, 0.5), (2, 0.5)]
    events = [path.read_bytes() for path in (tmp_path / "trackers" / "tensorboard").rglob("events*")]
    assert any(b"trajectories/train" in event and b"What is 2+2?" in event for event in events)


@pytest.mark.slow
def test_resumed_process_continues_offline_wandb_run(tmp_path: Path):
    pytest.importorskip("wandb")
    for first_step in (1, 3):
        process = track("wandb", tmp_path, first_step, WANDB_MODE="offline")
        assert process.returncode == 0, process.stderr
    run_id = (tmp_path / "trackers" / "wandb_run_id").read_text().strip()
    files = sorted((tmp_path / "trackers" / "wandb").glob(f"offline-run-*-{run_id}/run-{run_id}.wandb"))
    assert files
    assert b"reward/avg" in files[-1].read_bytes()


@pytest.mark.slow
def test_wandb_without_key_error_names_variable(tmp_path: Path):
    pytest.importorskip("wandb")
    process = track("wandb", tmp_path, WANDB_MODE="online", WANDB_API_KEY="")
    assert "ConfigError: trainer.logger=wandb cannot start" in process.stderr
    assert "WANDB_MODE=offline" in process.stderr


@pytest.mark.slow
def test_mlflow_writes_metrics_and_settings_to_files_without_server(tmp_path: Path):
    pytest.importorskip("mlflow")
    of_a_rank = {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1"}  # the tracker joins no group
    process = track("mlflow", tmp_path, MLFLOW_TRACKING_URI="", **of_a_rank)
    assert process.returncode == 0, process.stderr
    [run] = [path.parent for path in (tmp_path / "trackers" / "mlruns").glob("*/*/params")]
    lines = (run / "metrics" / "reward" / "avg").read_text().splitlines()
    assert [(float(line.split()[1]), int(line.split()[2])) for line in lines] == [(0.1, 1), (0.2, 2)]
    assert (run / "metrics" / "pass_at_1").exists()
    assert (run / "params" / "trainer" / "lr").read_text() == "0.5"


@pytest.mark.slow
def test_swanlab_offline_run_is_stored(tmp_path: Path):
    pytest.importorskip("swanlab")
    process = track("swanlab", tmp_path, SWANLAB_MODE="offline")
    assert process.returncode == 0, process.stderr
    [file] = (tmp_path / "trackers" / "swanlab").glob("run-*/run-*.swanlab")
    assert b"reward/avg" in file.read_bytes()
    assert any("What is 2+2?" in path.read_text(errors="ignore") for path in file.parent.rglob("*") if path.is_file())


@pytest.mark.slow
def test_swanlab_without_key_error_names_variable(tmp_path: Path):
    pytest.importorskip("swanlab")
    process = track("swanlab", tmp_path, SWANLAB_MODE="cloud", SWANLAB_API_KEY="")
    assert "ConfigError: trainer.logger=swanlab cannot start" in process.stderr

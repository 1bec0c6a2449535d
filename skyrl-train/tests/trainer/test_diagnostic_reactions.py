"""What a run does when its metrics show a failure (`trainer.on_diagnostic`)."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.config import SkyRLConfig, validate_cfg
from skyrl_train.errors import ConfigError, DiagnosticError
from skyrl_train.hooks import load_hooks
from skyrl_train.utils.run_folder import RunFolder

PLANT = """
from skyrl_train.hooks import TrainerHook

class Planted(TrainerHook):
    def on_log(self):
        self.run.all_metrics |= {"loss/zero_variance_share": 1.0, "reward/avg_pass_at_2": 0.5}
"""
NAME, FOUND_AT = "no-gradient", 3


@pytest.fixture
def changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Settings of a run of four steps in whose metrics all groups have equal rewards."""
    module = f"planted_{tmp_path.name}"
    (tmp_path / f"{module}.py").write_text(PLANT)
    monkeypatch.syspath_prepend(str(tmp_path))
    hooks = [f"{module}.Planted", "skyrl_inspect.diagnostics.hook.Diagnostics"]
    return {"trainer": {"hooks": hooks, "max_training_steps": 4, "epochs": 10, "ckpt_interval": 10}}


def test_warning_is_recorded_once_and_counted_in_each_step(
    changes: dict[str, Any], settings: Any, run: Any, tmp_path: Path
):
    rows = run(validate_cfg(settings(tmp_path / "run", changes)))
    assert [row.get(f"diagnostics/{NAME}") for row in rows] == [None, None, 1.0, 1.0]
    [record] = RunFolder(tmp_path / "run").read_diagnostics()
    assert (record["name"], record["step"], record["onset"]) == (NAME, FOUND_AT, 1)
    assert any(text.startswith("generator.n_samples_per_prompt=") for text in record["settings"])


def test_stop_saves_checkpoint_and_resumed_run_does_not_repeat(
    changes: dict[str, Any], settings: Any, run: Any, tmp_path: Path
):
    changes["trainer"] |= {"on_diagnostic": "stop"}
    with pytest.raises(DiagnosticError, match=NAME):
        run(validate_cfg(settings(tmp_path / "run", changes)))
    folder = RunFolder(tmp_path / "run")
    assert [row["step"] for row in folder.read_metrics()] == [1, 2, FOUND_AT]
    assert (tmp_path / "run" / "ckpts" / f"global_step_{FOUND_AT}").is_dir()
    # What is known does not stop the resumed run.
    rows = run(
        validate_cfg(settings(tmp_path / "run", changes | {"trainer": changes["trainer"] | {"resume_mode": "latest"}}))
    )
    assert [row["step"] for row in rows] == [1, 2, 3, 4] and f"diagnostics/{NAME}" in rows[-1]
    assert len(list(folder.read_diagnostics())) == 1


def test_stop_without_checkpoints_saves_none(changes: dict[str, Any], settings: Any, run: Any, tmp_path: Path):
    changes["trainer"] |= {"on_diagnostic": "stop", "ckpt_interval": 0}
    with pytest.raises(DiagnosticError):
        run(validate_cfg(settings(tmp_path / "run", changes)))
    assert not list((tmp_path / "run").glob("ckpts/global_step_*"))


def test_command_receives_diagnostic(changes: dict[str, Any], settings: Any, run: Any, tmp_path: Path):
    received = tmp_path / "received.json"
    changes["trainer"] |= {"on_diagnostic": f"cat > '{received}.part' && mv '{received}.part' '{received}'"}
    run(validate_cfg(settings(tmp_path / "run", changes)))
    deadline = time.monotonic() + 60
    while not received.exists() and time.monotonic() < deadline:  # a process of its own, after which nothing waits
        time.sleep(0.02)
    record = json.loads(received.read_text())
    assert record["run_dir"] == str(tmp_path / "run")
    assert [(each["name"], each["step"]) for each in record["diagnostics"]] == [(NAME, FOUND_AT)]


def test_failing_command_does_not_end_run(changes: dict[str, Any], settings: Any, run: Any, tmp_path: Path):
    changes["trainer"] |= {"on_diagnostic": "exit 3"}
    assert len(run(validate_cfg(settings(tmp_path / "run", changes)))) == 4


def test_empty_reaction_is_refused_before_start():
    cfg = SkyRLConfig.from_dict({"trainer": {"on_diagnostic": " "}})
    with pytest.raises(ConfigError, match=r"trainer\.on_diagnostic"):
        for hook in load_hooks(cfg):
            hook.check_settings(cfg)

"""User-defined hooks of a run (`trainer.hooks`): calls, metrics, errors."""

from pathlib import Path
from typing import Any

import pytest

from skyrl_train.config import SkyRLConfig, validate_cfg
from skyrl_train.config.config import DEFAULT_HOOKS
from skyrl_train.errors import ConfigError
from skyrl_train.hooks import TrainerHook, load_hooks

HOOK = """
from skyrl_train.errors import ConfigError
from skyrl_train.hooks import TrainerHook

CALLS = []

class Recorder(TrainerHook):
    @classmethod
    def check_settings(cls, cfg):
        if cfg.trainer.seed == 13:
            raise ConfigError("trainer.seed=13 is refused")

    def on_start(self):
        CALLS.append(("start", self.run.global_step))

    def on_resume(self):
        CALLS.append(("resume", [row["step"] for row in self.run.run_folder.read_metrics()]))

    async def on_step_end(self):
        CALLS.append(("step_end", self.run.global_step))

    def on_log(self):
        self.run.all_metrics["custom/twice"] = 2 * self.run.all_metrics["reward/avg_raw_reward"]

    def on_error(self, error):
        error.add_note(f"a note at step {self.run.global_step}")

class Failing(Recorder):
    async def on_step_end(self):
        raise ValueError("planted")

class Broken(Failing):
    def on_error(self, error):
        raise RuntimeError("a hook's own error")

class NoHook:
    pass
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Name of a module with hooks that can be imported."""
    name = f"hooks_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(HOOK)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def test_custom_hook_observes_steps_and_adds_metrics(module: str, settings: Any, run: Any, tmp_path: Path):
    changes = {"trainer": {"hooks": [f"{module}.Recorder"], "ckpt_interval": 1}}
    rows = run(validate_cfg(settings(tmp_path / "run", changes)))
    assert [row["custom/twice"] for row in rows] == [2 * row["reward/avg_raw_reward"] for row in rows]
    changes["trainer"] |= {"max_training_steps": len(rows) + 1, "epochs": 10, "resume_mode": "latest"}
    run(validate_cfg(settings(tmp_path / "run", changes)))
    calls = __import__(module).CALLS
    steps = [row["step"] for row in rows]
    expected = [("start", 0), *(("step_end", step) for step in steps)]
    assert calls == [*expected, ("start", 0), ("resume", steps), ("step_end", steps[-1] + 1)]


@pytest.mark.first_case
@pytest.mark.parametrize(("hook", "notes"), [("Failing", ["a note at step 1"]), ("Broken", [])])
def test_hook_annotates_fatal_error_without_replacing_it(
    hook: str, notes: list[str], module: str, settings: Any, run: Any, tmp_path: Path
):
    cfg = validate_cfg(settings(tmp_path / "run", {"trainer": {"hooks": [f"{module}:{hook}"]}}))
    with pytest.raises(ValueError, match="planted") as raised:
        run(cfg)
    assert getattr(raised.value, "__notes__", []) == notes


def test_hook_checks_settings_before_start(module: str, settings: Any, run: Any, tmp_path: Path):
    cfg = validate_cfg(settings(tmp_path / "run", {"trainer": {"hooks": [f"{module}:Recorder"], "seed": 13}}))
    with pytest.raises(ConfigError, match=r"trainer\.seed"):
        run(cfg)


@pytest.mark.parametrize(
    "path", ["no_such_module.Hook", "{module}.Missing", "{module}.NoHook", "{module}:NoHook", "{module}", ""]
)
def test_unusable_hook_is_refused_by_setting_name(path: str, module: str):
    cfg = SkyRLConfig.from_dict({"trainer": {"hooks": [path.format(module=module)]}})
    with pytest.raises(ConfigError, match=r"trainer\.hooks="):
        load_hooks(cfg)


def test_default_hooks_load():
    hooks = load_hooks(SkyRLConfig())
    assert len(hooks) == len(DEFAULT_HOOKS) and all(issubclass(hook, TrainerHook) for hook in hooks)

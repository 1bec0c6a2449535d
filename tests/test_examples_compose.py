"""Every `run_*.sh` under examples/ is run with an interpreter that only notes its arguments; what it would have started
is then composed by Hydra and checked as the entry point would. A misspelt or outdated setting in an example fails here.

Scripts start programs through `${PYTHON:-.venv/bin/python}`, `python` or `uv run`.
"""

import importlib.util
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir

from skyrl_agent.config.task_file import load_task_file
from skyrl_agent.errors import ConfigError as TaskFileError
from skyrl_agent.integrations.tinker.settings import read_config
from skyrl_train.algorithms.advantages import AdvantageEstimatorRegistry
from skyrl_train.algorithms.losses.contract import PolicyLossRegistry, TokenSelectorRegistry
from skyrl_train.config import (
    SkyRLConfig,
    config_dir,
    register_config_store,
    validate_cfg,
    validate_generator_cfg,
)
from skyrl_train.config.supervised import PreferenceConfig, SupervisedConfig
from skyrl_train.config.validation import validate_supervised_cfg
from skyrl_train.errors import ConfigError

REPOSITORY = Path(__file__).resolve().parents[1]
SCRIPTS = sorted(REPOSITORY.glob("examples/**/run_*.sh"))

SUPERVISED: dict[str, type[SupervisedConfig]] = {
    "skyrl_train.entrypoints.main_sft": SupervisedConfig,
    "skyrl_train.entrypoints.main_dpo": PreferenceConfig,
}
TINKER, VERL = "skyrl_agent.integrations.tinker.tinker_train", "verl.trainer.main_ppo"
EXAMPLE_ENTRY_POINTS = {path.stem: path for path in REPOSITORY.glob("examples/**/main_*.py")}

STUB = """#!/usr/bin/env bash
printf '%s\\0' "$@" > "$CAPTURED_COMMANDS/$$"
"""


@pytest.fixture(scope="module", autouse=True)
def what_examples_register_goes_with_them():
    """Other tests look at all losses and estimators there are."""
    registries: list[Any] = [PolicyLossRegistry, TokenSelectorRegistry, AdvantageEstimatorRegistry]
    before = [registry.list_available() for registry in registries]
    yield
    for registry, names in zip(registries, before, strict=True):
        for name in set(registry.list_available()) - set(names):
            registry.unregister(name)
    for name in EXAMPLE_ENTRY_POINTS:
        sys.modules.pop(name, None)


@dataclass(frozen=True)
class Command:
    """`-m module override ...` as a script would have started it."""

    module: str
    overrides: list[str]


def commands_of(script: Path, scratch: Path, *arguments: str) -> list[Command]:
    """Runs `script` and returns the modules that it would have started, in any order."""
    shims, captured = scratch / "shims", scratch / "captured"
    shims.mkdir()
    captured.mkdir()
    for name in ("python", "python3", "uv"):
        (shims / name).write_text(STUB)
        (shims / name).chmod(0o755)
    environment = {
        "HOME": str(scratch),
        "PATH": f"{shims}{os.pathsep}{os.environ['PATH']}",
        "PYTHON": str(shims / "python"),
        "CAPTURED_COMMANDS": str(captured),
        "MODEL": "tiny-model",
        "DATA_DIR": "data",
    }
    done = subprocess.run(
        ["bash", str(script), *arguments], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    argument_lists = [file.read_text().split("\0")[:-1] for file in captured.iterdir()]
    return [
        Command(module=arguments[arguments.index("-m") + 1], overrides=arguments[arguments.index("-m") + 2 :])
        for arguments in argument_lists
        if "-m" in arguments
    ]


def _import_once(path: Path) -> None:
    """Imports an example's entry point by its path, as Python does by its name where the script runs it."""
    if path.stem in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def checked_config(command: Command) -> Any:
    """The settings of a command, composed and checked as its entry point does; of verl's, the task file alone."""
    if command.module == TINKER:
        config = read_config(command.overrides)
        load_task_file(config.skyrl_agent_task_yaml)
        return config
    if command.module == VERL:
        settings = dict(override.split("=", 1) for override in command.overrides)
        return load_task_file(settings["+skyrl_agent.task_yaml"])
    own_entry_point = EXAMPLE_ENTRY_POINTS.get(command.module)
    if own_entry_point is not None:
        _import_once(own_entry_point)  # it may register losses or estimators
    supervised = SUPERVISED.get(command.module)
    register_config_store(supervised or SkyRLConfig, "base_config")
    with initialize_config_dir(config_dir, version_base=None):
        composed = compose("base_config", overrides=command.overrides)
    if supervised is not None:
        return validate_supervised_cfg(composed, supervised)
    config = validate_generator_cfg(composed) if "main_generate" in command.module else validate_cfg(composed)
    if config.generator.task is not None:
        load_task_file(config.generator.task)
    return config


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: str(script.relative_to(REPOSITORY / "examples")))
def test_the_settings_of_an_example_are_valid(script, tmp_path):
    started = [
        command
        for command in commands_of(script, tmp_path)
        if "main_" in command.module or command.module in (TINKER, VERL)
    ]
    assert started, f"{script} starts no entry point"
    for command in started:
        checked_config(command)


def test_arguments_of_a_script_override_its_settings(tmp_path):
    (command,) = commands_of(REPOSITORY / "examples/gsm8k/run_gsm8k.sh", tmp_path, "trainer.epochs=7")
    assert command.module == "skyrl_train.entrypoints.main_base"
    assert checked_config(command).trainer.epochs == 7


def test_a_misspelt_setting_in_a_script_is_found(tmp_path):
    script = tmp_path / "run_wrong.sh"
    script.write_text('"$PYTHON" -m skyrl_train.entrypoints.main_base trainer.algorithm.eps_clp_high=0.28 "$@"\n')
    (command,) = commands_of(script, tmp_path)
    with pytest.raises(ConfigError, match=r"eps_clp_high; did you mean trainer.algorithm.eps_clip_high"):
        checked_config(command)


def test_a_misspelt_key_of_a_task_file_is_found(tmp_path):
    (tmp_path / "task.yaml").write_text("task: module.Task\ngenerator: {max_iteration: 3}\n")
    script = tmp_path / "run_wrong.sh"
    script.write_text(f'"$PYTHON" -m {VERL} +skyrl_agent.task_yaml={tmp_path / "task.yaml"} "$@"\n')
    (command,) = commands_of(script, tmp_path)
    with pytest.raises(TaskFileError, match=r"did you mean generator.max_iterations"):
        checked_config(command)


def test_a_script_fails_with_the_program_that_it_cannot_start(tmp_path):
    script = tmp_path / "run_wrong.sh"
    script.write_text("no-such-program trainer.seed=1\n")
    with pytest.raises(AssertionError, match="no-such-program"):
        commands_of(script, tmp_path)

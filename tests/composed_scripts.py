"""Scripts under examples/, run with an interpreter that only notes its arguments, and the settings that these compose.

Scripts start programs through `${PYTHON:-.venv/bin/python}`, `python` or `uv run`.
"""

import importlib.util
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from skyrl_agent.config.task_file import load_task_file
from skyrl_agent.integrations.tinker.settings import read_config
from skyrl_train.config import (
    SkyRLConfig,
    compose_config,
    validate_cfg,
    validate_generator_cfg,
)
from skyrl_train.config.supervised import PreferenceConfig, SupervisedConfig
from skyrl_train.config.validation import validate_supervised_cfg
from skyrl_train.entrypoints.main_distill import DEFAULTS

REPOSITORY = Path(__file__).resolve().parents[1]

SUPERVISED: dict[str, type[SupervisedConfig]] = {
    "skyrl_train.entrypoints.main_sft": SupervisedConfig,
    "skyrl_train.entrypoints.main_dpo": PreferenceConfig,
}
DISTILLATION = "skyrl_train.entrypoints.main_distill"
TINKER = "skyrl_agent.integrations.tinker.tinker_train"
AGENT_EVALUATION = "skyrl_agent.evaluate"
EXAMPLE_ENTRY_POINTS = {path.stem: path for path in REPOSITORY.glob("examples/**/main_*.py")}

STUB = """#!/usr/bin/env bash
printf '%s\\0' "$@" > "$CAPTURED_COMMANDS/$$"
"""


@dataclass(frozen=True)
class Command:
    """`-m module override ...` as a script would have started it."""

    module: str
    overrides: list[str]


def commands_of(script: Path, scratch: Path, *arguments: str, **variables: str) -> list[Command]:
    """Runs `script`, with further variables in its environment, and returns the modules that it would have started, in
    any order."""
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
        "OUTPUT": str(scratch / "evaluations"),
        "DATA_DIR": "data",
        "PROGRAM": str(Path(__file__).parents[1] / "examples/harness/openai_agents_program.py"),
        **(variables or {"MODEL": "tiny-model"}),
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
    """Import an example's entry point by its path, as Python does by its name where the script runs it."""
    if path.stem in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def load_script(path: Path) -> ModuleType:
    """Import a script by its path, every time anew, and leave the search path as it was."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    search_path = list(sys.path)
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path[:] = search_path
    return module


def checked_config(command: Command) -> Any:
    """The settings of a command, composed and checked as its entry point does."""
    if command.module == TINKER:
        config = read_config(command.overrides)
        load_task_file(config.skyrl_agent_task_yaml)
        return config
    if command.module == AGENT_EVALUATION:
        return load_task_file(command.overrides[0])
    own_entry_point = EXAMPLE_ENTRY_POINTS.get(command.module)
    if own_entry_point is not None:
        _import_once(own_entry_point)  # it may register losses or estimators
    supervised = SUPERVISED.get(command.module)
    changes = DEFAULTS if command.module == DISTILLATION else None
    composed = compose_config(command.overrides, supervised or SkyRLConfig, changes)
    if supervised is not None:
        return validate_supervised_cfg(composed, supervised)
    config = validate_generator_cfg(composed) if "main_generate" in command.module else validate_cfg(composed)
    if config.generator.task is not None:
        load_task_file(config.generator.task)
    return config

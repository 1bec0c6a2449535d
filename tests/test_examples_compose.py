"""Every `run_*.sh` under examples/ is run with an interpreter that only notes its arguments; what it would have started
is then composed by Hydra and checked as the entry point would. A misspelt or outdated setting in an example fails here.
"""

import pytest
from composed_scripts import (
    AGENT_EVALUATION,
    REPOSITORY,
    TINKER,
    checked_config,
    commands_of,
)

from skyrl_agent.errors import ConfigError as TaskFileError
from skyrl_train.errors import ConfigError

SCRIPTS = [
    script
    for script in sorted(REPOSITORY.glob("examples/**/run_*.sh"))
    # `test_recipes.py` composes every row of a recipe's table.
    if script.parents[1].name != "recipes" or script.name == "run_evaluation.sh"
]
FOLDERS = [script.parent for script in SCRIPTS]


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(
            script,
            id=str(script.relative_to(REPOSITORY / "examples")),
            marks=[]
            if FOLDERS.index(script.parent) == number
            else [pytest.mark.full],  # the first of a folder is daily
        )
        for number, script in enumerate(SCRIPTS)
    ],
)
def test_example_settings_are_valid(script, tmp_path):
    started = [
        command
        for command in commands_of(script, tmp_path)
        if "main_" in command.module or command.module in (TINKER, AGENT_EVALUATION)
    ]
    assert started, f"{script} starts no entry point"
    for command in started:
        checked_config(command)


def test_script_arguments_override_settings(tmp_path):
    (command,) = commands_of(REPOSITORY / "examples/gsm8k/run_gsm8k.sh", tmp_path, "trainer.epochs=7")
    assert command.module == "skyrl_train.entrypoints.main_base"
    assert checked_config(command).trainer.epochs == 7


def test_misspelled_setting_in_script_is_detected(tmp_path):
    script = tmp_path / "run_wrong.sh"
    script.write_text('"$PYTHON" -m skyrl_train.entrypoints.main_base trainer.algorithm.eps_clp_high=0.28 "$@"\n')
    (command,) = commands_of(script, tmp_path)
    with pytest.raises(ConfigError, match=r"trainer\.algorithm\.eps_clip_high"):
        checked_config(command)


def test_misspelled_task_file_key_is_detected(tmp_path):
    (tmp_path / "task.yaml").write_text("task: module.Task\ngenerator: {max_iteration: 3}\n")
    script = tmp_path / "run_wrong.sh"
    script.write_text(f'"$PYTHON" -m {AGENT_EVALUATION} {tmp_path / "task.yaml"} "$@"\n')
    (command,) = commands_of(script, tmp_path)
    with pytest.raises(TaskFileError, match=r"generator\.max_iterations"):
        checked_config(command)


def test_script_fails_when_program_cannot_start(tmp_path):
    script = tmp_path / "run_wrong.sh"
    script.write_text("no-such-program trainer.seed=1\n")
    with pytest.raises(AssertionError, match="no-such-program"):
        commands_of(script, tmp_path)

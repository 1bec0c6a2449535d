"""A task file's mistakes are named before anything starts, and its keys are documented."""

from pathlib import Path

import pytest

from skyrl_agent.config.document import keys, page
from skyrl_agent.config.task_file import TaskFile, load_task_file, read_task
from skyrl_agent.errors import ConfigError

DOCUMENT = Path(__file__).parents[3] / "docs" / "agent-settings.md"


def test_docs_page_matches_generated_page():
    assert DOCUMENT.read_text() == page(), "run `python -m skyrl_agent.config.document > docs/agent-settings.md`"


def test_every_key_is_documented():
    assert [name for name, _, meaning in keys(TaskFile) if not meaning] == []


def test_minimal_task_file_gets_defaults():
    task = read_task({"task": "module.Task"})
    assert (task.generator.max_iterations, task.dispatcher.type) == (5, "async_pipeline")
    assert task.generator.val_config.num_trajectories is None


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({}, "task is missing"),
        ({"tsk": "a"}, "unknown key tsk; did you mean task?"),
        ({"task": "a", "generator": {"max_iteration": 3}}, "did you mean generator.max_iterations?"),
        ({"task": "a", "dispatcher": {"val_config": {"zzz": 2}}}, "known are max_parallel_agents, max_eval"),
        (
            {"task": "a", "generator": {"max_iterations": 0}},
            "max_iterations: input should be greater than or equal to 1",
        ),
        ({"task": "a", "generator": {"tool_format": "json"}}, "tool_format: input should be 'function_xml'"),
        ({"task": "a", "generator": {"vision_is_active": True}}, "vision_is_active"),
    ],
)
def test_unknown_key_suggests_nearest_key(content, says):
    with pytest.raises(ConfigError) as refused:
        read_task(content)
    assert says in str(refused.value)


def test_null_selects_default():
    task = read_task({"task": "a", "generator": {"backend_config": None, "val_config": None}, "tools": None})
    assert task == read_task({"task": "a"})


@pytest.mark.parametrize(("text", "says"), [("- a\n- b", "a mapping of keys; got list"), ("task: [", "not valid YAML")])
def test_file_without_mapping_is_rejected(tmp_path: Path, text: str, says: str):
    (tmp_path / "task.yaml").write_text(text)
    with pytest.raises(ConfigError, match=says):
        load_task_file(tmp_path / "task.yaml")


def test_task_file_extends_base_file_per_key(tmp_path: Path):
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "all.yaml").write_text(
        "task: module.Task\ntools: [bash]\ngenerator: {max_iterations: 3, sampling_params: {top_p: 0.9, top_k: 5}}\n"
    )
    (tmp_path / "middle.yaml").write_text("extends: base/all.yaml\ntools: [finish]\n")
    path = tmp_path / "own.yaml"
    path.write_text("extends: middle.yaml\ngenerator: {num_trajectories: 4, sampling_params: {top_k: 20}}\n")
    task = load_task_file(path)
    assert (task.task, task.tools) == ("module.Task", ["finish"])
    assert (task.generator.max_iterations, task.generator.num_trajectories) == (3, 4)
    assert task.generator.sampling_params == {"top_p": 0.9, "top_k": 20}


def test_task_file_extending_itself_is_rejected(tmp_path: Path):
    (tmp_path / "a.yaml").write_text("extends: b.yaml\n")
    (tmp_path / "b.yaml").write_text("extends: a.yaml\n")
    with pytest.raises(ConfigError, match="`extends`"):
        load_task_file(tmp_path / "a.yaml")
    (tmp_path / "c.yaml").write_text("extends: [a.yaml]\n")
    with pytest.raises(ConfigError, match=r"c\.yaml: extends"):
        load_task_file(tmp_path / "c.yaml")

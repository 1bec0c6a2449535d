"""Default names of runs: another experiment has another name, the same command the same."""

from pathlib import Path
from typing import Any

import pytest

from skyrl_train.config import SkyRLConfig
from skyrl_train.config.fingerprint import DEFINING, NOT_SAMPLED, OPERATIONAL, flatten_settings
from skyrl_train.config.supervised import PreferenceConfig, SupervisedConfig
from skyrl_train.config.typed import is_among, list_setting_names
from skyrl_train.config.validation import validate_cfg, validate_supervised_cfg
from skyrl_train.provenance import Provenance


def nested(changes: dict[str, Any]) -> dict[str, Any]:
    """`{"a.b": 1}` as `{"a": {"b": 1}}`."""
    values: dict[str, Any] = {}
    for name, value in changes.items():
        *path, last = name.split(".")
        section = values
        for part in path:
            section = section.setdefault(part, {})
        section[last] = value
    return values


def run_dir(**changes: Any) -> str:
    """The run folder of a command with these settings (`trainer__seed=1`)."""
    return validate_cfg(nested({name.replace("__", "."): value for name, value in changes.items()})).trainer.run_dir


def test_listed_settings_exist_and_appear_once():
    known = set(list_setting_names(SkyRLConfig)) | {"environment.skyrl_gym.env_configs"}
    for name in (*DEFINING, *OPERATIONAL, *NOT_SAMPLED):
        assert name.rstrip(".") in known, name
    for name in flatten_settings(SkyRLConfig()):
        assert not (is_among(name, DEFINING) and is_among(name, OPERATIONAL)), name


def test_same_settings_give_same_folder():
    assert run_dir() == run_dir()
    assert run_dir().startswith("~/skyrl-runs/skyrl/run-") and "{" not in run_dir()


@pytest.mark.parametrize(
    "name, value",
    [
        ("data__train_data", ["other.parquet"]),
        ("environment__env_class", "multiply"),
        ("environment__skyrl_gym__multiply", {"num_digits": 3}),
        ("trainer__policy__model__path", "other/model"),
        ("trainer__policy__optimizer_config__lr", 1e-3),
        ("trainer__algorithm__policy_loss_type", "gspo"),
        ("trainer__train_batch_size", 512),
        ("trainer__seed", 1),
        ("generator__n_samples_per_prompt", 7),
    ],
)
def test_default_folders_of_other_experiments_differ(name: str, value: Any):
    assert run_dir(**{name: value}) != run_dir()


@pytest.mark.parametrize(
    "name, value",
    [
        ("trainer__max_training_steps", 7),
        ("trainer__ckpt_interval", 1),
        ("trainer__logger", "tensorboard"),
        ("trainer__resume_mode", "none"),
        ("trainer__micro_train_batch_size_per_gpu", 2),
        ("generator__gpu_memory_utilization", 0.5),
    ],
)
def test_default_folder_ignores_operational_settings(name: str, value: Any):
    assert run_dir(**{name: value}) == run_dir()


def test_data_folder_distinguishes_experiments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folders = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "data.jsonl").write_text("{}")
        monkeypatch.chdir(tmp_path / name)
        folders.append(run_dir(data__train_data=["data.jsonl"]))
    assert folders[0] != folders[1]
    assert folders[1] == run_dir(data__train_data=[str(tmp_path / "b" / "data.jsonl")])


def test_placeholder_is_replaced_in_custom_names():
    config = validate_cfg(nested({"trainer.run_name": "sweep-{fingerprint}", "trainer.export_path": "x/{fingerprint}"}))
    fingerprint = run_dir().rpartition("run-")[2]  # names do not count
    assert config.trainer.run_name == f"sweep-{fingerprint}"
    assert config.trainer.ckpt_path == f"~/skyrl-runs/skyrl/sweep-{fingerprint}/ckpts"
    assert config.trainer.export_path == f"x/{fingerprint}"
    assert run_dir(trainer__run_name="mine") == "~/skyrl-runs/skyrl/mine"


def test_fingerprint_is_stable_under_repeated_validation():
    once = validate_cfg({})
    assert validate_cfg(once).trainer.run_dir == once.trainer.run_dir


def test_default_folders_of_supervised_runs_differ_by_data_and_kind():
    def folder(kind: type[SupervisedConfig], source: str) -> str:
        return validate_supervised_cfg({"data": {"train_data": [source]}}, kind).trainer.run_dir

    folders = [folder(SupervisedConfig, "a.jsonl"), folder(SupervisedConfig, "b.jsonl"), run_dir()]
    folders.append(folder(PreferenceConfig, "a.jsonl"))
    assert len(set(folders)) == 4


@pytest.mark.parametrize(
    "name, value, is_sampled",
    [
        ("generator__sampling_params__temperature", 0.3, True),
        ("generator__sampling_params__stop", ["x"], True),
        ("generator__sampling_params__max_generate_length", 7, True),
        ("generator__chat_template_kwargs", {"enable_thinking": False}, True),
        ("generator__zero_reward_on_non_stop", True, True),
        ("generator__max_turns", 3, True),
        ("generator__engine_init_kwargs", {"seed": 2}, True),
        ("environment__skyrl_gym__multiply", {"num_digits": 3}, True),
        ("trainer__policy__routing_replay", "R3", True),
        ("trainer__seed", 1, True),
        ("trainer__policy__optimizer_config__lr", 1e-3, False),
        ("trainer__algorithm__eps_clip_low", 0.1, False),
        ("trainer__fully_async__max_staleness_steps", 1, False),
        ("trainer__max_training_steps", 9, False),
        ("data__train_data", ["moved.parquet"], False),
    ],
)
def test_journal_key_depends_on_sample_settings(name: str, value: Any, is_sampled: bool):
    before = Provenance.of(SkyRLConfig(), None).sampled()
    after = Provenance.of(SkyRLConfig.from_dict(nested({name.replace("__", "."): value})), None).sampled()
    assert (before != after) == is_sampled

"""A checkpoint knows the settings and data that it comes from, and another experiment does not take it over."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from skyrl_train.checkpoints import CheckpointStore
from skyrl_train.config import SkyRLConfig
from skyrl_train.entrypoints.main_base import BasePPOExp
from skyrl_train.entrypoints.main_generate import EvalOnlyEntrypoint
from skyrl_train.errors import CheckpointError, ConfigError
from skyrl_train.orchestration.batch_calls import UpdateResult
from skyrl_train.provenance import Provenance, changes_between, describe_data
from skyrl_train.training_batch import TrainingInputBatch
from skyrl_train.training_run import check_resumption, num_training_steps

Changes = dict[str, Any]
Make = Callable[[Path, Changes], SkyRLConfig]


@pytest.fixture
def checkpointed(settings: Make, tmp_path: Path) -> Path:
    """A run folder with a checkpoint of step 1 of 2, without weights: what is compared is there."""
    write_checkpoint(BasePPOExp(settings(tmp_path, {})), step=1)
    return tmp_path


def write_checkpoint(experiment: BasePPOExp, step: int) -> None:
    with CheckpointStore(experiment.cfg.trainer.ckpt_path).writing(step) as draft:
        Provenance.of(experiment.cfg, experiment.train_dataset).write(draft.folder)


def other_prompts(folder: Path, word: str = "sing") -> str:
    path = folder / "other.jsonl"
    rows = [{"prompt": [{"role": "user", "content": f"{word} {i}"}], "data_source": "toy"} for i in range(16)]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


@pytest.mark.parametrize(
    "changes, line",
    [
        ({"environment": {"env_class": "up_to_three_turns"}}, "environment.env_class: different_characters -> up_"),
        ({"trainer": {"seed": 7}}, "trainer.seed: 42 -> 7"),
        ({"trainer": {"train_batch_size": 2}}, "trainer.train_batch_size: 4 -> 2"),
        (
            {"trainer": {"algorithm": {"policy_loss_type": "gspo"}}},
            "trainer.algorithm.policy_loss_type: regular -> gspo",
        ),
        ({"trainer": {"policy": {"model": {"lora": {"rank": 4}}}}}, "trainer.policy.model.lora.rank: 0 -> 4"),
        ({"generator": {"n_samples_per_prompt": 2}}, "generator.n_samples_per_prompt: 4 -> 2"),
    ],
)
def test_resume_of_other_experiment_is_refused_before_start(
    settings: Make, checkpointed: Path, changes: Changes, line: str
):
    with pytest.raises(ConfigError) as error:
        BasePPOExp(settings(checkpointed, changes))
    text = str(error.value)
    assert f"{checkpointed / 'ckpts' / 'global_step_1'} is a checkpoint of another experiment:" in text
    assert f"\n  {line}" in text
    for way_out in ("trainer.run_name", "trainer.resume_mode=none", "trainer.resume_allow_changes=true"):
        assert way_out in text


def test_changed_data_is_detected_by_content_not_name(settings: Make, prompts: str, checkpointed: Path):
    copy = checkpointed / "copy.jsonl"
    copy.write_text(Path(prompts).read_text())
    BasePPOExp(settings(checkpointed, {"data": {"train_data": [str(copy)]}}))
    with pytest.raises(ConfigError, match=r"\n  training data: 16 rows \(\w+\) -> 16 rows \(\w+\)\n") as error:
        BasePPOExp(settings(checkpointed, {"data": {"train_data": [other_prompts(checkpointed)]}}))
    assert "additional differences (allowed):\n  data.train_data:" in str(error.value)


def test_adjustable_settings_may_change_and_are_listed(settings: Make, checkpointed: Path):
    changes = {"trainer": {"policy": {"optimizer_config": {"lr": 5e-4}}, "max_training_steps": 3}}
    experiment = BasePPOExp(settings(checkpointed, changes))
    found = resume(experiment)
    assert [str(change) for change in found] == [
        "trainer.policy.optimizer_config.lr: 0.001 -> 0.0005",
        "trainer.max_training_steps: 2 -> 3",
    ]


def resume(experiment: BasePPOExp) -> list[Any]:
    cfg = experiment.cfg
    store = CheckpointStore(cfg.trainer.ckpt_path)
    return check_resumption(cfg.trainer, store, Provenance.of(cfg, experiment.train_dataset))


def test_resume_allow_changes_accepts_other_experiment(settings: Make, checkpointed: Path):
    changes = {"trainer": {"seed": 7, "resume_allow_changes": True}}
    names = [change.name for change in resume(BasePPOExp(settings(checkpointed, changes)))]
    assert names == ["trainer.seed", "generator.seed"]


def test_fresh_start_skips_comparison(settings: Make, checkpointed: Path):
    BasePPOExp(settings(checkpointed, {"trainer": {"seed": 7, "resume_mode": "none"}}))


def test_evaluation_in_run_folder_skips_comparison(settings: Make, prompts: str, checkpointed: Path):
    changes = {"trainer": {"seed": 7}, "data": {"val_data": [prompts]}}
    assert not EvalOnlyEntrypoint(settings(checkpointed, changes)).is_finished()


def test_checkpoint_of_earlier_release_resumes_with_warning(settings: Make, tmp_path: Path, log: list[str]):
    with CheckpointStore(tmp_path / "ckpts").writing(1) as draft:
        (draft.folder / "trainer_state.json").write_text("{}")
    BasePPOExp(settings(tmp_path, {"trainer": {"seed": 7}}))
    assert any("does not record its settings and data" in line for line in log)


def test_damaged_provenance_file_is_named(checkpointed: Path, settings: Make):
    path = checkpointed / "ckpts" / "global_step_1" / "provenance.json"
    path.write_text("{")
    with pytest.raises(CheckpointError, match=r"provenance\.json"):
        BasePPOExp(settings(checkpointed, {}))


def test_finished_run_logs_reason_and_remedies(settings: Make, tmp_path: Path, log: list[str]):
    write_checkpoint(BasePPOExp(settings(tmp_path, {})), step=2)
    assert not BasePPOExp(settings(tmp_path, {"trainer": {"max_training_steps": 3}})).is_finished()
    assert not BasePPOExp(settings(tmp_path, {"trainer": {"resume_mode": "none"}})).is_finished()
    assert BasePPOExp(settings(tmp_path, {})).is_finished()
    [said] = [line for line in log if line.startswith("this run is finished")]
    for words in (
        "global_step_2 is the checkpoint of step 2",
        "end after step 2",
        "trainer.max_training_steps",
        "resume_mode=none",
    ):
        assert words in said


def test_setting_unknown_to_either_release_is_not_compared():
    before, after = Provenance({"a": 1, "b": 2, "gone": 3}, "data"), Provenance({"a": 1, "b": 4, "new": 5}, "data")
    assert [str(change) for change in changes_between(before, after)] == ["b: 2 -> 4"]


class Rows(list[Any]):
    def collate_fn(self, items: list[Any]) -> Any:
        return items


def test_data_digest_depends_on_content_and_order():
    class Thing:
        """Object without a repr of its own: the default one contains an address."""

    rows = [{"text": "a", "bytes": b"\xff", "set": {"x", "y"}, "thing": Thing()}, {"text": "b \udc80"}]
    again = [{"text": "a", "bytes": b"\xff", "set": {"y", "x"}, "thing": Thing()}, {"text": "b \udc80"}]
    assert describe_data(Rows(rows)) == describe_data(Rows(again))
    assert describe_data(Rows(rows)) != describe_data(Rows(rows[::-1]))
    assert describe_data(Rows(rows)) != describe_data(Rows([rows[0], {"text": "c"}]))


@pytest.mark.parametrize(
    "num_rows, epochs, most, expected", [(16, 1, None, 4), (19, 2, None, 8), (16, 2, 5, 5), (16, 1, 9, 4)]
)
def test_number_of_training_steps_is_computed_from_data_and_settings(
    settings: Make, tmp_path: Path, num_rows, epochs, most, expected
):
    trainer = settings(tmp_path, {"trainer": {"epochs": epochs, "max_training_steps": most}}).trainer
    assert num_training_steps(trainer, num_rows) == expected


def test_checkpoint_state_has_skipped_update_counts(settings: Make, tmp_path: Path):
    """Otherwise a resumed run whose last update is skipped would end as one that never updated."""
    experiment = BasePPOExp(settings(tmp_path, {}))

    def trainer() -> Any:
        with_nothing = dict.fromkeys(("tracker", "inference_engine_client", "generator", "colocate_pg"))
        given = {"tokenizer": experiment.tokenizer, "train_dataset": experiment.train_dataset, "eval_dataset": None}
        return experiment.get_trainer(cfg=experiment.cfg, **given, **with_nothing)

    first, resumed = trainer(), trainer()
    steps = [{"skipped_updates": 0.0}, {"skipped_updates": 1.0}]
    batch = TrainingInputBatch(loss_mask=torch.ones(1, 1))
    first._skipped["policy"].count(UpdateResult([], steps, None), batch, is_last_step=False)
    resumed.load_state(json.loads(json.dumps(first.state())))
    found = resumed._skipped["policy"].count(UpdateResult([], steps[1:], None), batch, is_last_step=True)
    assert found == {"policy/consecutive_skipped_updates": 2.0}


def test_environment_setting_overridden_by_rows_warns(settings: Make, tmp_path: Path, log: list[str]):
    path = tmp_path / "rows.jsonl"
    row = {"prompt": [{"role": "user", "content": "sing"}], "env_class": "different_characters"}
    path.write_text("\n".join([json.dumps(row)] * 4))
    data = {"data": {"train_data": [str(path)]}}
    BasePPOExp(settings(tmp_path, data))
    assert not [line for line in log if "environment.env_class" in line]
    BasePPOExp(settings(tmp_path, data | {"environment": {"env_class": "up_to_three_turns"}}))
    [line] = [line for line in log if "environment.env_class=up_to_three_turns" in line]
    assert "different_characters" in line

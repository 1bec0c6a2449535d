"""`tx train`: options as the trainer's settings."""

import dataclasses

import pytest

from tx.errors import ConfigError
from tx.run.train import TrainOptions, build_trainer_settings

OPTIONS = TrainOptions(model="tiny", dataset="data.jsonl", output_dir="out", batch_size=4)


def test_train_options_become_trainer_settings(tmp_path):
    from skyrl_train.config.supervised import SupervisedConfig
    from skyrl_train.config.validation import validate_supervised_cfg

    options = dataclasses.replace(
        OPTIONS,
        output_dir=str(tmp_path),
        max_steps=7,
        save_steps=3,
        optimizer_args='{"learning_rate": 0.01, "b2": 0.95}',
        tracker_args='{"name": "first"}',
    )
    settings = validate_supervised_cfg(build_trainer_settings(options), SupervisedConfig)
    trainer = settings.trainer
    assert settings.data.train_data == ["data.jsonl"]
    assert trainer.policy.model.path == "tiny"
    assert trainer.policy.optimizer_config.lr == 0.01
    assert trainer.policy.optimizer_config.adam_betas == [0.9, 0.95]
    assert (trainer.train_batch_size, trainer.max_training_steps, trainer.ckpt_interval) == (4, 7, 3)
    assert trainer.run_name == "first"
    assert trainer.export_path.startswith(str(tmp_path))


def test_hub_dataset_name_has_split():
    settings = build_trainer_settings(dataclasses.replace(OPTIONS, dataset="org/name", split="test"))
    assert settings["data"]["train_data"] == ["org/name:test"]


def test_train_resumes_from_checkpoint():
    settings = build_trainer_settings(dataclasses.replace(OPTIONS, load_checkpoint_path="out/ckpts/global_step_3"))
    assert settings["trainer"]["resume_mode"] == "from_path"


@pytest.mark.parametrize(
    "change, says",
    [
        ({"loader": "tx.loaders.text"}, "--loader"),
        ({"optimizer": "sgd"}, "--optimizer"),
        ({"optimizer_args": '{"lr": 1}'}, "weight_decay"),
        ({"optimizer_args": "{"}, "--optimizer-args"),
        ({"tracker_args": "[]"}, "--tracker-args"),
        ({"tp_size": 2}, "--tp-size"),
        ({"batch_size": 0}, "--batch-size"),
        ({"max_steps": 0}, "--max-steps"),
    ],
)
def test_unsupported_train_options_are_refused(change, says):
    with pytest.raises(ConfigError, match=says):
        build_trainer_settings(dataclasses.replace(OPTIONS, **change))

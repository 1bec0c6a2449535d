"""Settings of supervised training: what it does not read may not be changed, and what is wrong is named."""

import pytest

from skyrl_train.config.supervised import PreferenceConfig, SupervisedConfig
from skyrl_train.config.validation import validate_supervised_cfg
from skyrl_train.errors import ConfigError


def settings(trainer: dict, **data: object) -> dict:
    return {"data": {"train_data": ["rows.jsonl"], **data}, "trainer": {"placement": {"device": "cpu"}, **trainer}}


def test_default_settings_are_valid():
    config = validate_supervised_cfg(settings({}), SupervisedConfig).to_training_config()
    assert config.trainer.algorithm.policy_loss_type == "cross_entropy"
    assert not config.trainer.algorithm.uses_reference_model
    pairs = validate_supervised_cfg(settings({}), PreferenceConfig).to_training_config()
    assert pairs.trainer.algorithm.uses_reference_model
    assert pairs.trainer.ref.model.path == pairs.trainer.policy.model.path


@pytest.mark.parametrize(
    "config_type, trainer, message",
    [
        (
            SupervisedConfig,
            {"policy_mini_batch_size": 8},
            "policy_mini_batch_size=8",
        ),
        (SupervisedConfig, {"micro_forward_batch_size_per_gpu": 8}, "micro_forward_batch_size_per_gpu=8"),
        (SupervisedConfig, {"algorithm": {"max_seq_len": 0}}, "max_seq_len"),
        (SupervisedConfig, {"disable_fast_tokenizer": True}, "disable_fast_tokenizer=True"),
        (PreferenceConfig, {"algorithm": {"max_seq_len": 9}}, "max_seq_len=9"),
        (SupervisedConfig, {"algorithm": {"eps_clip_low": 0.1}}, "eps_clip_low=0.1"),
        (SupervisedConfig, {"algorithm": {"dpo": {"beta": 0.5}}}, "dpo.beta=0.5"),
        (PreferenceConfig, {"algorithm": {"loss_reduction": "token_mean"}}, "loss_reduction"),
        (SupervisedConfig, {"algorithm": {"eps_clp": 1}}, "trainer.algorithm.eps_clp"),
        (SupervisedConfig, {"train_batch_size": 0}, "trainer.train_batch_size"),
        (SupervisedConfig, {"max_tokens_per_microbatch": 9, "use_sample_packing": False}, "use_sample_packing"),
        (PreferenceConfig, {"policy": {"model": {"lora": {"rank": 4, "dropout": 0.1}}}}, "dropout"),
        (SupervisedConfig, {"policy": {"routing_replay": "R2"}}, "routing_replay"),
        (SupervisedConfig, {"policy": {"sampling_mask_replay": True}}, "sampling_mask_replay=True"),
    ],
)
def test_meaningless_setting_is_rejected(config_type, trainer, message):
    with pytest.raises(ConfigError, match=message):
        validate_supervised_cfg(settings(trainer), config_type)


def test_constant_divisor_is_longest_example():
    config = validate_supervised_cfg(settings({}, max_length=77), SupervisedConfig)
    assert config.to_training_config().trainer.algorithm.max_seq_len == 77
    config = validate_supervised_cfg(settings({"algorithm": {"max_seq_len": 9}}, max_length=77), SupervisedConfig)
    assert config.to_training_config().trainer.algorithm.max_seq_len == 9


def test_adapter_dropout_is_allowed_without_policy_comparison():
    trainer = {"policy": {"model": {"lora": {"rank": 4, "dropout": 0.1}}}}
    validate_supervised_cfg(settings(trainer), SupervisedConfig)


def test_empty_data_is_rejected():
    with pytest.raises(ConfigError, match=r"data\.train_data"):
        validate_supervised_cfg(settings({}, train_data=[]), SupervisedConfig)

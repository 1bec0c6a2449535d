"""Settings of the Megatron backend that cannot work are refused before a process starts, with what would."""

from types import SimpleNamespace
from typing import Any

import pytest

from skyrl_train.config import SkyRLConfig
from skyrl_train.config.validation import validate_cfg
from skyrl_train.errors import ConfigError
from skyrl_train.training_backends.megatron.layout import ParallelSizes
from skyrl_train.training_backends.megatron.settings import check_model_config


def policy(workers: int = 1, **megatron: Any) -> SkyRLConfig:
    trainer = {
        "strategy": "megatron",
        "policy": {"megatron_config": megatron},
        "placement": {"policy_num_gpus_per_node": workers, "colocate_all": False},
        "algorithm": {"use_kl_loss": False},
    }
    return SkyRLConfig.from_dict({"trainer": trainer, "generator": {"backend": "native"}})


@pytest.mark.parametrize(
    ("config", "error"),
    [
        (
            policy(6, tensor_model_parallel_size=4),
            "tensor_model_parallel_size",
        ),
        (
            policy(8, pipeline_model_parallel_size=2, expert_model_parallel_size=3, expert_tensor_parallel_size=1),
            "expert_model_parallel_size=2",
        ),
        (policy(2, context_parallel_size=2), "context_parallel_size=2"),
        (policy(tensor_model_parallel_size=0), "tensor_model_parallel_size=0"),
        (policy(ddp_config={"overlap_grad_reduce": True}), r"ddp_config\.overlap_grad_reduce=true"),
        (
            policy(transformer_config_kwargs={"recompute_granularty": "full"}),
            "recompute_granularity",
        ),
        (
            policy(transformer_config_kwargs={"num_layers": 3}),
            "num_layers=3",
        ),
        (policy(transformer_config_kwargs={"hidden_dropout": 0.1}), r"hidden_dropout=0\.1"),
        (
            policy(transformer_config_kwargs={"moe_enable_routing_replay": True}),
            r"trainer\.policy\.routing_replay",
        ),
    ],
)
def test_invalid_settings_are_rejected(config: SkyRLConfig, error: str):
    with pytest.raises(ConfigError, match=error):
        validate_cfg(config)


def test_padded_rows_are_rejected():
    config = policy()
    config.trainer.use_sample_packing = False
    with pytest.raises(ConfigError, match="only for packed rows"):
        validate_cfg(config)


QWEN3 = dict(model_type="qwen3", num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8)
MODEL = SimpleNamespace(**QWEN3, intermediate_size=3072)
MIXTURE = SimpleNamespace(**{**QWEN3, "model_type": "qwen3_moe"}, intermediate_size=0, num_experts=128)


@pytest.mark.parametrize(
    ("model", "megatron", "error"),
    [
        (MODEL, {"tensor_model_parallel_size": 16}, "=16 must divide the model's 8 key-value heads; use 8$"),
        (MODEL, {"tensor_model_parallel_size": 3}, "=3 must divide the model's 16 attention heads; use 2 or 4$"),
        (MODEL, {"pipeline_model_parallel_size": 8}, "=8 must divide the model's 28 layers; use 7 or 14$"),
        (MODEL, {"expert_model_parallel_size": 2}, "expert_model_parallel_size=2"),
        (MIXTURE, {"expert_model_parallel_size": 6}, "=6 must divide the model's 128 experts; use 4 or 8$"),
        (
            MIXTURE,
            {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
            "expert_tensor_parallel_size=1",
        ),
        (SimpleNamespace(model_type="gemma3"), {}, "model_type"),
        (
            SimpleNamespace(model_type="llama", attention_bias=True),
            {},
            "trainer.strategy=fsdp2",
        ),
    ],
)
def test_indivisible_model_error_suggests_nearest_sizes(model: Any, megatron: dict[str, int], error: str):
    with pytest.raises(ConfigError, match=error):
        check_model_config(model, policy(64, **megatron).trainer.policy, "trainer.policy")


@pytest.mark.parametrize(
    ("model", "recompute", "error"),
    [
        (MODEL, {}, "routing_replay=R2"),
        (
            MIXTURE,
            {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "moe"]},
            "recompute_modules",
        ),
    ],
)
def test_routing_replay_requires_supported_router(model: Any, recompute: Any, error: str):
    settings = policy(transformer_config_kwargs=recompute).trainer.policy
    check_model_config(model, settings, "trainer.policy")
    settings.routing_replay = "R2"
    with pytest.raises(ConfigError, match=error):
        check_model_config(model, settings, "trainer.policy")


def test_uneven_stages_require_first_or_last_stage_setting():
    settings = {"pipeline_model_parallel_size": 8, "transformer_config_kwargs": {}}
    settings["transformer_config_kwargs"] = {"num_layers_in_last_pipeline_stage": 7}
    check_model_config(MODEL, policy(8, **settings).trainer.policy, "trainer.policy")


def test_replica_ranks_are_consecutive_and_megatron_stages_outermost():
    layout = ParallelSizes(tensor=2, pipeline=2)
    # Workers 0 1 | 2 3 are the two stages of the first replica, 4 5 | 6 7 of the second.
    assert [layout.get_group_rank(rank, 8) for rank in range(8)] == [0, 1, 4, 5, 2, 3, 6, 7]
    assert layout.ranks_per_replica == 4


def test_user_entries_are_merged_over_defaults_per_key():
    config = policy(transformer_config_kwargs={"recompute_num_layers": 4})
    merged = config.trainer.policy.megatron_config.transformer_config_kwargs
    assert merged["recompute_num_layers"] == 4 and merged["recompute_granularity"] == "full"

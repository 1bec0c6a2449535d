"""Settings of the DeepSpeed backend: two groups that models share, own keys that win, refusals before a start."""

from importlib.util import find_spec
from typing import Any

import pytest

from skyrl_train.config import SkyRLConfig, validate_cfg
from skyrl_train.config.rules.deepspeed import check_deepspeed
from skyrl_train.errors import ConfigError
from skyrl_train.training_backends.deepspeed.engine_settings import build_model_settings


def config(shared: Any = None, bf16: bool = True, **models: Any) -> SkyRLConfig:
    values: dict[str, Any] = {"trainer": {"strategy": "deepspeed", "bf16": bf16, **models}}
    return SkyRLConfig.from_dict(values | {"deepspeed_config": shared or {}})


def own(**zero: Any) -> dict[str, Any]:
    return {"deepspeed_config": {"zero_optimization": zero}}


def test_model_key_overrides_shared_group():
    cfg = config({"train": {"zero_optimization": {"stage": 2, "sub_group_size": 1e4}}}, critic=own(stage=1))
    policy, critic = cfg.trainer.policy.deepspeed_config, cfg.trainer.critic.deepspeed_config
    assert (policy.zero_optimization.stage, critic.zero_optimization.stage) == (2, 1)
    assert policy.zero_optimization.sub_group_size == critic.zero_optimization.sub_group_size == 1e4
    assert cfg.trainer.ref.deepspeed_config.zero_optimization.stage == 3
    assert cfg.trainer.ref.deepspeed_config.zero_optimization.offload_param.device == "cpu"


def test_json_uses_integers_and_keeps_auto():
    zero = build_model_settings(config({"train": {"zero_optimization": {"sub_group_size": 1e4}}}), "policy")
    assert zero["zero_optimization"]["sub_group_size"] == 10_000
    assert isinstance(zero["zero_optimization"]["sub_group_size"], int)
    assert "reduce_bucket_size" not in zero["zero_optimization"]
    assert "disable_trace_cache" not in zero


@pytest.mark.parametrize(
    ("bf16", "autocast", "sections"),
    [(False, True, set()), (True, True, {"torch_autocast"}), (True, False, {"bf16", "data_types"})],
)
def test_precision(bf16: bool, autocast: bool, sections: set[str]):
    made = build_model_settings(config({"train": {"torch_autocast": {"enabled": autocast}}}, bf16=bf16), "policy")
    assert set(made) & {"torch_autocast", "bf16", "data_types"} == sections


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"policy": own(stage=4)}, r"stage must be 0, 1, 2 or 3; got 4"),
        ({"policy": own(stage=2, offload_param={"device": "cpu"})}, "offload_param.device=cpu"),
        ({"policy": own(stage=0, offload_optimizer={"device": "cpu"})}, "offload_optimizer.device=cpu"),
        ({"policy": own(zero_quantized_weights=True)}, "zero_quantized_weights=true"),
        ({"policy": own(reduce_bucket_size=0)}, "reduce_bucket_size"),
        ({"policy": own(sub_group_size=1.5)}, "sub_group_size"),
        ({"ref": own(stage=2)}, r"trainer\.ref\.deepspeed_config\.zero_optimization\.stage=2"),
        (
            {"policy": {"deepspeed_config": {"gradient_clipping": 0.5}}},
            r"trainer\.policy\.optimizer_config\.max_grad_norm=1\.0",
        ),
        (
            {"policy": {"deepspeed_config": own(stage=0)["deepspeed_config"] | {"torch_autocast": {"enabled": False}}}},
            "stage 0 keeps no float32 master weights",
        ),
    ],
)
def test_contradiction_is_rejected(settings: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        check_deepspeed(config(**settings))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"deepspeed_config": {"train": {"compile": {"deepcompile": True}}}},
            r"deepspeed_config\.train\.compile\..*DeepCompile",
        ),
        (
            {"trainer": {"policy": {"deepspeed_config": {"tensor_parallel": {"autotp_size": 2}}}}},
            "tensor_parallel.*AutoTP",
        ),
        ({"deepspeed_config": {"eval": {"zero_optimization": {"overlap_comm": True}}}}, "overlap_comm=true"),
        ({"deepspeed_config": {"train": {"zero_optimization": {"stag": 1}}}}, "stage"),
    ],
)
def test_unsupported_setting_is_rejected_by_name(settings: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        SkyRLConfig.from_dict(settings)


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="the extra `deepspeed` is not installed")
@pytest.mark.parametrize(
    ("trainer", "shared", "message"),
    [
        ({"strategy": "fsdp2"}, {"train": {"zero_optimization": {"stage": 1}}}, "stage=1"),
        (
            {"strategy": "deepspeed", "policy": {"fsdp_config": {"cpu_offload": True}}},
            {},
            "cpu_offload=True",
        ),
    ],
)
def test_setting_of_other_strategy_is_rejected(trainer: dict[str, Any], shared: Any, message: str):
    trainer = {"placement": {"device": "cpu"}, "algorithm": {"use_kl_loss": False}, **trainer}
    with pytest.raises(ConfigError, match=message):
        validate_cfg(SkyRLConfig.from_dict({"trainer": trainer, "deepspeed_config": shared}))

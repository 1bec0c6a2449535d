"""Outside text becomes typed settings, or an error that helps."""

import re
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from skyrl_train.config import (
    AlgorithmConfig,
    GeneratorConfig,
    PolicyConfig,
    SamplingParams,
    SkyRLConfig,
    TrainedModelConfig,
    TrainerConfig,
    compose_config,
    get_config_as_dict,
    get_config_as_yaml_str,
    get_default_config,
)
from skyrl_train.config.asynchronous import FullyAsyncConfig
from skyrl_train.config.other_releases import OTHER_RELEASES, Refusal
from skyrl_train.config.rules.deepspeed import check_deepspeed
from skyrl_train.config.typed import find_nearest_name, list_setting_names
from skyrl_train.errors import ConfigError


def setting(name: str, value: object) -> dict[str, Any]:
    """`a.b=1` as nested dicts."""
    first, _, rest = name.partition(".")
    return {first: setting(rest, value) if rest else value}


def test_interpolated_default_follows_other_setting():
    config = SkyRLConfig(
        trainer=TrainerConfig(
            seed=7,
            max_prompt_length=100,
            run_dir="/runs/${trainer.run_name}",
            run_name="first",
            policy=PolicyConfig(model=TrainedModelConfig(path="/models/tiny")),
        ),
        generator=GeneratorConfig(sampling_params=SamplingParams(max_generate_length=20)),
    )
    assert config.generator.seed == 7
    assert config.generator.max_input_length == 100
    assert config.generator.model_name == config.trainer.ref.model.path == "/models/tiny"
    assert config.generator.eval_sampling_params.max_generate_length == 20
    assert config.trainer.ckpt_path == "/runs/first/ckpts"
    assert config.trainer.algorithm.max_seq_len == 120


def test_python_dict_and_omegaconf_give_same_settings():
    values = {"trainer": {"seed": 3, "policy": {"model": {"path": "x"}}}, "environment": {"skyrl_gym": {"a": {"b": 1}}}}
    from_python = SkyRLConfig.from_dict(values)
    changed_defaults = get_default_config()
    changed_defaults.merge_with(values)
    from_omegaconf = SkyRLConfig.from_dict_config(changed_defaults)
    assert from_python == from_omegaconf
    assert from_python.generator.seed == 3
    assert from_python.environment.skyrl_gym.get_env_config("a") == {"b": 1}
    assert from_python.environment.skyrl_gym.get_env_config("c") == {}


def test_settings_round_trip_through_dict_and_yaml():
    config = SkyRLConfig.from_dict(
        {
            "trainer": {"logger": ["console", "wandb"], "resume_mode": None},
            "environment": {"skyrl_gym": {"a": {"b": 1}}},
        }
    )
    assert config.trainer.resume_mode == "none"
    assert SkyRLConfig.from_dict(get_config_as_dict(config)) == config
    from_yaml = OmegaConf.create(get_config_as_yaml_str(config))
    assert isinstance(from_yaml, DictConfig) and SkyRLConfig.from_dict(from_yaml) == config
    assert get_config_as_dict(config)["environment"]["skyrl_gym"]["a"] == {"b": 1}


def test_parsing_does_not_modify_input():
    values = {"generator": {"engine_init_kwargs": {"a": 1}}}
    SkyRLConfig.from_dict(values).generator.engine_init_kwargs["a"] = 2
    assert values == {"generator": {"engine_init_kwargs": {"a": 1}}}


@pytest.mark.parametrize(
    "name, value, expected",
    [
        ("trainer.policy.optimizer_config.lr", 1, 1.0),  # an int is a float
        ("trainer.policy.optimizer_config.adam_betas", (0, 0.9), [0.0, 0.9]),
        ("trainer.policy.fsdp_config.reshard_after_forward", 2, 2),
        ("trainer.policy.fsdp_config.reshard_after_forward", False, False),
        ("trainer.logger", "tensorboard", "tensorboard"),
        ("trainer.max_training_steps", None, None),
        ("generator.chat_template_kwargs", {"enable_thinking": False}, {"enable_thinking": False}),
    ],
)
def test_valid_value_is_accepted(name, value, expected):
    read = SkyRLConfig.from_dict(setting(name, value))
    for part in name.split("."):
        read = getattr(read, part)
    assert read == expected and type(read) is type(expected)


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("trainer.seed", "1", "trainer.seed must be an int; got '1' (a string; write it without quotes)"),
        ("trainer.seed", True, "trainer.seed must be an int; got True"),
        ("trainer.seed", 1.0, "trainer.seed must be an int; got 1.0"),
        ("trainer.bf16", 1, "trainer.bf16 must be true or false; got 1"),
        ("trainer.policy.optimizer_config.lr", True, "trainer.policy.optimizer_config.lr must be a number; got True"),
        ("trainer.run_name", 5, "trainer.run_name must be text; got 5"),
        ("trainer.policy.model.path", None, "trainer.policy.model.path must be text; got None"),
        ("data.train_data", "a.parquet", "data.train_data must be a list of text; got 'a.parquet'"),
        ("data.train_data", [1], "data.train_data[0] must be text; got 1"),
        ("trainer.algorithm", 3, "trainer.algorithm must be a section of settings; got 3"),
        ("generator.sampling_params.logprobs", 0.5, "generator.sampling_params.logprobs must be an int; got 0.5"),
        (
            "trainer.algorithm.loss_reduction",
            "tokn_mean",
            "trainer.algorithm.loss_reduction must be one of token_mean, sequence_mean, seq_mean_token_sum_norm, "
            "prompt_mean; got 'tokn_mean'",
        ),
        ("trainer.seed", "${trainer.run_name}", "trainer.seed must be an int; got 'run-{fingerprint}'"),
        ("trainer.run_dir", "${trainer.nam}", "trainer.run_dir refers to ${trainer.nam}, which is not a setting"),
        (
            "trainer.run_name",
            "${trainer.run_dir}",
            "circular references between settings: trainer.run_name -> trainer.run_dir -> trainer.run_name",
        ),
    ],
)
def test_invalid_value_is_rejected(name, value, message):
    with pytest.raises(ConfigError) as refusal:
        SkyRLConfig.from_dict(setting(name, value))
    assert str(refusal.value) == message


@pytest.mark.parametrize(
    "name, nearest",
    [
        ("trainer.algorithm.eps_clp_high", "trainer.algorithm.eps_clip_high"),
        ("trainer.kl_loss_coef", "trainer.algorithm.kl_loss_coef"),  # right name, wrong place
        ("generator.train_batch_size", "trainer.train_batch_size"),
        ("trainer.algoritm", "trainer.algorithm"),
        ("generator.eval_sampling_params.top_pp", "generator.eval_sampling_params.top_p"),
        ("environment.skyrl_gym.max_env_worker", "environment.skyrl_gym.max_env_workers"),
    ],
)
def test_unknown_name_error_suggests_nearest_name(name, nearest):
    with pytest.raises(ConfigError) as refusal:
        SkyRLConfig.from_dict(setting(name, 1))
    assert str(refusal.value) == f"unknown setting {name}; did you mean {nearest}?"


def test_dissimilar_unknown_name_gets_no_suggestion():
    with pytest.raises(ConfigError, match=r"^unknown setting zzz$"):
        SkyRLConfig.from_dict({"zzz": 1})
    assert find_nearest_name("zzz", []) is None


NAMES = set(list_setting_names(SkyRLConfig))


REFUSALS = {name: entry for name, entry in OTHER_RELEASES.items() if isinstance(entry, Refusal)}


@pytest.mark.parametrize("name", sorted(REFUSALS))
def test_foreign_setting_is_rejected_unless_value_matches_behaviour(name):
    refusal = REFUSALS[name]
    assert name not in NAMES
    for value in refusal.accepted or ():
        assert SkyRLConfig.from_dict(setting(name, value)) == SkyRLConfig()
    if refusal.accepted is not None and refusal.warned is not None:
        with pytest.raises(ConfigError, match=f"^{name}=another is refused: {re.escape(refusal.reason)}$"):
            SkyRLConfig.from_dict(setting(name, "another"))


@pytest.mark.parametrize(
    "name, value, error",
    [
        ("trainer.ref.megatron_config.moe_aux_loss_coeff", 0.1, r"=0\.1 is refused: the loss comes"),
        (
            "trainer.ref.megatron_config.ddp_config",
            {"overlap_grad_reduce": True},
            "overlap_grad_reduce=true is refused",
        ),
        ("trainer.critic.megatron_config.moe_enable_routing_replay", True, "use trainer.policy.routing_replay"),
        ("trainer.policy.megatron_config.hf_export_config", {"save_every_n_ranks": 2}, "save_every_n_ranks=2 is refus"),
        (
            "trainer.ref.deepspeed_config.fp16",
            {"enabled": True, "loss_scale": 0},
            r"\.enabled=true is refused: .*trainer\.bf16",
        ),
        ("deepspeed_config.eval.zero_optimization.contiguous_gradients", False, "=false is refused"),
    ],
)
def test_foreign_setting_is_rejected_for_all_models(name, value, error):
    with pytest.raises(ConfigError, match=f"^{re.escape(name)}.*{error}"):
        SkyRLConfig.from_dict(setting(name, value))


@pytest.mark.parametrize(
    "name, value",
    [
        ("trainer.critic.megatron_config.mtp_num_layers", None),
        ("trainer.policy.megatron_config.torch_profiler_config", {"enable": False, "ranks": [0], "save_path": None}),
        ("trainer.policy.megatron_config.optimizer_config_kwargs", {"optimizer_offload_fraction": 0.0}),
        ("trainer.ref.deepspeed_config.fp16", {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16}),
        ("trainer.ref.deepspeed_config.data_types", {"grad_accum_dtype": "fp32"}),
    ],
)
def test_foreign_section_is_accepted_without_effect(name, value):
    assert SkyRLConfig.from_dict(setting(name, value)) == SkyRLConfig()


SKYRLS_MEGATRON: dict[str, Any] = {
    **{f"{size}_model_parallel_size": 1 for size in ("tensor", "pipeline", "expert")},
    "context_parallel_size": 1,
    "expert_tensor_parallel_size": None,
    "torch_profiler_config": {"enable": False, "ranks": [], "save_path": None},
    "transformer_config_kwargs": {
        "recompute_granularity": "full",
        "recompute_modules": ["core_attn"],
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
        "gradient_accumulation_fusion": False,
    },
    "model_config_kwargs": {},
    "lora_config": {"lora_type": "lora", "merge_lora": True},
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_load_balancing_type": "none",
    "moe_aux_loss_coeff": 0,
    "moe_router_score_function": None,
    "moe_router_enable_expert_bias": None,
    "moe_router_dtype": "fp32",
    "moe_enable_routing_replay": False,
    "moe_per_layer_logging": False,
    "mtp_num_layers": None,
    "mtp_loss_weight": 0.1,
    "mtp_loss_chunk_size": 1024,
    "mtp_loss_topk": None,
    "dist_ckpt_optim_fully_reshardable": False,
    "async_dist_ckpt_save": False,
    "async_dist_ckpt_strategy": "mcore",
    "async_save_prestage_to_cpu": False,
    "hf_export_config": {"distributed_save": False, "save_every_n_ranks": 1},
}
SKYRLS_MEGATRON_OPTIMIZER: dict[str, Any] = {
    "ddp_config": {
        "grad_reduce_in_fp32": True,
        "overlap_grad_reduce": False,
        "overlap_param_gather": False,
        "average_in_collective": True,
    },
    "optimizer_config_kwargs": {
        "overlap_cpu_optimizer_d2h_h2d": False,
        "use_precision_aware_optimizer": False,
        "optimizer_cpu_offload": False,
        "optimizer_offload_fraction": 0.0,
    },
    "empty_cuda_cache": True,
    "freeze_moe_router": False,
}
AUTO = ("sub_group_size", "reduce_bucket_size", "stage3_prefetch_bucket_size")
AUTO += ("stage3_param_persistence_threshold", "stage3_max_live_parameters", "stage3_max_reuse_distance")
SKYRLS_DEEPSPEED: dict[str, Any] = {
    "train": {
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "none"},
            "offload_optimizer": {"device": "none", "pin_memory": True},
            **dict.fromkeys(AUTO, "auto"),
            "round_robin_gradients": True,
            "zero_hpz_partition_size": 1,
            "zero_quantized_weights": False,
            "zero_quantized_gradients": False,
        },
        "torch_autocast": {"enabled": True, "dtype": "bfloat16"},
        "disable_trace_cache": False,
        "data_types": {"grad_accum_dtype": "fp32"},
        "gradient_clipping": 1.0,
        "wall_clock_breakdown": False,
        "prescale_gradient": False,
    },
    "eval": {
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": "auto",
            "offload_param": {"device": "cpu", "pin_memory": True},
        },
        "torch_autocast": {"enabled": True, "dtype": "bfloat16"},
        "gradient_clipping": 1.0,
    },
}
SKYRLS_FULLY_ASYNC: dict[str, Any] = {
    "enabled": True,
    "max_staleness_steps": 4,
    "num_parallel_generation_workers": 768,
    "sample_full_batch": False,
    "clear_kv_cache_on_weight_sync": False,
    "simulate_training": False,
    "simulate_training_step_seconds": 30,
    "simulate_weight_sync_seconds": 0,
}


def test_skyrl_megatron_settings_are_accepted_with_defaults():
    own = {"megatron_config": SKYRLS_MEGATRON | SKYRLS_MEGATRON_OPTIMIZER}
    models = {"policy": own, "critic": own, "ref": {"megatron_config": SKYRLS_MEGATRON}}
    assert SkyRLConfig.from_dict({"trainer": models}) == SkyRLConfig()
    with pytest.warns(match="moe_grouped_gemm=true"):
        config = SkyRLConfig.from_dict(setting("trainer.policy.megatron_config.moe_grouped_gemm", True))
    assert config == SkyRLConfig()


def test_skyrl_deepspeed_settings_are_accepted_with_defaults():
    """Both in the shared groups and in those of each model."""
    shared = SkyRLConfig.from_dict({"deepspeed_config": SKYRLS_DEEPSPEED})
    check_deepspeed(shared)
    train, scoring = ({"deepspeed_config": SKYRLS_DEEPSPEED[name]} for name in ("train", "eval"))
    own = SkyRLConfig.from_dict({"trainer": {"policy": train, "critic": train, "ref": scoring}})
    for config in (shared, own):
        for model in (config.trainer.policy, config.trainer.critic):
            assert model.deepspeed_config.gradient_clipping == model.optimizer_config.max_grad_norm == 1.0
            model.deepspeed_config.gradient_clipping = None
    shared.deepspeed_config.train.gradient_clipping = None
    assert own == shared == SkyRLConfig()


def test_skyrl_async_settings_are_accepted_with_defaults():
    values = {"trainer": {"fully_async": SKYRLS_FULLY_ASYNC}, "generator": {"use_cache_salt": True}}
    settings = SkyRLConfig.from_dict(values).trainer.fully_async
    assert settings == FullyAsyncConfig(enabled=True)
    assert FullyAsyncConfig(enabled=True).get_max_running(256) == 768


def test_skyrl_routing_replay_flag_maps_to_rollout_routes():
    name = "trainer.policy.megatron_config.moe_enable_routing_replay"
    assert SkyRLConfig.from_dict(setting(name, True)).trainer.policy.routing_replay == "R3"
    policy = {"megatron_config": {"moe_enable_routing_replay": True}, "routing_replay": "R2"}
    with pytest.raises(ConfigError, match="moe_enable_routing_replay=true"):
        SkyRLConfig.from_dict({"trainer": {"policy": policy}})


@pytest.mark.parametrize(
    "name, choice, hint",
    [
        ("deepspeed_config.train.zero_optimization.offload_param.device", "nvme", "use cpu"),
        ("trainer.ref.deepspeed_config.zero_optimization.offload_param.device", "nvme", "use cpu"),
        ("trainer.ref.megatron_config.moe_token_dispatcher_type", "allgather", "use alltoall"),
    ],
)
def test_foreign_choice_error_gives_reason(name, choice, hint):
    with pytest.raises(ConfigError, match=f"^{name}={choice} .*{hint}"):
        SkyRLConfig.from_dict(setting(name, choice))


def test_missing_or_unresolvable_omegaconf_value_raises_config_error():
    with pytest.raises(ConfigError, match="cannot be resolved"):
        SkyRLConfig.from_dict(OmegaConf.create({"trainer": {"run_name": "???"}}))
    with pytest.raises(ConfigError, match="cannot be resolved"):
        SkyRLConfig.from_dict(OmegaConf.create({"trainer": {"run_name": "${oc.env:SKYRL_NO_SUCH_VARIABLE}"}}))


@dataclass(kw_only=True)
class PenaltyAlgorithmConfig(AlgorithmConfig):
    length_penalty: float = 0.5


@dataclass(kw_only=True)
class PenaltyTrainerConfig(TrainerConfig):
    algorithm: PenaltyAlgorithmConfig = field(default_factory=PenaltyAlgorithmConfig)


@dataclass(kw_only=True)
class PenaltyConfig(SkyRLConfig):
    trainer: PenaltyTrainerConfig = field(default_factory=PenaltyTrainerConfig)


def test_subclass_adds_settings():
    values = get_default_config(PenaltyConfig)
    assert values.trainer.algorithm.length_penalty == 0.5
    values.trainer.algorithm.length_penalty = 2
    assert PenaltyConfig.from_dict(values).trainer.algorithm.length_penalty == 2.0
    with pytest.raises(ConfigError, match=r"trainer\.algorithm\.length_penalty"):
        PenaltyConfig.from_dict({"trainer": {"algorithm": {"length_penalti": 1}}})


def test_importing_config_loads_no_heavy_modules():
    program = (
        "import sys, time; start = time.perf_counter(); import skyrl_train.config; "
        "print(time.perf_counter() - start, [m for m in ('torch', 'ray', 'hydra', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    seconds, heavy = done.stdout.split(" ", 1)
    assert heavy.strip() == "[]"
    assert float(seconds) < 2  # 0.07 s on an idle machine


@pytest.mark.parametrize("override", ["trainer.seed", "trainer.seed=[1", "+trainer.seed=1"])
def test_unparsable_override_error_quotes_text(override: str):
    with pytest.raises(ConfigError, match=r"trainer\.epochs=2"):
        compose_config(["trainer.epochs=2", override])

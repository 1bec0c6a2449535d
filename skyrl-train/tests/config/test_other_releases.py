"""Settings of the package `skyrl` 0.3: each is accepted under its name, or refused with what to use instead."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.config import SkyRLConfig, compose_config, validate_cfg
from skyrl_train.config.fingerprint import flatten_settings
from skyrl_train.config.other_releases import OTHER_RELEASES, Moved
from skyrl_train.config.supervised import SupervisedConfig
from skyrl_train.errors import ConfigError

DEFAULTS: dict[str, Any] = json.loads((Path(__file__).parent / "skyrl_0_3_defaults.json").read_text())
"""Defaults of that release. Paths begin with `~`."""

UNCHANGED = flatten_settings(SkyRLConfig())

UNTYPED = ("environment.skyrl_gym.",)
"""Sections of environments: checked by the environment."""

OWN_DEFAULTS = {
    "trainer.use_expandable_segments",
    "trainer.log_path",
    "trainer.strategy",
    "trainer.algorithm.cispo.cispo_eps_clip_low",
    "trainer.algorithm.cispo.cispo_eps_clip_high",
    "trainer.run_name",
    "trainer.logger",
    "trainer.print_example_interval",
    "trainer.ckpt_path",
    "trainer.export_path",
    "generator.backend",
    "generator.enforce_eager",
    "generator.weight_sync_backend",
}
"""Settings whose default is another one here (`docs/migration/skyrl.md`)."""

FOLLOWING = {"trainer.run_dir", "trainer.ckpt_path", "trainer.export_path", "generator.weight_sync_directory"}
"""Settings whose default refers to one of `OWN_DEFAULTS`."""


def leaves_of(settings: Mapping[str, Any], name: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in settings.items():
        full_name = f"{name}.{key}" if name else key
        if isinstance(value, dict) and value:
            yield from leaves_of(value, full_name)
        else:
            yield full_name, value


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for name, value in values.items():
        *sections, key = name.split(".")
        section = settings
        for part in sections:
            section = section.setdefault(part, {})
        section[key] = value
    return settings


def changes(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that these values change."""
    config = flatten_settings(SkyRLConfig.from_dict(nested(values)))
    return {name: value for name, value in config.items() if value != UNCHANGED.get(name)}


@pytest.mark.filterwarnings("ignore:.*moe_grouped_gemm=true has no effect")
def test_every_default_of_skyrl_0_3_is_accepted():
    for name, value in leaves_of(DEFAULTS):
        found = set(changes({name: value})) - (FOLLOWING - {name})
        if not name.startswith(UNTYPED):
            entry = OTHER_RELEASES.get(name)
            assert found <= OWN_DEFAULTS & {name, entry.setting if isinstance(entry, Moved) else name}, name


@pytest.mark.filterwarnings("ignore:.*moe_grouped_gemm=true has no effect", "ignore:trainer.strategy=fsdp is an alias")
def test_all_defaults_of_skyrl_0_3_together_are_valid(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    settings = json.loads(json.dumps(DEFAULTS))
    settings["trainer"]["placement"]["device"] = "cuda"
    config = validate_cfg(settings)
    assert (config.generator.backend, config.trainer.strategy) == ("vllm", "fsdp2")


MOVED = {name: entry for name, entry in OTHER_RELEASES.items() if isinstance(entry, Moved)}


def value_for(name: str, entry: Moved) -> tuple[Any, Any]:
    """Return a value of the other release that is no default here, and the value here."""
    if entry.values:
        return entry.values[0]
    if entry.setting.startswith("generator.engine_init_kwargs"):
        value = {"max_model_len": 512}
        return value, value
    default = UNCHANGED[entry.setting]
    if isinstance(default, bool):
        return not default, not default
    texts = {
        "model_dtype": "float32",
        "backend": "sglang",
        "weight_sync_backend": "gloo",
        "served_model_name": "tiny",
        "enforce_eager": True,
        "http_endpoint_host": "0.0.0.0",
        "dppo_type": "binary_kl",
        "remote_urls": ["10.0.0.1:8001"],
        "save_path": "/traces",
        "ranks": [1],
    }
    value = texts.get(name.rpartition(".")[2], 7)
    return value, value


@pytest.mark.parametrize("name", sorted(MOVED))
def test_moved_setting_sets_current_setting(name: str):
    entry = MOVED[name]
    value, here = value_for(name, entry)
    assert changes({name: value}) == changes({entry.setting: here}) != {}
    assert changes({name: value, entry.setting: here}) == changes({name: value})
    for value in entry.accepted:
        assert changes({name: value}) == {}


def test_conflicting_old_and_new_names_are_rejected():
    with pytest.raises(ConfigError, match=r"generator\.num_inference_engines=4"):
        changes({"generator.inference_engine.num_engines": 4, "generator.num_inference_engines": 2})
    kwargs = "engine_init_kwargs.max_model_len"
    with pytest.raises(ConfigError, match="max_model_len=512"):
        changes({f"generator.inference_engine.{kwargs}": 512, f"generator.{kwargs}": 1024})
    with pytest.raises(ConfigError, match="routing_replay=R3"):
        changes(
            {"generator.inference_engine.enable_return_routed_experts": True, "trainer.policy.routing_replay": "R2"}
        )


def test_unknown_name_in_moved_section_suggests_nearest():
    with pytest.raises(ConfigError, match=r"inference_engine\.num_engines"):
        changes({"generator.inference_engine.num_engnes": 4, "generator.inference_engine.backend": "vllm"})


def test_dict_entries_are_accepted_under_old_and_new_name():
    values = {
        "generator.inference_engine.engine_init_kwargs.max_model_len": 512,
        "generator.engine_init_kwargs.seed": 1,
        "generator.inference_engine.speculative_config": {"method": "ngram"},
    }
    kwargs = SkyRLConfig.from_dict(nested(values)).generator.engine_init_kwargs
    assert kwargs == {"max_model_len": 512, "seed": 1, "speculative_config": {"method": "ngram"}}


def test_loss_temperature_equals_sampling_temperature():
    loss, sampling = "trainer.algorithm.temperature", "generator.sampling_params.temperature"
    assert changes({loss: 1.0}) == {}
    assert changes({loss: 0.7, sampling: 0.7}) == {sampling: 0.7}
    with pytest.raises(ConfigError, match=f"{loss}=0.7 .*{sampling}=1.0"):
        changes({loss: 0.7})


def test_moved_setting_is_accepted_in_supervised_training():
    values = {"trainer": {"remove_microbatch_padding": False, "log_example_interval": -1}}
    assert not SupervisedConfig.from_dict(values).trainer.use_sample_packing


# ---- run scripts of that release

ONE_NODE = (
    "trainer.placement.colocate_all=true trainer.strategy=fsdp2 generator.inference_engine.backend=vllm "
    "generator.inference_engine.run_engines_locally=true generator.inference_engine.weight_sync_backend=nccl "
    "trainer.algorithm.advantage_estimator=grpo trainer.update_epochs_per_batch=1 trainer.logger=wandb"
)
GSM8K = (
    "data.train_data=['/data/gsm8k/train.parquet'] data.val_data=['/data/gsm8k/validation.parquet'] "
    "trainer.policy.model.path=Qwen/Qwen2.5-1.5B-Instruct environment.env_class=gsm8k "
    "trainer.placement.policy_num_gpus_per_node=4 trainer.placement.critic_num_gpus_per_node=4 "
    "trainer.placement.ref_num_gpus_per_node=4 generator.inference_engine.num_engines=2 "
    "generator.inference_engine.tensor_parallel_size=2 generator.inference_engine.gpu_memory_utilization=0.8 "
    "generator.inference_engine.async_engine=true generator.inference_engine.distributed_executor_backend=mp "
    "generator.batched=true generator.n_samples_per_prompt=5 generator.sampling_params.max_generate_length=1024 "
    "trainer.epochs=20 trainer.train_batch_size=1024 trainer.policy_mini_batch_size=256 "
    "trainer.micro_forward_batch_size_per_gpu=64 trainer.micro_train_batch_size_per_gpu=64 "
    "trainer.max_prompt_length=512 trainer.policy.optimizer_config.lr=1.0e-6 trainer.algorithm.use_kl_loss=true "
    "trainer.eval_batch_size=1024 trainer.eval_before_train=true trainer.eval_interval=5 trainer.ckpt_interval=10 "
    "trainer.project_name=gsm8k trainer.run_name=gsm8k_test trainer.resume_mode=null "
    "trainer.log_path=/tmp/skyrl-logs trainer.ckpt_path=/ckpts/gsm8k"
)
DAPO = (
    "data.train_data=['/data/dapo/dapo-math-17k-cleaned.parquet'] data.val_data=['/data/dapo/aime-2024.parquet'] "
    "trainer.policy.model.path=Qwen/Qwen3-1.7B-Base environment.env_class=aime "
    "trainer.placement.policy_num_gpus_per_node=8 trainer.policy.fsdp_config.fsdp_size=8 "
    "generator.inference_engine.num_engines=8 generator.inference_engine.tensor_parallel_size=1 "
    "generator.inference_engine.enforce_eager=true generator.inference_engine.async_engine=false "
    "generator.batched=true generator.n_samples_per_prompt=16 generator.eval_n_samples_per_prompt=32 "
    "generator.apply_overlong_filtering=true trainer.algorithm.policy_loss_type=dual_clip "
    "trainer.algorithm.overlong_buffer_len=4096 trainer.algorithm.overlong_buffer_penalty_factor=1.0 "
    "trainer.algorithm.loss_reduction=token_mean trainer.algorithm.use_kl_loss=false "
    "trainer.algorithm.clip_ratio_c=10.0 trainer.algorithm.eps_clip_low=0.2 trainer.algorithm.eps_clip_high=0.28 "
    "generator.sampling_params.temperature=1.0 generator.sampling_params.top_p=1.0 "
    "generator.sampling_params.max_generate_length=8192 generator.eval_sampling_params.top_p=0.7 "
    "generator.eval_sampling_params.temperature=1.0 generator.eval_sampling_params.max_generate_length=8192 "
    "trainer.epochs=20 trainer.train_batch_size=512 trainer.policy_mini_batch_size=32 "
    "trainer.micro_forward_batch_size_per_gpu=8 trainer.micro_train_batch_size_per_gpu=4 "
    "trainer.max_prompt_length=2048 trainer.policy.optimizer_config.lr=1e-6 "
    "trainer.policy.optimizer_config.num_warmup_steps=160 trainer.policy.optimizer_config.weight_decay=0.1 "
    "trainer.hf_save_interval=10 trainer.max_ckpts_to_keep=3 trainer.resume_mode=latest"
)
SEARCH = (
    "data.train_data=['/data/searchR1/train.parquet'] data.val_data=['/data/searchR1/validation.parquet'] "
    "trainer.policy.model.path=Qwen/Qwen2.5-3B-Instruct environment.env_class=search "
    "trainer.placement.policy_num_gpus_per_node=8 trainer.placement.ref_num_gpus_per_node=8 "
    "trainer.policy.fsdp_config.cpu_offload=false trainer.ref.fsdp_config.cpu_offload=true "
    "generator.inference_engine.num_engines=4 generator.inference_engine.tensor_parallel_size=2 "
    "generator.inference_engine.gpu_memory_utilization=0.5 generator.inference_engine.async_engine=true "
    "generator.batched=false generator.n_samples_per_prompt=5 generator.max_turns=4 "
    "generator.use_conversation_multi_turn=true generator.append_eos_token_after_stop_str_in_multi_turn=true "
    "generator.max_input_length=4096 generator.sampling_params.max_generate_length=500 "
    'generator.sampling_params.stop=["</search>","</answer>"] '
    'generator.eval_sampling_params.stop=["</search>","</answer>"] generator.eval_sampling_params.temperature=0 '
    "generator.eval_sampling_params.max_generate_length=500 environment.skyrl_gym.max_env_workers=16 "
    "environment.skyrl_gym.search.log_requests=false environment.skyrl_gym.search.topk=3 "
    "environment.skyrl_gym.search.search_url=http://127.0.0.1:8000/retrieve "
    "trainer.algorithm.use_kl_loss=true trainer.algorithm.kl_loss_coef=0.001 "
    "trainer.algorithm.off_policy_correction.tis_ratio_type=token "
    "trainer.algorithm.off_policy_correction.token_tis_ratio_clip_high=2.0 "
    "trainer.policy.optimizer_config.max_grad_norm=0.5 trainer.policy.optimizer_config.num_warmup_steps=94 "
    "trainer.epochs=1 trainer.train_batch_size=512 trainer.policy_mini_batch_size=256 "
    "trainer.micro_forward_batch_size_per_gpu=4 trainer.micro_train_batch_size_per_gpu=4 "
    "trainer.max_prompt_length=2048 trainer.eval_batch_size=256 trainer.eval_before_train=false "
    "trainer.eval_interval=50 trainer.ckpt_interval=20 trainer.hf_save_interval=100 trainer.max_ckpts_to_keep=5"
)
SQL = (
    "data.train_data=['/data/sql/train.parquet'] data.val_data=['/data/sql/validation.parquet'] "
    "trainer.policy.model.path=Qwen/Qwen2.5-Coder-7B-Instruct environment.env_class=text2sql "
    "environment.skyrl_gym.text2sql.db_path=/data/sql/db_files/data "
    "trainer.placement.policy_num_gpus_per_node=8 trainer.placement.ref_num_gpus_per_node=8 "
    "trainer.policy.fsdp_config.cpu_offload=false trainer.ref.fsdp_config.cpu_offload=true "
    "trainer.policy.sequence_parallel_size=1 trainer.policy.optimizer_config.max_grad_norm=0.5 "
    "generator.inference_engine.num_engines=2 generator.inference_engine.tensor_parallel_size=4 "
    "generator.inference_engine.gpu_memory_utilization=0.7 generator.batched=false "
    "generator.use_conversation_multi_turn=false generator.n_samples_per_prompt=5 generator.max_turns=6 "
    "generator.max_input_length=29000 generator.sampling_params.max_generate_length=3000 "
    "generator.sampling_params.temperature=0.6 generator.sampling_params.top_p=0.95 "
    'generator.sampling_params.stop=["</sql>","</solution>"] '
    'generator.eval_sampling_params.stop=["</sql>","</solution>"] '
    "generator.eval_sampling_params.max_generate_length=3000 trainer.algorithm.use_kl_loss=false "
    "trainer.epochs=30 trainer.train_batch_size=256 trainer.policy_mini_batch_size=256 "
    "trainer.micro_forward_batch_size_per_gpu=8 trainer.micro_train_batch_size_per_gpu=1 "
    "trainer.max_prompt_length=6000 trainer.eval.batch_size=1024 trainer.eval.before_train=true "
    "trainer.eval.interval=5 trainer.ckpt_interval=60 trainer.hf_save_interval=30 trainer.dump_data_batch=true"
)


@pytest.mark.filterwarnings("ignore:.*async_engine=false has no effect")
@pytest.mark.parametrize(
    "script, engines, tensor_parallel_size",
    [
        pytest.param(GSM8K, 2, 2, id="gsm8k"),
        pytest.param(DAPO, 8, 1, id="dapo"),
        pytest.param(SEARCH, 4, 2, id="search"),
        pytest.param(SQL, 2, 4, id="sql"),
    ],
)
def test_run_script_of_skyrl_0_3_composes(
    script: str, engines: int, tensor_parallel_size: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("WANDB_MODE", "offline")
    config = validate_cfg(compose_config([*f"{ONE_NODE} {script}".split(), "trainer.placement.device=cuda"]))
    generator = config.generator
    assert (generator.num_inference_engines, generator.backend) == (engines, "vllm")
    assert generator.inference_engine_tensor_parallel_size == tensor_parallel_size
    assert config.trainer.algorithm.overlong_buffer.len == (4096 if script is DAPO else None)

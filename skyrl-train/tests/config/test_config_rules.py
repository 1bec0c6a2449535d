"""Settings that contradict each other are refused before anything starts."""

from dataclasses import asdict, dataclass
from importlib.util import find_spec

import pytest

import skyrl_gym.envs.base_text_env
from skyrl_gym.envs.registration import env_class_of
from skyrl_train.config import (
    SkyRLConfig,
    get_default_config,
    validate_cfg,
    validate_environments,
    validate_generator_cfg,
)
from skyrl_train.config.base import get_default_values
from skyrl_train.config.document import read_field_meanings
from skyrl_train.config.validation import validate_batch_sizes
from skyrl_train.errors import ConfigError
from skyrl_train_testing.tiny_runs import register_environments


def with_settings(**settings):
    """The defaults with changes. A name's end is enough where only one setting or section has it: `seed=1` is
    `trainer.seed=1`, and `critic__optimizer_config__lr=1.0` is `trainer.critic.optimizer_config.lr=1.0`."""
    values = get_default_values(SkyRLConfig)
    for name, value in settings.items():
        end = name.split("__")
        [(section, key)] = [(section, path[-1]) for path, section in places(values) if path[-len(end) :] == end]
        section[key] = value
    return values


def places(section, path=()):
    """Every setting and section: its path and the section that holds it. (DeepSpeed's have names of others.)"""
    for key, value in section.items():
        yield [*path, key], section
        if isinstance(value, dict) and key != "deepspeed_config":
            yield from places(value, (*path, key))


def test_default_settings_are_valid():
    config = validate_cfg(SkyRLConfig())
    assert config == validate_cfg(get_default_config())


def test_auto_values_are_resolved():
    on_cpu = validate_cfg(with_settings(device="cpu"))
    on_gpus = validate_cfg(with_settings(device="cuda"))
    assert (on_cpu.generator.backend, on_cpu.generator.weight_sync_backend) == ("native", "gloo")
    # CUDA graphs where there is CUDA.
    assert on_cpu.generator.resolve_enforce_eager("cpu") and not on_gpus.generator.resolve_enforce_eager("cuda")
    best = "vllm" if find_spec("vllm") else "native"
    assert (on_gpus.generator.backend, on_gpus.generator.weight_sync_backend) == (best, "nccl")
    assert validate_cfg(SkyRLConfig()).trainer.placement.device in ("cpu", "cuda")


def test_validation_does_not_modify_input_settings():
    config = SkyRLConfig()
    assert validate_cfg(config) is not config
    assert config.trainer.placement.device == "auto"


def test_settings_created_in_python_are_type_checked():
    config = SkyRLConfig()
    config.trainer.seed = "1"  # type: ignore[assignment]
    with pytest.raises(ConfigError, match=r"trainer\.seed"):
        validate_cfg(config)


def remote(urls: list[str], **settings) -> dict:
    """Settings of a run that uses servers started elsewhere."""
    return {
        "run_engines_locally": False,
        "remote_inference_engine_urls": urls,
        "colocate_all": False,
    } | settings


@pytest.mark.parametrize(
    "settings, message",
    [
        # batches
        (dict(policy_mini_batch_size=0), "policy_mini_batch_size"),
        (dict(micro_train_batch_size_per_gpu=0), "micro_train_batch_size_per_gpu"),
        (dict(micro_forward_batch_size_per_gpu=0), "micro_forward_batch_size_per_gpu"),
        (dict(train_batch_size=100), "train_batch_size"),
        (dict(train_batch_size=1000), "train_batch_size"),
        (
            dict(policy_mini_batch_size=1, n_samples_per_prompt=2, policy_num_gpus_per_node=3),
            "= 2 sequences is less than the 3 data-parallel workers",
        ),
        (dict(critic__model__path="c", train_batch_size=128), "train_batch_size"),
        (
            dict(critic__model__path="c", advantage_estimator="gae", critic_mini_batch_size=300),
            "train_batch_size",
        ),
        (dict(critic_mini_batch_size=0), "critic_mini_batch_size"),
        (dict(max_tokens_per_microbatch=0), "max_tokens_per_microbatch"),
        (
            dict(max_tokens_per_microbatch=4096, use_sample_packing=False),
            "trainer.use_sample_packing=true",
        ),
        # lengths
        (dict(max_input_length=600), "trainer.max_prompt_length=512"),
        (dict(generator__max_turns=2, max_input_length=500), "trainer.max_prompt_length"),
        (dict(max_prompt_length=0), "trainer.max_prompt_length"),
        # sampling
        (dict(sampling_params__temperature=0), "sampling_params.temperature=0.0"),
        (dict(eval_sampling_params__temperature=-1), "eval_sampling_params.temperature"),
        (dict(sampling_params__logprobs=2), "sampling_params.logprobs=2"),
        (dict(sampling_params__top_k=0), "sampling_params.top_k"),
        (dict(sampling_params__top_p=1.5), "sampling_params.top_p"),
        (dict(sampling_params__min_p=-0.1), "sampling_params.min_p"),
        (dict(sampling_params__repetition_penalty=0), "repetition_penalty"),
        (dict(sampling_params__max_generate_length=0), "max_generate_length"),
        (dict(sampling_params__stop=["", "x"]), "stop contains an empty string"),
        (dict(sampling_params__additional_kwargs={"top_p": 0.5, "seed": 1}), "additional_kwargs"),
        (dict(eval_n_samples_per_prompt=4), "samples the same response that many times"),
        # turns as samples
        (dict(merge_stepwise_output=True), "merge_stepwise_output=true"),
        (dict(step_wise_trajectories=True, use_conversation_multi_turn=False), "all turns form one message"),
        # chat template
        (dict(source="file"), "needs generator.chat_template.name_or_path"),
        (dict(name_or_path="qwen9"), "name_or_path"),
        (dict(chat_template_kwargs={"tokenize": True}), "chat_template_kwargs"),
        # the run
        (dict(train_data=[]), "data.train_data"),
        (dict(epochs=0), "trainer.epochs"),
        (dict(max_training_steps=0), "trainer.max_training_steps"),
        (dict(worker_timeout_seconds=0), "trainer.worker_timeout_seconds"),
        (dict(stop_timeout_seconds=-1), "trainer.stop_timeout_seconds"),
        (dict(max_ckpts_to_keep=0), "trainer.ckpt_interval=0"),
        (
            dict(max_trajectories_gb=0),
            "trainer.dump_trajectories=false",
        ),
        (dict(resume_mode="from_path"), "needs trainer.resume_path"),
        (dict(resume_path="/x"), "trainer.resume_path=/x"),
        (dict(run_dir="s3://bucket/x"), "trainer.run_dir=s3://bucket/x"),
        (dict(run_dir=""), "trainer.run_dir"),
        (dict(policy__model__path=""), "trainer.policy.model.path"),
        (dict(model_name="other"), "generator.model_name"),
        (dict(max_rollout_retries=-1), "max_rollout_retries"),
        # optimizer
        (dict(policy__optimizer_config__lr=-1), "optimizer_config.lr"),
        (dict(policy__optimizer_config__adam_betas=[0.9]), "adam_betas"),
        (dict(policy__optimizer_config__adam_betas=[0.9, 1.0]), "adam_betas"),
        (dict(policy__optimizer_config__max_grad_norm=0), "max_grad_norm"),
        (
            dict(critic__model__path="c", advantage_estimator="gae", critic__optimizer_config__lr=-1),
            "trainer.critic.optimizer_config.lr",
        ),
        (
            dict(policy__optimizer_config__scheduler="constant", policy__optimizer_config__num_warmup_steps=5),
            "use constant_with_warmup",
        ),
        # placement
        (dict(device="cpu", weight_sync_backend="nccl"), "weight_sync_backend=nccl"),
        (
            dict(device="cuda", num_inference_engines=2),
            "the policy has 1 GPUs .* the engines have 2 .generator.num_inference_engines=2 x 1 GPUs each.",
        ),
        (
            dict(device="cuda", policy_num_gpus_per_node=2, num_inference_engines=2),
            "policy and reference model share GPUs",
        ),
        (dict(policy_num_nodes=0), "policy_num_nodes"),
        (dict(policy__fsdp_config__fsdp_size=2), "fsdp_size=2"),
        (dict(policy__fsdp_config__reshard_after_forward=2), "reshard_after_forward=2"),
        (
            dict(
                device="cuda",
                advantage_estimator="gae",
                use_kl_loss=False,
                critic__model__path="c",
                critic_num_gpus_per_node=2,
            ),
            "policy and critic share GPUs",
        ),
        (dict(policy__sequence_parallel_size=2), "policy.sequence_parallel_size=2"),
        (dict(ref__sequence_parallel_size=0), "ref.sequence_parallel_size"),
        (dict(logprobs_chunk_size=0), "logprobs_chunk_size"),
        # adapters, and the reference model
        (dict(policy__model__lora={"rank": 8, "dropout": 0.1}), "dropout=0.1"),
        (dict(policy__model__lora={"rank": -1}), "trainer.policy.model.lora.rank"),
        (dict(update_ref_every_epoch=True, use_kl_loss=False), "update_ref_every_epoch=true"),
        # rollout engines
        (dict(inference_engine_tensor_parallel_size=0), "tensor_parallel_size"),
        (
            dict(backend="native", inference_engine_tensor_parallel_size=2),
            "generator.backend=native",
        ),
        (dict(backend="native", max_num_batched_tokens=7), "max_num_batched_tokens=7"),
        (
            dict(inference_engine_tensor_parallel_size=2, inference_engine_expert_parallel_size=3),
            "expert_parallel_size=3",
        ),
        (dict(gpu_memory_utilization=1.5), "gpu_memory_utilization"),
        (dict(max_engine_restarts=-1), "max_engine_restarts"),
        (dict(weight_sync_canary_interval=-1), "canary_interval"),
        (dict(http_endpoint_port=70_000), "http_endpoint_port"),
        (dict(weight_sync_strategy="cuda_ipc"), "strategy=cuda_ipc .*trainer.placement.device=cpu"),
        (dict(weight_sync_strategy="adapter"), "trainer.policy.model.lora.rank=0"),
        (
            dict(weight_sync_strategy="adapter", policy__model__lora={"rank": 8, "init_method": "pissa_niter_4"}),
            "init_method=pissa_niter_4",
        ),
        # servers started elsewhere
        (remote([]), "remote_inference_engine_urls"),
        (remote(["a:1", "a:1"]), "without duplicates"),
        (remote(["a:1"], colocate_all=True), "colocate_all=true"),
        (remote(["a:1", "b:1"], num_inference_engines=3), "num_inference_engines=3"),
        (remote(["a:1"], backend="native"), "generator.backend=native"),
        (remote(["a:1"], weight_sync_strategy="shared_memory"), "needs engines that this run starts"),
    ],
)
def test_contradictory_settings_are_rejected(settings, message):
    settings = {"device": "cpu"} | settings
    with pytest.raises(ConfigError, match=message):
        validate_cfg(with_settings(**settings))


@pytest.mark.parametrize(
    "settings",
    [
        # On a CPU, counts are processes: engines, policy and reference workers need not be as many.
        dict(policy_num_gpus_per_node=2, num_inference_engines=1),
        dict(device="cuda", colocate_all=False, num_inference_engines=3),
        dict(use_kl_in_reward=True, use_kl_loss=False),
        # Rows are divided over workers and micro-batches as evenly as they can be.
        dict(policy_num_gpus_per_node=3, micro_train_batch_size_per_gpu=7),
        dict(ref_num_gpus_per_node=3),
        dict(max_tokens_per_microbatch=64),  # a longer sequence has a micro-batch of its own
        dict(step_wise_trajectories=True, merge_stepwise_output=True),
        dict(eval_n_samples_per_prompt=4, eval_sampling_params__temperature=0.7),
        dict(resume_mode="from_path", resume_path="/runs/global_step_3"),
        dict(val_data=[]),
        dict(sampling_params__logprobs=None),
        # What a script says for the engines of a GPU may stand where `auto` means native.
        dict(gpu_memory_utilization=0.7, enforce_eager=False),
        remote(["a:1", "b:1"], num_inference_engines=2),
        remote(["a:1"], weight_sync_strategy="checkpoint"),
    ],
)
def test_odd_but_valid_values_are_accepted(settings):
    validate_cfg(with_settings(**({"device": "cpu"} | settings)))


def test_generation_only_requires_no_training_settings():
    values = with_settings(train_data=[], sampling_params__temperature=0, model_name="other")
    assert validate_generator_cfg(values).generator.model_name == "other"


def test_batch_sizes_are_validated_separately():
    config = SkyRLConfig()
    config.trainer.policy_mini_batch_size = -1
    with pytest.raises(ConfigError, match="policy_mini_batch_size"):
        validate_batch_sizes(config)


def test_stop_strings_without_eos_cause_warning():
    values = with_settings(sampling_params__stop=["</answer>"], append_eos_token_after_stop_str_in_multi_turn=False)
    with pytest.warns(UserWarning, match="will lack the end-of-sequence token"):
        validate_cfg(values)


def test_wandb_requires_key_or_offline_mode(monkeypatch):
    values = with_settings(logger=["console", "wandb"])
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    with pytest.raises(ConfigError, match="WANDB_API_KEY"):
        validate_cfg(values)
    monkeypatch.setenv("WANDB_MODE", "offline")
    validate_cfg(values)
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.setenv("WANDB_API_KEY", "a key")
    validate_cfg(values)


def test_section_of_unknown_environment_is_rejected():
    config = SkyRLConfig.from_dict({"environment": {"skyrl_gym": {"gsm8k_multi_trun": {"x": 1}}}})
    with pytest.raises(ConfigError, match="gsm8k_multi_turn"):
        validate_environments(config)
    with pytest.raises(ConfigError, match=r"environment\.env_class"):
        validate_environments(SkyRLConfig.from_dict({"environment": {"env_class": "chess"}}))
    validate_environments(SkyRLConfig())


def test_environment_entry_point_uses_section_named_after_class():
    env_class = "skyrl_gym.envs.search.env:SearchEnv"
    config = SkyRLConfig.from_dict({"environment": {"env_class": env_class, "skyrl_gym": {"SearchEnv": {"topk": 7}}}})
    validate_environments(config)
    assert config.environment.skyrl_gym.get_env_config(env_class) == {"topk": 7}
    misspelt = {"environment": {"env_class": env_class, "skyrl_gym": {"SearchEnv": {"topkk": 7}}}}
    with pytest.raises(ConfigError, match="topk"):
        validate_environments(SkyRLConfig.from_dict(misspelt))
    with pytest.raises(ConfigError, match=r"environment\.env_class"):
        validate_environments(SkyRLConfig.from_dict({"environment": {"env_class": "my_chess:Chess"}}))


def test_invalid_environment_setting_is_rejected_at_startup():
    @dataclass
    class ChessConfig:
        opponent_url: str = "http://127.0.0.1:9"

    class Chess(skyrl_gym.envs.base_text_env.BaseTextEnv):
        config_class = ChessConfig

    with register_environments(chess=Chess):
        section = {"oponent_url": "http://127.0.0.1:1"}
        with pytest.raises(ConfigError, match=r"environment\.skyrl_gym\.chess\.oponent_url"):
            validate_environments(SkyRLConfig.from_dict({"environment": {"skyrl_gym": {"chess": section}}}))
        section = {"opponent_url": 9}
        with pytest.raises(ConfigError, match=r"environment\.skyrl_gym\.chess\.opponent_url"):
            validate_environments(SkyRLConfig.from_dict({"environment": {"skyrl_gym": {"chess": section}}}))


@pytest.mark.parametrize("env_id", sorted(skyrl_gym.registry))
def test_environment_defaults_are_all_settings(env_id):
    """Only then can the reference page show them and the command line change them."""
    config_class = getattr(env_class_of(skyrl_gym.spec(env_id)), "config_class", None)
    if config_class is not None:
        section = asdict(config_class())
        validate_environments(SkyRLConfig.from_dict({"environment": {"skyrl_gym": {env_id: section}}}))
        assert set(read_field_meanings(config_class)) == set(section)

"""Identity of an experiment: the settings that define it, and a short hash of them for run names.

Settings are of three kinds. Changing one in `DEFINING` makes another experiment, which does not resume checkpoints of
the first. Settings in `OPERATIONAL` change location, speed and observation of a run. All others (learning rate,
coefficients, sampling) belong to the experiment but may change when it is resumed.
"""

import hashlib
import json
import os

from skyrl_train.config.typed import is_among, iter_settings, to_dict

PLACEHOLDER = "{fingerprint}"
"""Text that `fill_fingerprint` replaces in a setting such as `trainer.run_name`."""

# fmt: off
DEFINING = (
    "environment.env_class", "environment.skyrl_gym.env_configs", "generator.task",
    "generator.harness.command", "generator.harness.function", "generator.harness.grader",
    "trainer.policy.model.", "trainer.policy.model_config_kwargs",
    "trainer.critic.model.", "trainer.critic.model_config_kwargs",
    "trainer.ref.model.", "trainer.ref.model_config_kwargs",
    "trainer.seed", "generator.seed",
    "trainer.train_batch_size", "trainer.policy_mini_batch_size", "trainer.critic_mini_batch_size",
    "trainer.max_prompt_length", "generator.n_samples_per_prompt",
    "trainer.algorithm.advantage_estimator", "trainer.algorithm.policy_loss_type",
    "trainer.distillation.teachers", "trainer.distillation.tokens", "trainer.distillation.kl",
)
"""Settings that a checkpoint and the resuming run must share, as well as the content of the training data (file names
may differ). A name that ends in a dot means the whole section."""

OPERATIONAL = (
    "data.val_data", "data.cache_dir", "trainer.epochs", "trainer.max_training_steps",
    "trainer.project_name", "trainer.run_name", "trainer.run_dir", "trainer.logger",
    "trainer.log_path", "trainer.tags", "trainer.num_logger_train_samples", "trainer.num_logger_eval_samples",
    "trainer.enable_ray_gpu_monitor", "trainer.use_expandable_segments", "trainer.policy.torch_profiler_config.",
    "trainer.ckpt_path", "trainer.ckpt_interval", "trainer.ckpt_async", "trainer.max_ckpts_to_keep",
    "trainer.resume_mode", "trainer.resume_path", "trainer.resume_allow_changes",
    "trainer.export_path", "trainer.hf_save_interval", "trainer.print_example_interval",
    "trainer.curve_bands", "trainer.hooks", "trainer.on_diagnostic", "trainer.show_progress",
    "trainer.dump_data_batch", "trainer.dump_eval_results", "trainer.dump_trajectories", "trainer.dump_token_columns",
    "trainer.max_trajectories_gb", "trainer.compress_trajectories",
    "trainer.eval_batch_size", "trainer.eval_before_train", "trainer.eval_interval",
    "trainer.placement.", "trainer.strategy", "trainer.worker_timeout_seconds", "trainer.stop_timeout_seconds",
    "trainer.max_consecutive_skipped_updates", "trainer.distillation.memory_gb",
    "trainer.micro_train_batch_size_per_gpu", "trainer.micro_forward_batch_size_per_gpu",
    "trainer.max_tokens_per_microbatch", "trainer.use_shared_prefixes", "trainer.logprobs_chunk_size",
    "trainer.gradient_checkpointing", "trainer.gradient_checkpointing_use_reentrant",
    "trainer.compile_layers",
    "trainer.policy.fsdp_config.", "trainer.policy.sequence_parallel_size", "trainer.policy.use_torch_compile",
    "trainer.critic.fsdp_config.", "trainer.critic.sequence_parallel_size",
    "trainer.ref.fsdp_config.", "trainer.ref.sequence_parallel_size",
    "trainer.policy.megatron_config.tensor_model_parallel_size",
    "trainer.policy.megatron_config.pipeline_model_parallel_size",
    "trainer.policy.megatron_config.context_parallel_size",
    "trainer.policy.megatron_config.expert_model_parallel_size",
    "trainer.policy.megatron_config.expert_tensor_parallel_size",
    "trainer.policy.megatron_config.moe_token_dispatcher_type",
    "trainer.policy.megatron_config.ddp_config.", "trainer.policy.megatron_config.empty_cuda_cache",
    "trainer.critic.megatron_config.tensor_model_parallel_size",
    "trainer.critic.megatron_config.pipeline_model_parallel_size",
    "trainer.critic.megatron_config.context_parallel_size",
    "trainer.critic.megatron_config.expert_model_parallel_size",
    "trainer.critic.megatron_config.expert_tensor_parallel_size",
    "trainer.critic.megatron_config.moe_token_dispatcher_type",
    "trainer.critic.megatron_config.ddp_config.", "trainer.critic.megatron_config.empty_cuda_cache",
    "trainer.ref.megatron_config.tensor_model_parallel_size",
    "trainer.ref.megatron_config.pipeline_model_parallel_size",
    "trainer.ref.megatron_config.context_parallel_size",
    "trainer.ref.megatron_config.expert_model_parallel_size",
    "trainer.ref.megatron_config.expert_tensor_parallel_size",
    "trainer.ref.megatron_config.moe_token_dispatcher_type",
    "deepspeed_config.", "trainer.policy.deepspeed_config.", "trainer.critic.deepspeed_config.",
    "trainer.ref.deepspeed_config.",
    "environment.skyrl_gym.max_env_workers", "environment.skyrl_gym.env_timeout_seconds",
    "generator.eval_sampling_params.", "generator.eval_n_samples_per_prompt",
    "generator.run_engines_locally", "generator.remote_inference_engine_urls", "generator.num_inference_engines",
    "generator.inference_engine_tensor_parallel_size", "generator.inference_engine_pipeline_parallel_size",
    "generator.inference_engine_data_parallel_size", "generator.inference_engine_expert_parallel_size",
    "generator.max_num_seqs", "generator.max_num_batched_tokens", "generator.gpu_memory_utilization",
    "generator.enforce_eager", "generator.enable_prefix_caching", "generator.enable_chunked_prefill",
    "generator.fully_sharded_loras", "generator.engine_init_kwargs",
    "generator.weight_sync_backend", "generator.weight_transfer_threshold_cuda_ipc_GB",
    "generator.weight_sync_strategy", "generator.weight_sync_directory", "generator.weight_sync_verification",
    "generator.weight_sync_canary_interval", "generator.weight_sync_canary_tolerance", "generator.weight_sync_pause",
    "generator.max_requests_per_engine", "generator.max_engine_restarts", "generator.engine_start_timeout_seconds",
    "generator.engine_control_timeout_seconds", "generator.engine_health_interval_seconds",
    "generator.enable_http_endpoint", "generator.http_endpoint_host", "generator.http_endpoint_port",
    "generator.http_endpoint_max_requests", "generator.harness.visible", "generator.harness.max_parallel",
    "generator.harness.pull",
    "generator.served_model_name", "generator.max_rollout_retries", "generator.request_timeout_seconds",
)
"""Settings that the fingerprint ignores: a run restarted with more memory, other intervals or more steps finds its
folder."""

NOT_SAMPLED = (
    *(name for name in OPERATIONAL if name != "generator.engine_init_kwargs"),
    "data.train_data",  # a path: the content is compared
    "trainer.policy.optimizer_config.", "trainer.policy.megatron_config.",
    "trainer.critic.", "trainer.ref.", "trainer.algorithm.", "trainer.fully_async.", "trainer.distillation.",
    "trainer.update_epochs_per_batch", "trainer.update_ref_every_epoch",
    "trainer.use_sample_packing", "trainer.sequence_parallel_backend", "trainer.flash_attn",
    "generator.remote_inference_engine_api_key_file",
)
"""Settings that change neither samples nor their rewards: a resumed run may change them and still train groups that
were generated before. All unlisted settings count, so that new ones are covered by default."""

_PATHS = (
    "data.train_data", "trainer.policy.model.path", "trainer.critic.model.path", "trainer.ref.model.path",
    "generator.model_name", "generator.task",
)
# fmt: on


def flatten_settings(config: object) -> dict[str, object]:
    """Return all settings of `config` by full name, as JSON values."""
    values = {name: to_dict(getattr(section, field.name)) for name, section, field in iter_settings(config)}
    return json.loads(json.dumps(values, default=str))


def compute_settings_fingerprint(config: object) -> str:
    """Return 8 hex digits of a hash over all settings that are not operational.

    Existing paths are made absolute, so that `data.jsonl` in two folders gives two experiments.
    """
    settings = {name: value for name, value in flatten_settings(config).items() if not is_among(name, OPERATIONAL)}
    for name in _PATHS:
        if name in settings:
            settings[name] = _to_absolute_path(settings[name])
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]


def fill_fingerprint(config: object) -> None:
    """Replace the placeholder in all text settings of `config`, in place."""
    texts = [
        (section, field.name)
        for _, section, field in iter_settings(config)
        if isinstance(value := getattr(section, field.name), str) and PLACEHOLDER in value
    ]
    if texts:
        fingerprint = compute_settings_fingerprint(config)
        for section, name in texts:
            setattr(section, name, getattr(section, name).replace(PLACEHOLDER, fingerprint))


def _to_absolute_path(value: object) -> object:
    if isinstance(value, list):
        return [_to_absolute_path(item) for item in value]
    path = os.path.abspath(os.path.expanduser(value)) if isinstance(value, str) else ""
    return path if os.path.exists(path) else value

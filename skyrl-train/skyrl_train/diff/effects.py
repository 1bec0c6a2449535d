"""Which part of a step a setting or a library changes first. Knows names of settings, no runs."""

from dataclasses import dataclass

from skyrl_train.config.typed import is_among
from skyrl_train.diff.parting import Stage

START, PROMPTS, GENERATION, ENVIRONMENT = Stage.START, Stage.PROMPTS, Stage.GENERATION, Stage.ENVIRONMENT
SCORES, ADVANTAGES, UPDATE, WEIGHTS = Stage.SCORES, Stage.ADVANTAGES, Stage.UPDATE, Stage.WEIGHTS
EVALUATION = Stage.EVALUATION

# fmt: off
WITHOUT_EFFECT = (
    "data.train_data",  # a place: the content is compared
    "trainer.project_name", "trainer.run_name", "trainer.run_dir", "trainer.logger",
    "trainer.ckpt_path", "trainer.ckpt_interval", "trainer.ckpt_async", "trainer.max_ckpts_to_keep",
    "trainer.resume_mode", "trainer.resume_path", "trainer.resume_allow_changes",
    "trainer.export_path", "trainer.hf_save_interval", "trainer.print_example_interval", "trainer.curve_bands",
    "trainer.dump_data_batch", "trainer.dump_eval_results", "trainer.dump_trajectories",
    "trainer.worker_timeout_seconds", "trainer.max_consecutive_skipped_updates", "trainer.distillation.memory_gb",
    "trainer.algorithm.first_ratio_tolerance",
    "trainer.policy.optimizer_config.offload_after_step", "trainer.critic.optimizer_config.offload_after_step",
    "generator.remote_inference_engine_api_key_file", "generator.served_model_name",
    "generator.weight_sync_directory", "generator.weight_sync_verification", "generator.weight_sync_canary_interval",
    "generator.weight_sync_canary_tolerance", "generator.weight_transfer_threshold_cuda_ipc_GB",
    "generator.gpu_memory_utilization", "generator.max_engine_restarts", "generator.engine_start_timeout_seconds",
    "generator.engine_control_timeout_seconds", "generator.engine_health_interval_seconds",
    "generator.enable_http_endpoint", "generator.http_endpoint_host", "generator.http_endpoint_port",
    "generator.http_endpoint_max_requests",
    "environment.skyrl_gym.max_env_workers",
)
"""Names, places, addresses, intervals of saving, deadlines: never the cause of another number."""
# fmt: on


@dataclass(frozen=True)
class Effect:
    """Effect of a setting.

    Args:
        stages: parts of a step that it may change first, the likeliest first.
        rounding: True if it changes the order or precision of a computation and not what is computed.
    """

    stages: tuple[Stage, ...]
    rounding: bool = False


def _effect(names: str, *stages: Stage, rounding: bool = False) -> tuple[tuple[str, ...], Effect]:
    return tuple(names.split()), Effect(stages, rounding)


_EFFECTS = (
    _effect("trainer.seed", PROMPTS, START, UPDATE, GENERATION),
    _effect("generator.seed", GENERATION),
    _effect("trainer.policy.model.lora.", START, SCORES, WEIGHTS, UPDATE),
    _effect("trainer.policy.model. trainer.policy.model_config_kwargs", START, SCORES, GENERATION),
    _effect("trainer.ref.model. trainer.ref.model_config_kwargs", SCORES, UPDATE),
    _effect("trainer.critic.model. trainer.critic.model_config_kwargs", SCORES, UPDATE),
    _effect("trainer.algorithm.value_head_prefix", SCORES),
    _effect("generator.model_dtype", START, GENERATION, rounding=True),
    _effect(
        """trainer.train_batch_size trainer.max_prompt_length trainer.disable_fast_tokenizer
        generator.n_samples_per_prompt generator.chat_template. generator.chat_template_kwargs
        trainer.algorithm.dynamic_sampling.""",
        PROMPTS,
        ENVIRONMENT,
    ),
    _effect("trainer.fully_async.", PROMPTS, GENERATION, WEIGHTS),
    _effect("generator.sampling_params. generator.max_input_length", GENERATION, ENVIRONMENT),
    _effect("generator.eval_ trainer.eval_ data.val_data", EVALUATION),
    _effect("environment.env_class generator.task", ENVIRONMENT, PROMPTS, GENERATION),
    _effect(
        """environment. generator.max_turns generator.use_conversation_multi_turn generator.max_rollout_retries
        generator.append_eos_token_after_stop_str_in_multi_turn generator.step_wise_trajectories
        generator.merge_stepwise_output generator.zero_reward_on_non_stop generator.request_timeout_seconds
        generator.apply_overlong_filtering generator.overlong_filtering_by""",
        ENVIRONMENT,
        PROMPTS,
    ),
    _effect("generator.", GENERATION, START, rounding=True),  # engines, their memory and weight sync
    _effect(
        """trainer.micro_forward_batch_size_per_gpu trainer.micro_train_batch_size_per_gpu
        trainer.max_tokens_per_microbatch trainer.use_sample_packing trainer.logprobs_chunk_size trainer.flash_attn
        trainer.strategy trainer.sequence_parallel_backend trainer.gradient_checkpointing
        trainer.gradient_checkpointing_use_reentrant trainer.placement. deepspeed_config.
        trainer.policy.fsdp_config. trainer.policy.megatron_config. trainer.policy.deepspeed_config.
        trainer.critic.fsdp_config. trainer.critic.megatron_config. trainer.critic.deepspeed_config.
        trainer.ref.fsdp_config. trainer.ref.megatron_config. trainer.ref.deepspeed_config.
        trainer.policy.sequence_parallel_size trainer.critic.sequence_parallel_size trainer.ref.sequence_parallel_size
        trainer.policy.use_torch_compile""",
        SCORES,
        UPDATE,
        WEIGHTS,
        rounding=True,
    ),
    _effect("trainer.bf16", SCORES, START, UPDATE, WEIGHTS, rounding=True),
    _effect("trainer.policy.routing_replay trainer.policy.sampling_mask_replay", SCORES, UPDATE, GENERATION),
    _effect("trainer.policy.optimizer_config. trainer.critic.optimizer_config.", UPDATE, WEIGHTS),
    _effect("trainer.max_training_steps trainer.epochs", UPDATE, WEIGHTS),  # by the schedule of learning rates
    _effect("trainer.update_ref_every_epoch", SCORES, UPDATE),
    _effect(
        "trainer.policy_mini_batch_size trainer.critic_mini_batch_size trainer.update_epochs_per_batch",
        ADVANTAGES,
        UPDATE,
        WEIGHTS,
        SCORES,
    ),
    _effect(
        """trainer.algorithm.policy_loss_type trainer.algorithm.eps_clip_low trainer.algorithm.eps_clip_high
        trainer.algorithm.clip_ratio_c trainer.algorithm.value_clip trainer.algorithm.use_entropy_loss
        trainer.algorithm.entropy_loss_coef trainer.algorithm.use_kl_loss trainer.algorithm.cispo.
        trainer.algorithm.sapo. trainer.algorithm.clip_cov. trainer.algorithm.kl_cov. trainer.algorithm.dppo.
        trainer.algorithm.decoupled_ppo. trainer.algorithm.dpo.""",
        UPDATE,
        WEIGHTS,
        ADVANTAGES,
        SCORES,
    ),
    _effect("trainer.algorithm. trainer.distillation.", ADVANTAGES, UPDATE, WEIGHTS, SCORES),
)
"""The first entry that fits a setting counts."""

_ANYTHING = Effect(tuple(Stage))


def effect_of(setting: str) -> Effect:
    """Return the effect of a setting by its full name; an unknown one may change anything."""
    return next((effect for names, effect in _EFFECTS if _is_below(setting, names)), _ANYTHING)


def has_no_effect(setting: str) -> bool:
    """Return True for names, places and the like."""
    return is_among(setting, WITHOUT_EFFECT)


def _is_below(setting: str, names: tuple[str, ...]) -> bool:
    """Return True if the setting is one of the names, or below one: `generator.eval_` stands for all that begin so, and
    what is below a name without a dot is an entry of that setting."""
    return any(
        setting.startswith(name) if name.endswith((".", "_")) else setting == name or setting.startswith(f"{name}.")
        for name in names
    )


# fmt: off
_NUMERIC = (START, GENERATION, SCORES, UPDATE, WEIGHTS)
_LIBRARIES: tuple[tuple[tuple[str, ...], tuple[Stage, ...]], ...] = (
    (("tokenizers", "sentencepiece", "jinja2", "tiktoken", "datasets", "pyarrow"), (PROMPTS, ENVIRONMENT)),
    (("transformers", "peft", "safetensors", "accelerate"), (*_NUMERIC, PROMPTS)),
    (("vllm", "sglang", "sgl-kernel", "flashinfer", "xgrammar"), (GENERATION,)),
    (("torch", "triton", "numpy", "flash-attn", "nvidia", "cuda", "mkl", "intel"), _NUMERIC),
    (("deepspeed", "megatron", "transformer-engine"), (SCORES, UPDATE, WEIGHTS)),
    (("skyrl-gym", "skyrl-agent", "sympy", "math-verify", "latex2sympy"), (ENVIRONMENT, PROMPTS)),
    (("skyrl-train",), tuple(Stage)),
)
# fmt: on


def stages_of_library(name: str) -> tuple[Stage, ...]:
    """Return the parts of a step that a library computes; none for those that a run does not compute with."""
    return next((stages for prefixes, stages in _LIBRARIES if name.startswith(prefixes)), ())

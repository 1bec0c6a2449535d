"""Table of the part of a step that a setting or a library changes first. Knows names of settings, no runs."""

from dataclasses import dataclass
from functools import cache

from skyrl_inspect.diff.parting import StepPart
from skyrl_train.config.engine_kinds import EngineRegistry
from skyrl_train.config.training_backends import TrainingBackendRegistry
from skyrl_train.config.typed import is_among

START, PROMPTS, GENERATION, ENVIRONMENT = StepPart.START, StepPart.PROMPTS, StepPart.GENERATION, StepPart.ENVIRONMENT
SCORES, ADVANTAGES, UPDATE, WEIGHTS = StepPart.SCORES, StepPart.ADVANTAGES, StepPart.UPDATE, StepPart.WEIGHTS
EVALUATION = StepPart.EVALUATION

# fmt: off
WITHOUT_EFFECT = (
    "data.train_data", "data.cache_dir",  # places: the content is compared
    "trainer.project_name", "trainer.run_name", "trainer.run_dir", "trainer.logger", "trainer.log_path", "trainer.tags",
    "trainer.num_logger_train_samples", "trainer.num_logger_eval_samples",
    "trainer.use_expandable_segments", "trainer.enable_ray_gpu_monitor",
    "trainer.ckpt_path", "trainer.ckpt_interval", "trainer.ckpt_async", "trainer.max_ckpts_to_keep",
    "trainer.resume_mode", "trainer.resume_path", "trainer.resume_allow_changes",
    "trainer.export_path", "trainer.hf_save_interval", "trainer.print_example_interval", "trainer.curve_bands",
    "trainer.on_diagnostic",
    "trainer.hooks", "trainer.show_progress",
    "trainer.dump_data_batch", "trainer.dump_eval_results", "trainer.dump_trajectories", "trainer.dump_token_columns",
    "trainer.max_trajectories_gb",
    "trainer.compress_trajectories",
    "trainer.worker_timeout_seconds", "trainer.stop_timeout_seconds", "trainer.max_consecutive_skipped_updates",
    "trainer.distillation.memory_gb",
    "trainer.algorithm.first_ratio_tolerance", "trainer.algorithm.max_rollout_gap",
    "trainer.policy.optimizer_config.offload_after_step", "trainer.critic.optimizer_config.offload_after_step",
    "trainer.placement.offload",
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
        stages: parts of a step that it may change first, most likely first.
        rounding: True if it changes only the order or precision of a computation.
    """

    stages: tuple[StepPart, ...]
    rounding: bool = False


def _make_effect(names: str, *stages: StepPart, rounding: bool = False) -> tuple[tuple[str, ...], Effect]:
    return tuple(names.split()), Effect(stages, rounding)


_EFFECTS = (
    _make_effect("trainer.seed", PROMPTS, START, UPDATE, GENERATION),
    _make_effect("generator.seed", GENERATION),
    _make_effect("trainer.policy.model.lora.", START, SCORES, WEIGHTS, UPDATE),
    _make_effect("trainer.policy.model. trainer.policy.model_config_kwargs", START, SCORES, GENERATION),
    _make_effect("trainer.ref.model. trainer.ref.model_config_kwargs", SCORES, UPDATE),
    _make_effect("trainer.critic.model. trainer.critic.model_config_kwargs", SCORES, UPDATE),
    _make_effect("trainer.algorithm.value_head_prefix", SCORES),
    _make_effect("generator.model_dtype", START, GENERATION, rounding=True),
    _make_effect(
        """trainer.train_batch_size trainer.max_prompt_length trainer.disable_fast_tokenizer
        generator.n_samples_per_prompt generator.chat_template. generator.chat_template_kwargs
        trainer.algorithm.dynamic_sampling.""",
        PROMPTS,
        ENVIRONMENT,
    ),
    _make_effect("trainer.fully_async.", PROMPTS, GENERATION, WEIGHTS),
    _make_effect("generator.sampling_params. generator.max_input_length", GENERATION, ENVIRONMENT),
    _make_effect("generator.eval_ trainer.eval_ data.val_data", EVALUATION),
    _make_effect("environment.env_class generator.task generator.harness.", ENVIRONMENT, PROMPTS, GENERATION),
    _make_effect(
        """environment. generator.max_turns generator.use_conversation_multi_turn generator.max_rollout_retries
        generator.append_eos_token_after_stop_str_in_multi_turn generator.step_wise_trajectories
        generator.merge_stepwise_output generator.zero_reward_on_non_stop generator.request_timeout_seconds
        generator.apply_overlong_filtering generator.overlong_""",
        ENVIRONMENT,
        PROMPTS,
    ),
    _make_effect("generator.", GENERATION, START, rounding=True),  # engines, their memory and weight sync
    _make_effect(
        """trainer.micro_forward_batch_size_per_gpu trainer.micro_train_batch_size_per_gpu
        trainer.max_tokens_per_microbatch trainer.use_sample_packing trainer.use_shared_prefixes
        trainer.logprobs_chunk_size trainer.flash_attn
        trainer.strategy trainer.sequence_parallel_backend trainer.gradient_checkpointing
        trainer.gradient_checkpointing_use_reentrant trainer.compile_layers trainer.placement.
        deepspeed_config.""",
        SCORES,
        UPDATE,
        WEIGHTS,
        rounding=True,
    ),
    _make_effect("trainer.bf16", SCORES, START, UPDATE, WEIGHTS, rounding=True),
    _make_effect("trainer.policy.routing_replay trainer.policy.sampling_mask_replay", SCORES, UPDATE, GENERATION),
    _make_effect("trainer.policy.optimizer_config. trainer.critic.optimizer_config.", UPDATE, WEIGHTS),
    # Sections of training backends, shards, compilation.
    _make_effect("trainer.policy. trainer.critic. trainer.ref.", SCORES, UPDATE, WEIGHTS, rounding=True),
    _make_effect("trainer.max_training_steps trainer.epochs", UPDATE, WEIGHTS),  # by the schedule of learning rates
    _make_effect("trainer.update_ref_every_epoch", SCORES, UPDATE),
    _make_effect(
        "trainer.policy_mini_batch_size trainer.critic_mini_batch_size trainer.update_epochs_per_batch",
        ADVANTAGES,
        UPDATE,
        WEIGHTS,
        SCORES,
    ),
    _make_effect(
        """trainer.algorithm.advantage_estimator trainer.algorithm.grpo_norm_by_std
        trainer.algorithm.advantage_batch_normalize trainer.algorithm.gamma trainer.algorithm.lambd
        trainer.algorithm.zero_variance_filter trainer.algorithm.overlong_buffer. trainer.algorithm.loss_reduction
        trainer.algorithm.max_seq_len trainer.algorithm.off_policy_correction. trainer.algorithm.use_tis
        trainer.algorithm.tis_imp_ratio_cap trainer.algorithm.use_kl_in_reward trainer.algorithm.kl_loss_coef
        trainer.algorithm.kl_estimator_type trainer.algorithm.kl_ctrl. trainer.distillation.""",
        ADVANTAGES,
        UPDATE,
        WEIGHTS,
        SCORES,
    ),
    _make_effect("trainer.algorithm.", UPDATE, WEIGHTS, ADVANTAGES, SCORES),  # the loss, and the section of each loss
)
"""The first entry that fits a setting counts."""

_ANYTHING = Effect(tuple(StepPart))


def get_effect(setting: str) -> Effect:
    """Return the effect of a setting by its full name; an unknown one may change anything."""
    return next((effect for names, effect in _EFFECTS if _is_below(setting, names)), _ANYTHING)


def has_no_effect(setting: str) -> bool:
    """Return True for names, places and the like."""
    return is_among(setting, WITHOUT_EFFECT)


def _is_below(setting: str, names: tuple[str, ...]) -> bool:
    """Return True if the setting is one of the names or below one. A name that ends in `_` is a prefix; entries of a
    dict setting are below its name.
    """
    return any(
        setting.startswith(name) if name.endswith((".", "_")) else setting == name or setting.startswith(f"{name}.")
        for name in names
    )


# fmt: off
_NUMERIC = (START, GENERATION, SCORES, UPDATE, WEIGHTS)
_LIBRARIES: tuple[tuple[tuple[str, ...], tuple[StepPart, ...]], ...] = (
    (("tokenizers", "sentencepiece", "jinja2", "tiktoken", "datasets", "pyarrow"), (PROMPTS, ENVIRONMENT)),
    (("transformers", "peft", "safetensors", "accelerate"), (*_NUMERIC, PROMPTS)),
    (("flashinfer", "xgrammar", "sgl-kernel"), (GENERATION,)),
    (("torch", "triton", "numpy", "flash-attn", "nvidia", "cuda", "mkl", "intel"), _NUMERIC),
    (("transformer-engine",), (SCORES, UPDATE, WEIGHTS)),
    (("skyrl-gym", "skyrl-agent", "sympy", "math-verify", "latex2sympy"), (ENVIRONMENT, PROMPTS)),
    (("skyrl-train",), tuple(StepPart)),
)
# fmt: on


def get_library_stages(name: str) -> tuple[StepPart, ...]:
    """Return the parts of a step that a library computes; none for those that a run does not compute with."""
    known = next((stages for prefixes, stages in _LIBRARIES if name.startswith(prefixes)), ())
    return known or next((stages for library, stages in _list_backend_libraries() if name.startswith(library)), ())


@cache
def _list_backend_libraries() -> tuple[tuple[str, tuple[StepPart, ...]], ...]:
    """Return the libraries that engines and training backends declare, and what they compute."""
    kinds = ((EngineRegistry, (GENERATION,)), (TrainingBackendRegistry, (SCORES, UPDATE, WEIGHTS)))
    return tuple(
        (library.partition(".")[0], stages)
        for registry, stages in kinds
        for registration in registry.list_registrations().values()
        if (library := registration.requires.library) is not None
    )

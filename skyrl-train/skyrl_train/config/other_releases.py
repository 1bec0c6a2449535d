"""Settings and choices of other SkyRL releases, DeepSpeed or Megatron that are unsupported or renamed here.

Nothing is ignored silently. A renamed setting sets its new name. Any other is an error that gives the reason and the
alternative, unless the value requests the existing behaviour. Remove an entry when the feature is implemented.
"""

import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from skyrl_train.errors import ConfigError


@dataclass(frozen=True)
class Refusal:
    """Refusal of a setting known from other releases."""

    reason: str
    """Reason for the refusal: what is not implemented or done differently, and the alternative."""

    accepted: tuple[object, ...] | None = ()
    """Accepted values, which request the existing behaviour. None: all values."""

    warned: tuple[object, ...] | None = ()
    """Values that affect only speed: accepted with a warning. None: all values not in `accepted`."""


@dataclass(frozen=True)
class Moved:
    """Setting that has another name here."""

    setting: str
    """Name here."""

    values: tuple[tuple[object, object], ...] = ()
    """Pairs (value there, value here) that differ."""

    accepted: tuple[object, ...] = ()
    """Values that leave the setting unchanged."""


@dataclass(frozen=True)
class Repeated:
    """Setting that exists twice in other releases; its value must equal the setting here."""

    setting: str
    """Name here."""

    reason: str
    """Reason why it cannot differ."""

    accepted: tuple[object, ...] = ()
    """Values that mean the value of the setting here."""


@dataclass(frozen=True)
class Unset:
    """Values of an existing setting that mean its default here."""

    values: tuple[object, ...] = (None,)


Entry = Refusal | Moved | Repeated | Unset


def _build_refusal(reason: str, *accepted: object) -> Refusal:
    """Build the refusal of an unsupported feature; values that disable it are accepted."""
    return Refusal(reason, (False, None, *accepted))


_NO_BALANCE = "the loss comes from the RL objective alone; remove the setting"
_NO_PROFILE = "only the policy is profiled: use trainer.policy.torch_profiler_config"
_NO_MTP = "multi-token prediction heads are not trained"
_ANY_LAYOUT = "checkpoints hold full tensors, can be loaded in any layout, and are written by all ranks"
_ASYNC = "checkpoints have one format; use trainer.ckpt_async=true to write them concurrently with training"
_ROPE = "rotary embeddings of a loaded model are not changed; use model_config_kwargs"
_NOT_TRAINED = "the reference model is not optimized; remove the setting"
_STEPPED = (
    "each data-parallel rank keeps its shard of the optimizer state on its GPU: use more ranks, or "
    "trainer.strategy=deepspeed"
)

_MEGATRON = {
    "lora_config": Refusal("use trainer.strategy=fsdp2 or deepspeed, which train adapters (trainer.policy.model.lora)"),
    "lora_config.lora_type": Refusal("use trainer.strategy=fsdp2 or deepspeed for adapters", ("lora",)),
    "lora_config.merge_lora": Refusal("use trainer.strategy=fsdp2 or deepspeed for adapters", (True,)),
    "optimizer_config_kwargs": Refusal("AdamW is set by optimizer_config"),
    "optimizer_config_kwargs.overlap_cpu_optimizer_d2h_h2d": _build_refusal(_STEPPED),
    "optimizer_config_kwargs.optimizer_cpu_offload": _build_refusal(_STEPPED),
    "optimizer_config_kwargs.optimizer_offload_fraction": Refusal(_STEPPED, (0, None)),
    "optimizer_config_kwargs.use_precision_aware_optimizer": _build_refusal(
        "moments and weights of the optimizer are float32"
    ),
    "moe_router_load_balancing_type": Refusal(_NO_BALANCE, ("none", None)),
    "moe_aux_loss_coeff": Refusal(_NO_BALANCE, (0, None)),
    "moe_grouped_gemm": Refusal(
        "its kernels need Transformer Engine; experts are computed one by one, which is slower",
        (False, None),
        warned=(True,),
    ),
    "moe_router_score_function": Refusal("it is read from the model's config.json", (None, "softmax")),
    "moe_router_enable_expert_bias": _build_refusal("it is read from the model's config.json"),
    "moe_router_dtype": Refusal(
        "routers compute in float32; use transformer_config_kwargs.moe_router_dtype to change it", ("fp32",)
    ),
    "moe_enable_routing_replay": _build_refusal("only the policy replays routes: use trainer.policy.routing_replay"),
    "moe_per_layer_logging": _build_refusal("expert loads are logged aggregated over all layers"),
    "mtp_num_layers": Refusal(_NO_MTP, (0, None)),
    "mtp_loss_weight": Refusal(_NO_MTP, (0.1, None)),
    "mtp_loss_chunk_size": Refusal(_NO_MTP, (1024, None)),
    "mtp_loss_topk": Refusal(_NO_MTP, (None,)),
    "dist_ckpt_optim_fully_reshardable": Refusal(_ANY_LAYOUT, (True, False)),
    "async_dist_ckpt_save": _build_refusal(_ASYNC),
    "async_dist_ckpt_strategy": Refusal(_ASYNC, ("mcore", None)),
    "async_save_prestage_to_cpu": _build_refusal(_ASYNC),
    "hf_export_config": Refusal("rank 0 writes exports"),
    "hf_export_config.distributed_save": _build_refusal("rank 0 writes exports; checkpoints are written by all ranks"),
    "hf_export_config.save_every_n_ranks": Refusal("rank 0 writes exports", (1,)),
}
"""Settings of SkyRL's `megatron_config`: for the policy, and for critic and reference unless they have separate
entries.
"""

_COMPUTED = "it is derived from other settings (batch sizes from `trainer`); remove it"
_LOGGED = "trainer.logger selects where metrics are logged"
_DEFAULT = "DeepSpeed's default is used; remove the setting"
_DEEPSPEED = {
    "train.compile": Refusal("DeepCompile is not supported"),
    "train.tensor_parallel": Refusal(
        "tensor parallelism (AutoTP) is not supported; use sequence_parallel_size or stage 3"
    ),
    "train.pipeline": Refusal("pipeline parallelism is not supported; use trainer.strategy=megatron"),
    "train.fp16": Refusal("loss scaling is not supported; use trainer.bf16, which does not need it"),
    "train.fp16.enabled": _build_refusal(
        "loss scaling is not supported; use trainer.bf16, which does not need it", "auto"
    ),
    "train.amp": Refusal("NVIDIA's Apex is not used; use trainer.bf16"),
    "train.amp.enabled": _build_refusal("NVIDIA's Apex is not used; use trainer.bf16", "auto"),
    "train.bf16": Refusal("use trainer.bf16, and torch_autocast.enabled=false for bfloat16 parameters"),
    "train.bf16.enabled": Refusal(
        "use trainer.bf16, and torch_autocast.enabled=false for bfloat16 parameters", ("auto",)
    ),
    "train.optimizer": Refusal("the optimizer is AdamW; configure it with optimizer_config"),
    "train.scheduler": Refusal("use optimizer_config.scheduler and num_warmup_steps"),
    "train.checkpoint": Refusal("checkpoints can be loaded by any strategy and number of ranks; remove the setting"),
    "train.train_batch_size": Refusal(_COMPUTED, ("auto",)),
    "train.train_micro_batch_size_per_gpu": Refusal(_COMPUTED, ("auto",)),
    "train.gradient_accumulation_steps": Refusal(_COMPUTED, ("auto",)),
    "train.steps_per_print": Refusal("it only changes a log line of workers", None),
    "train.dump_state": _build_refusal("it is not supported"),
    "train.memory_breakdown": _build_refusal("it is not supported"),
    "train.prescale_gradients": _build_refusal("use prescale_gradient, the name of the setting in SkyRL"),
    "train.gradient_predivide_factor": Refusal("gradients are averaged over all ranks", (1,)),
    "train.communication_data_type": Refusal("gradients are reduced in their own dtype", (None,)),
    "train.sparse_gradients": _build_refusal("gradients of embeddings are dense"),
    "train.zero_allow_untested_optimizer": Refusal("the optimizer is torch's AdamW", (True, False)),
    "train.zero_force_ds_cpu_optimizer": _build_refusal("the optimizer is torch's AdamW"),
    "train.activation_checkpointing": Refusal("use trainer.gradient_checkpointing"),
    "train.flops_profiler": Refusal("profiling is not supported"),
    "train.flops_profiler.enabled": _build_refusal("profiling is not supported"),
    "train.comms_logger": Refusal("profiling is not supported"),
    "train.comms_logger.enabled": _build_refusal("profiling is not supported"),
    **{f"train.{name}": Refusal(_LOGGED) for name in ("tensorboard", "wandb", "comet", "csv_monitor")},
    **{f"train.{name}.enabled": _build_refusal(_LOGGED) for name in ("tensorboard", "wandb", "comet", "csv_monitor")},
    **{
        f"train.{name}": Refusal("it is not supported")
        for name in ("elasticity", "autotuning", "compression_training", "data_efficiency", "hybrid_engine", "aio")
    },
    "train.zero_optimization.overlap_comm": Refusal(
        "stage 3 overlaps communication; stages 1 and 2 reduce at the optimizer step; remove the setting"
    ),
    "train.zero_optimization.contiguous_gradients": Refusal(_DEFAULT, (True,)),
    "train.zero_optimization.allgather_partitions": Refusal(_DEFAULT, (True,)),
    "train.zero_optimization.allgather_bucket_size": Refusal(_DEFAULT, (500_000_000, "auto")),
    "train.zero_optimization.reduce_scatter": Refusal(_DEFAULT, (True,)),
    "train.zero_optimization.ignore_unused_parameters": Refusal(_DEFAULT, (True,)),
    "train.zero_optimization.load_from_fp32_weights": Refusal(_DEFAULT, (True,)),
    "train.zero_optimization.elastic_checkpoint": _build_refusal("checkpoints can be loaded on any number of ranks"),
    "train.zero_optimization.stage3_gather_16bit_weights_on_model_save": Refusal(
        "exports gather all weights", (True, False)
    ),
    "train.zero_optimization.cpu_offload": _build_refusal("use its replacement, offload_optimizer.device=cpu"),
    "train.zero_optimization.zero_quantized_nontrainable_weights": _build_refusal("quantized ZeRO++ is not supported"),
    "train.zero_optimization.mics_shard_size": Refusal("MiCS is not supported; use trainer.strategy=fsdp2", (-1,)),
    "train.zero_optimization.zenflow": Refusal("ZenFlow is not supported", (None,)),
    "eval.gradient_clipping": Refusal("models that only score have no gradients", None),
    "eval.prescale_gradient": Refusal("models that only score have no gradients", None),
    "eval.data_types": Refusal("models that only score have no gradients", None),
    "eval.wall_clock_breakdown": _build_refusal("it is not supported for models that only score"),
    "eval.zero_optimization.offload_optimizer": Refusal("models that only score have no optimizer", None),
}
"""Settings of DeepSpeed's JSON by their names in the shared groups; entries of `train` are also refused in `eval`."""

_NO_QUANTIZATION = (
    "quantization-aware training is not supported; set the weight dtype of engines with generator.model_dtype"
)
_QUANTIZATION = {
    "fake_int4_qat.enabled": _build_refusal(_NO_QUANTIZATION),
    "fake_int4_qat.group_size": Refusal(_NO_QUANTIZATION, (32,)),
    "fake_int4_qat.symmetric": Refusal(_NO_QUANTIZATION, (True,)),
    "fake_int4_qat.scale_divisor": Refusal(_NO_QUANTIZATION, (7.5,)),
    "fake_int4_qat.q_min": Refusal(_NO_QUANTIZATION, (-8.0,)),
    "fake_int4_qat.bf16_base_path": Refusal(_NO_QUANTIZATION, (None,)),
    "fake_int4_qat": Refusal(_NO_QUANTIZATION),
}
_ONE_ADAPTER = (
    "a run trains one adapter, and engines allocate slots for its versions; for several adapters use skyrl-tx"
)
_ADAPTERS = {
    "lora.lora_sync_path": Refusal("use generator.weight_sync_directory for adapters", ("/tmp/skyrl_lora_sync",)),
    "lora.max_loras": Refusal(_ONE_ADAPTER, (1,)),
    "lora.max_cpu_loras": Refusal(_ONE_ADAPTER, (None,)),
}
_NO_ADAPTERS = "the reference model is the base model without adapters; use trainer.policy.model.lora"
_ADAPTERS_OF_REFERENCE = {
    "lora": Refusal(_NO_ADAPTERS),
    "lora.rank": Refusal(_NO_ADAPTERS, (0,)),
    "lora.alpha": Refusal(_NO_ADAPTERS, (16,)),
    "lora.dropout": Refusal(_NO_ADAPTERS, (0,)),
    "lora.target_modules": Refusal(_NO_ADAPTERS, ("all-linear",)),
    "lora.exclude_modules": Refusal(_NO_ADAPTERS, (None,)),
    "lora.init_method": Refusal(_NO_ADAPTERS, ("kaiming",)),
}
_PRECISION = "use trainer.bf16: it computes in bfloat16 and accumulates gradients in float32"
_SHARDING = {
    "fsdp_config.mixed_precision": Refusal(_PRECISION, (None,)),
    "fsdp_config.mixed_precision.param_dtype": Refusal(_PRECISION, ("bf16",)),
    "fsdp_config.mixed_precision.reduce_dtype": Refusal(_PRECISION, ("fp32",)),
    "fsdp_config.mixed_precision.buffer_dtype": Refusal(_PRECISION, ("fp32",)),
    "fsdp_config.wrap_policy": Refusal("every transformer block is sharded separately; remove the setting", (None,)),
}
_LANGUAGE_MODEL = Refusal(
    "only text models are supported; of a vision-language model, its language model is used", (True, False)
)

_ENGINE = {
    "model_dtype": "model_dtype",
    "run_engines_locally": "run_engines_locally",
    "num_engines": "num_inference_engines",
    "backend": "backend",
    "weight_sync_backend": "weight_sync_backend",
    "weight_transfer_threshold_cuda_ipc_GB": "weight_transfer_threshold_cuda_ipc_GB",
    "tensor_parallel_size": "inference_engine_tensor_parallel_size",
    "pipeline_parallel_size": "inference_engine_pipeline_parallel_size",
    "expert_parallel_size": "inference_engine_expert_parallel_size",
    "data_parallel_size": "inference_engine_data_parallel_size",
    "enable_prefix_caching": "enable_prefix_caching",
    "enable_chunked_prefill": "enable_chunked_prefill",
    "max_num_batched_tokens": "max_num_batched_tokens",
    "enforce_eager": "enforce_eager",
    "fully_sharded_loras": "fully_sharded_loras",
    "gpu_memory_utilization": "gpu_memory_utilization",
    "max_num_seqs": "max_num_seqs",
    "served_model_name": "served_model_name",
    "engine_init_kwargs": "engine_init_kwargs",
    "remote_urls": "remote_inference_engine_urls",
    "enable_http_endpoint": "enable_http_endpoint",
    "http_endpoint_host": "http_endpoint_host",
    "http_endpoint_port": "http_endpoint_port",
}
"""Setting of `generator.inference_engine` -> setting of `generator`."""

_NO_DISAGGREGATION = "every engine does both prefill and decode; use generator.num_inference_engines"

OTHER_RELEASES: dict[str, Entry] = {
    "data.dataloader.num_workers": Refusal("rows are read from memory without loader processes", (None, 0), None),
    "data.dataloader.persistent_workers": Refusal(
        "rows are read from memory without loader processes", (False,), warned=(True,)
    ),
    **{
        f"trainer.{model}.model.{name}": refusal
        for model in ("policy", "critic", "ref")
        for name, refusal in (_QUANTIZATION | _ADAPTERS).items()
    },
    **{f"trainer.ref.model.{name}": refusal for name, refusal in _ADAPTERS_OF_REFERENCE.items()},
    **{
        f"trainer.{model}.{name}": refusal
        for model in ("policy", "critic", "ref")
        for name, refusal in _SHARDING.items()
    },
    "trainer.policy.record_memory": _build_refusal("the CUDA memory history is not recorded"),
    "trainer.policy.language_model_only": _LANGUAGE_MODEL,
    "trainer.policy.inference_only_init": _build_refusal(
        "use skyrl_train.entrypoints.main_generate to evaluate without training"
    ),
    **{f"trainer.policy.megatron_config.{name}": refusal for name, refusal in _MEGATRON.items()},
    "trainer.policy.megatron_config.moe_enable_routing_replay": Moved(
        "trainer.policy.routing_replay", ((True, "R3"),), (False, None)
    ),
    **{
        f"trainer.policy.megatron_config.torch_profiler_config.{name}": Moved(
            f"trainer.policy.torch_profiler_config.{name}", accepted=accepted
        )
        for name, accepted in {"enable": (), "ranks": ([],), "save_path": ()}.items()
    },
    **{
        f"trainer.{model}.megatron_config.torch_profiler_config{name}": refusal
        for model in ("critic", "ref")
        for name, refusal in {"": Refusal(_NO_PROFILE), ".enable": _build_refusal(_NO_PROFILE)}.items()
    },
    **{
        f"trainer.{model}.megatron_config.moe_enable_routing_replay": _MEGATRON["moe_enable_routing_replay"]
        for model in ("critic", "ref")
    },
    "trainer.ref.model.path": Unset(),
    "trainer.ref.language_model_only": _LANGUAGE_MODEL,
    "trainer.ref.megatron_config.ddp_config": Refusal(_NOT_TRAINED),
    "trainer.ref.megatron_config.ddp_config.grad_reduce_in_fp32": Refusal(_NOT_TRAINED, (True,)),
    "trainer.ref.megatron_config.ddp_config.overlap_grad_reduce": Refusal(_NOT_TRAINED, (False,)),
    "trainer.ref.megatron_config.ddp_config.overlap_param_gather": Refusal(_NOT_TRAINED, (False,)),
    "trainer.ref.megatron_config.ddp_config.average_in_collective": Refusal(_NOT_TRAINED, (True,)),
    "trainer.ref.megatron_config.optimizer_config_kwargs": Refusal(_NOT_TRAINED),
    **{
        f"trainer.ref.megatron_config.{name}": Refusal(_NOT_TRAINED, refusal.accepted)
        for name, refusal in _MEGATRON.items()
        if name.startswith("optimizer_config_kwargs.")
    },
    "trainer.ref.megatron_config.freeze_moe_router": Refusal(_NOT_TRAINED, (True, False)),
    "trainer.ref.megatron_config.empty_cuda_cache": Refusal(_NOT_TRAINED, (True, False)),
    "trainer.algorithm.temperature": Repeated(
        "generator.sampling_params.temperature",
        "training computes log-probs under the distribution that was sampled from",
        (None,),
    ),
    "trainer.algorithm.dppo.dppo_type": Moved("trainer.algorithm.dppo.divergence"),
    "trainer.algorithm.overlong_buffer_len": Moved("trainer.algorithm.overlong_buffer.len"),
    "trainer.algorithm.overlong_buffer_penalty_factor": Moved("trainer.algorithm.overlong_buffer.penalty_factor"),
    "trainer.mtp.enabled": _build_refusal(_NO_MTP),
    "trainer.mtp.num_speculative_tokens": Refusal(_NO_MTP, (1,)),
    "trainer.mtp.loss_weight": Refusal(_NO_MTP, (0.1,)),
    "trainer.mtp": Refusal(_NO_MTP),
    "trainer.fully_async.num_parallel_generation_workers": Unset((768,)),
    "trainer.fully_async.simulate_training": _build_refusal("use skyrl_train.entrypoints.simulate"),
    "trainer.fully_async.simulate_training_step_seconds": Refusal("use skyrl_train.entrypoints.simulate", (30,)),
    "trainer.fully_async.simulate_weight_sync_seconds": Refusal("use skyrl_train.entrypoints.simulate", (0,)),
    "trainer.max_tokens_per_microbatch": Unset((-1,)),
    "trainer.remove_microbatch_padding": Moved("trainer.use_sample_packing"),
    "trainer.recompute_old_logprobs_per_minibatch": Refusal(
        "log-probs at the start of a step are computed in the micro-batches of training, so that the "
        "first ratios are 1",
        (True,),
        warned=(False,),
    ),
    "trainer.fused_lm_head_logprob": Refusal(
        "logits are computed in chunks: set their size with trainer.logprobs_chunk_size", (True, False)
    ),
    "trainer.fused_lm_head_logprob_backend": Refusal(
        "log-probs are computed by torch; trainer.policy.use_torch_compile fuses its kernels",
        ("torch",),
        warned=("triton",),
    ),
    "trainer.eval.batch_size": Moved("trainer.eval_batch_size"),
    "trainer.eval.before_train": Moved("trainer.eval_before_train"),
    "trainer.eval.interval": Moved("trainer.eval_interval"),
    "trainer.log_example_interval": Moved("trainer.print_example_interval", accepted=(-1, 0)),
    "trainer.rope_scaling": Refusal(_ROPE, (None,)),
    "trainer.rope_theta": Refusal(_ROPE, (None,)),
    "trainer.num_dummy_steps": Refusal("the full-context memory check is not supported"),
    **{f"generator.inference_engine.{name}": Moved(f"generator.{here}") for name, here in _ENGINE.items()},
    "generator.inference_engine.language_model_only": Moved(
        "generator.engine_init_kwargs.language_model_only", accepted=(False,)
    ),
    "generator.inference_engine.speculative_config": Moved(
        "generator.engine_init_kwargs.speculative_config", accepted=(None,)
    ),
    "generator.inference_engine.enable_return_routed_experts": Moved(
        "trainer.policy.routing_replay", ((True, "R3"),), (False,)
    ),
    "generator.inference_engine.use_expandable_segments": _build_refusal(
        "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the environment that starts the run; "
        "its processes inherit it"
    ),
    "generator.inference_engine.distributed_executor_backend": Refusal(
        "an engine with several GPUs runs one process per GPU, on one machine", ("ray", "mp")
    ),
    "generator.inference_engine.enable_pd": _build_refusal(_NO_DISAGGREGATION),
    "generator.inference_engine.num_prefill": Refusal(_NO_DISAGGREGATION, (0,)),
    "generator.inference_engine.router_init_kwargs": Refusal(
        "the trainer's client balances requests over engines and keeps a conversation on one engine; remove the setting"
    ),
    "generator.use_cache_salt": Refusal("new requests never reuse cached prefixes of older weights", (True,)),
    "generator.external_proxy_url": Refusal("use generator.remote_inference_engine_urls", (None,)),
    "generator.external_server_urls": Refusal("use generator.remote_inference_engine_urls", (None,)),
    "generator.override_existing_update_group": Refusal(
        "an engine that reconnects leaves its previous group; remove the setting", ("auto", "enable")
    ),
    "generator.async_engine": Refusal(
        "engines always serve requests asynchronously; remove the setting", (True,), warned=(False,)
    ),
    "generator.batched": Refusal("engines use continuous batching", (True, False)),
    "generator.vllm_v1_disable_multiproc": Refusal("vLLM engines run in separate processes", (True, False)),
    "generator.enable_ray_prometheus_stats": Refusal(
        "engine metrics are not exported through Ray: they are in metrics.jsonl and trainer.logger", (True, False)
    ),
    "generator.rope_scaling": Refusal(_ROPE, (None,)),
    "generator.rope_theta": Refusal(_ROPE, (None,)),
    "generator.max_input_length": Unset(),
    "generator.eval_sampling_params": Unset(),
    **{
        f"generator.{section}.{name}": unset
        for section in ("sampling_params", "eval_sampling_params")
        for name, unset in {"additional_kwargs": Unset(), "logprobs": Unset((1,))}.items()
    },
    "generator.vision_language_generator": _build_refusal("only text models are supported"),
    "generator.miniswe_config_path": Refusal("the mini-SWE-agent example has its own settings; see examples/"),
    "generator.miniswe_traj_dir": Refusal("the mini-SWE-agent example has its own settings; see examples/"),
    **{f"deepspeed_config.{name}": refusal for name, refusal in _DEEPSPEED.items()},
}
"""Setting, or section that holds it -> its name here, or the reason for its refusal."""

_NVME = {"nvme": "offloading parameters and optimizer state to disk is not supported; use cpu"}
REFUSED_CHOICES: dict[str, dict[str, str]] = {
    "deepspeed_config.train.zero_optimization.offload_param.device": _NVME,
    "deepspeed_config.train.zero_optimization.offload_optimizer.device": _NVME,
    "deepspeed_config.eval.zero_optimization.offload_param.device": _NVME,
    "trainer.policy.megatron_config.moe_token_dispatcher_type": {
        "allgather": "it needs the same number of tokens on every rank, and packed rows differ in length; use alltoall",
        "flex": "its libraries are not installed; use alltoall",
    },
}
"""Setting -> choice of other releases -> reason for the refusal and the alternative."""


def translate_settings(values: Mapping[str, Any], defaults: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    """Rename settings of other releases, and drop those that request the existing behaviour.

    Args:
        defaults: returns the default values.

    Raises:
        ConfigError: a setting is given under two names with different values.
    """
    elsewhere: dict[str, Any] = {}
    settings = _split(values, "", elsewhere)
    for name, value in elsewhere.items():
        entry = OTHER_RELEASES[name]
        if isinstance(entry, Moved):
            here = next((here for there, here in entry.values if there == value), value)
            _move(settings, entry.setting, here, f"{name}={_format_value(value)}", defaults)
        elif isinstance(entry, Repeated):
            expected = _get_value(settings, entry.setting, _get_value(defaults(), entry.setting, None))
            if value != expected:
                raise ConfigError(
                    f"{name}={_format_value(value)} is refused: {entry.reason}; it must be "
                    f"{entry.setting}={_format_value(expected)}, or be removed"
                )
    return settings


def _split(values: Mapping[str, Any], name: str, elsewhere: dict[str, Any]) -> dict[str, Any]:
    """Return the section `name` without settings of other releases. Renamed settings are added to `elsewhere` by their
    new full name."""
    kept: dict[str, Any] = {}
    for key, value in values.items():
        full_name = f"{name}.{key}" if name else str(key)
        entry = OTHER_RELEASES.get(full_name)
        if isinstance(entry, Moved | Repeated):
            if value not in entry.accepted:
                elsewhere[full_name] = value
        elif isinstance(entry, Unset) and value in entry.values:
            continue
        elif isinstance(value, Mapping):
            inner = _split(value, full_name, elsewhere)
            if inner or not (value or is_refused(full_name)):
                kept[key] = inner
        elif not _is_accepted(full_name, value):
            kept[key] = value
    if is_refused(name) and any(key in values and key not in kept for key in ("enabled", "enable")):
        return {}  # a disabled section: its other settings have no effect
    return kept


def _move(
    settings: dict[str, Any], target: str, value: Any, origin: str, defaults: Callable[[], Mapping[str, Any]]
) -> None:
    """Set the setting `target`, in place. An existing value equal to the default counts as unset: Hydra adds all
    defaults.

    Args:
        origin: setting and value of the other release, for errors.
    """
    if isinstance(value, Mapping):  # a dict setting: its entries may be given under both names
        for key, item in value.items():
            _move(settings, f"{target}.{key}", item, origin, defaults)
        return
    *sections, key = target.split(".")
    section = settings
    for part in sections:
        section = section.setdefault(part, {})
    if key in section and section[key] not in (value, _get_value(defaults(), target, value)):
        raise ConfigError(
            f"{origin} means {target}={_format_value(value)}, which is {_format_value(section[key])}: remove one of "
            "them"
        )
    section[key] = value


def _get_value(settings: Mapping[str, Any], name: str, default: Any) -> Any:
    """Return the value of the setting `name`, or `default`."""
    value: Any = settings
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return default
        value = value[part]
    return value


def find_moved_names(section: str) -> list[str]:
    """Return the names in a section that are renamed here."""
    return [name for name, each in OTHER_RELEASES.items() if isinstance(each, Moved) and name.startswith(f"{section}.")]


def is_refused(name: str) -> bool:
    """Return whether `name` is a setting or section of other releases, or in such a section."""
    return _find_entry(name) is not None


def get_refusal_reason(name: str, value: object) -> str | None:
    """Return the error text for the setting or section `name` of other releases, or None if it is not one."""
    if isinstance(value, Mapping) and value:  # accepted values have been removed
        reasons = (get_refusal_reason(f"{name}.{key}", item) for key, item in value.items())
        return next((reason for reason in reasons if reason is not None), None)
    entry = _find_entry(name)
    if entry is None:
        return None
    return f"{name}={_format_value(value)} is refused: {entry[1].reason}"


def _format_value(value: object) -> object:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else value


def get_choice_refusal_reason(name: str, value: object) -> str | None:
    """Return the reason why a choice of other releases is refused for the setting `name`, or None if it is unknown."""
    if isinstance(value, str):
        for each in _get_entry_names(name):
            if value in REFUSED_CHOICES.get(each, {}):
                return f"{name}={value} is refused: {REFUSED_CHOICES[each][value]}"
    return None


def _is_accepted(name: str, value: object) -> bool:
    """Return whether a value requests the existing behaviour."""
    entry = _find_entry(name)
    if entry is None:
        return False
    known, refusal = entry
    if refusal.accepted is None:
        return True
    if known not in _get_entry_names(name):
        return False
    if value in refusal.accepted:
        return True
    if refusal.warned is None or value in refusal.warned:
        warnings.warn(f"{name}={_format_value(value)} has no effect: {refusal.reason}", stacklevel=2)
        return True
    return False


def _find_entry(name: str) -> tuple[str, Refusal] | None:
    """Find the refusal of a setting, or of the innermost section that holds it."""
    for each in _get_entry_names(name):
        while each:
            if isinstance(refusal := OTHER_RELEASES.get(each), Refusal):
                return each, refusal
            each = each.rpartition(".")[0]
    return None


def _get_entry_names(name: str) -> list[str]:
    """Return the table names of a setting that several models or sections have, the most specific first."""
    own = re.sub(r"^trainer\.(policy|critic)\.deepspeed_config", "deepspeed_config.train", name)
    own = re.sub(r"^trainer\.ref\.deepspeed_config", "deepspeed_config.eval", own)
    own = re.sub(r"^generator\.inference_engine\.", "generator.", own)
    shared = re.sub(r"^trainer\.(critic|ref)\.megatron_config", "trainer.policy.megatron_config", own)
    return [name, own, shared.replace("deepspeed_config.eval", "deepspeed_config.train")]

"""Settings and choices that users of other SkyRL releases know and this release does not act on yet.

Nothing is ignored silently: setting one of them is an error that says what it waits for. An entry leaves these tables
in the change that makes it do something.
"""

import re

_NO_BALANCE = "nothing: the loss is the objective's alone, as in other runs that train by reinforcement"
_NO_MTP = "heads that predict several tokens"
_ANY_LAYOUT = "nothing: checkpoints hold whole tensors, fit any layout, and are written by all ranks"
_ROPE = "changing rotary embeddings of a loaded model"

_COMPUTED = "nothing: it follows from other settings"
_DEEPSPEED = {
    "train.compile": "DeepCompile",
    "train.tensor_parallel": "tensor parallelism (AutoTP); use sequence_parallel_size or stage 3",
    "train.pipeline": "pipelines",
    "train.fp16": "loss scaling; trainer.bf16 needs none",
    "train.optimizer": "other optimizers: AdamW is set by optimizer_config",
    "train.scheduler": "nothing: the learning rate is set by optimizer_config",
    "train.bf16": "nothing: set trainer.bf16, and torch_autocast.enabled=false for bfloat16 parameters",
    "train.checkpoint": "nothing: checkpoints are in a format of any strategy and number of ranks",
    "train.train_batch_size": _COMPUTED,
    "train.train_micro_batch_size_per_gpu": _COMPUTED,
    "train.gradient_accumulation_steps": _COMPUTED,
    "train.zero_optimization.overlap_comm": "nothing: stage 3 overlaps, stages 1 and 2 do not",
    "train.zero_optimization.zero_quantized_nontrainable_weights": "quantized ZeRO++",
    "train.zero_optimization.zenflow": "ZenFlow",
    "eval.gradient_clipping": "nothing: what only scores has no gradients",
}
"""Settings of DeepSpeed's JSON, by their names in the shared groups."""

NOT_YET_SUPPORTED: dict[str, str] = {
    "trainer.policy.model.lora.lora_sync_path": "nothing: generator.weight_sync_directory is where adapters are left",
    "trainer.policy.record_memory": "recording of CUDA memory history",
    "trainer.policy.megatron_config.torch_profiler_config": "profiles of single ranks",
    "trainer.policy.megatron_config.lora_config": "nothing: trainer.strategy=fsdp2 and deepspeed train adapters "
    "(trainer.policy.model.lora)",
    "trainer.policy.megatron_config.optimizer_config_kwargs": "nothing: data-parallel ranks divide the state, and "
    "trainer.strategy=deepspeed keeps it in host memory",
    "trainer.policy.megatron_config.moe_router_load_balancing_type": _NO_BALANCE,
    "trainer.policy.megatron_config.moe_aux_loss_coeff": _NO_BALANCE,
    "trainer.policy.megatron_config.moe_grouped_gemm": "layers of Transformer Engine",
    "trainer.policy.megatron_config.moe_router_score_function": "nothing: the model's config has it",
    "trainer.policy.megatron_config.moe_router_enable_expert_bias": "nothing: the model's config has it",
    "trainer.policy.megatron_config.moe_router_dtype": "nothing: routers compute in float32; "
    "transformer_config_kwargs.moe_router_dtype changes it",
    "trainer.policy.megatron_config.moe_enable_routing_replay": "nothing: trainer.policy.routing_replay=R3 does it",
    "trainer.policy.megatron_config.moe_per_layer_logging": "loads of experts by layer",
    "trainer.policy.megatron_config.mtp_num_layers": _NO_MTP,
    "trainer.policy.megatron_config.mtp_loss_weight": _NO_MTP,
    "trainer.policy.megatron_config.mtp_loss_chunk_size": _NO_MTP,
    "trainer.policy.megatron_config.mtp_loss_topk": _NO_MTP,
    "trainer.policy.megatron_config.dist_ckpt_optim_fully_reshardable": _ANY_LAYOUT,
    "trainer.policy.megatron_config.async_dist_ckpt_save": _ANY_LAYOUT,
    "trainer.policy.megatron_config.async_dist_ckpt_strategy": _ANY_LAYOUT,
    "trainer.policy.megatron_config.async_save_prestage_to_cpu": _ANY_LAYOUT,
    "trainer.policy.megatron_config.hf_export_config": "exports that several ranks write",
    "trainer.fully_async.simulate_training": "nothing: see skyrl_train.entrypoints.simulate",
    "trainer.fully_async.simulate_training_step_seconds": "nothing: see skyrl_train.entrypoints.simulate",
    "trainer.fully_async.simulate_weight_sync_seconds": "nothing: see skyrl_train.entrypoints.simulate",
    "generator.use_cache_salt": "nothing: prefixes of other weights are never used by a new request",
    "trainer.rope_scaling": _ROPE,
    "trainer.rope_theta": _ROPE,
    "trainer.num_dummy_steps": "the full-context memory check",
    "generator.external_proxy_url": "nothing: name the servers in generator.remote_inference_engine_urls",
    "generator.external_server_urls": "nothing: name the servers in generator.remote_inference_engine_urls",
    "generator.override_existing_update_group": "nothing: an engine that is connected anew leaves its former group",
    "generator.async_engine": "nothing: engines always serve requests asynchronously",
    "generator.batched": "nothing: engines always batch what arrives together",
    "generator.vllm_v1_disable_multiproc": "an asynchronous vLLM engine inside of one process",
    "generator.enable_ray_prometheus_stats": "metrics of engines through Ray",
    "generator.rope_scaling": _ROPE,
    "generator.rope_theta": _ROPE,
    "generator.miniswe_config_path": "the mini-SWE-agent example",
    "generator.miniswe_traj_dir": "the mini-SWE-agent example",
    **{f"deepspeed_config.{key}": reason for key, reason in _DEEPSPEED.items()},
}
"""A setting, or the section that holds it -> what it waits for."""

_NVME = {"nvme": "is not supported yet: parameters and optimizer state on disk; use cpu"}
NOT_YET_SUPPORTED_VALUES: dict[str, dict[str, str]] = {
    "deepspeed_config.train.zero_optimization.offload_param.device": _NVME,
    "deepspeed_config.train.zero_optimization.offload_optimizer.device": _NVME,
    "deepspeed_config.eval.zero_optimization.offload_param.device": _NVME,
}
"""A setting -> a choice known from other releases -> why it is refused and what to use."""


def reason_not_supported(name: str) -> str | None:
    """Return the work that the setting `name` waits for; None if it is not one of these settings nor inside of one."""
    name = _shared_name(name)
    for entry, reason in NOT_YET_SUPPORTED.items():
        if name == entry or name.startswith(entry + "."):
            return reason
    return None


def reason_value_not_supported(name: str, value: object) -> str | None:
    """Return why a choice known from other releases is refused for the setting `name`; None if it is not known."""
    return NOT_YET_SUPPORTED_VALUES.get(_shared_name(name), {}).get(value) if isinstance(value, str) else None


def _shared_name(name: str) -> str:
    """Return the name of a model's own DeepSpeed setting in the group that it shares with others."""
    name = re.sub(r"^trainer\.(policy|critic)\.deepspeed_config", "deepspeed_config.train", name)
    return re.sub(r"^trainer\.ref\.deepspeed_config", "deepspeed_config.eval", name)

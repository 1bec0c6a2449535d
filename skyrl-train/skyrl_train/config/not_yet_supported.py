"""Settings and choices that users of other SkyRL releases know and this release does not act on yet.

Nothing is ignored silently: setting one of them is an error that says what it waits for. An entry leaves these tables
in the change that makes it do something.
"""

_MEGATRON = "the Megatron backend"
_VLLM = "the vLLM engine"
_SEVERAL_GPUS = "engines that span several GPUs (vLLM)"
_REMOTE = "remote rollout engines"
_ENDPOINT = "the OpenAI-compatible endpoint"
_ROPE = "changing rotary embeddings of a loaded model"

NOT_YET_SUPPORTED: dict[str, str] = {
    "trainer.policy.model.lora.lora_sync_path": "sending adapters alone to the engines; merged weights are sent",
    "trainer.policy.record_memory": "recording of CUDA memory history",
    "trainer.policy.megatron_config": _MEGATRON,
    "trainer.ref.megatron_config": _MEGATRON,
    "trainer.fully_async": "the fully asynchronous trainer",
    "trainer.rope_scaling": _ROPE,
    "trainer.rope_theta": _ROPE,
    "trainer.num_dummy_steps": "the full-context memory check",
    "generator.run_engines_locally": _REMOTE,
    "generator.remote_inference_engine_urls": _REMOTE,
    "generator.external_proxy_url": _REMOTE,
    "generator.external_server_urls": _REMOTE,
    "generator.override_existing_update_group": _REMOTE,
    "generator.inference_engine_tensor_parallel_size": _SEVERAL_GPUS,
    "generator.inference_engine_pipeline_parallel_size": _SEVERAL_GPUS,
    "generator.inference_engine_expert_parallel_size": _SEVERAL_GPUS,
    "generator.inference_engine_data_parallel_size": _SEVERAL_GPUS,
    "generator.async_engine": f"{_VLLM}; the native engine always serves requests asynchronously",
    "generator.batched": f"{_VLLM}; the native engine always batches what arrives together",
    "generator.vllm_v1_disable_multiproc": _VLLM,
    "generator.enable_prefix_caching": _VLLM,
    "generator.enable_chunked_prefill": _VLLM,
    "generator.max_num_batched_tokens": _VLLM,
    "generator.enforce_eager": _VLLM,
    "generator.fully_sharded_loras": _VLLM,
    "generator.enable_ray_prometheus_stats": _VLLM,
    "generator.gpu_memory_utilization": _VLLM,
    "generator.enable_http_endpoint": _ENDPOINT,
    "generator.http_endpoint_host": _ENDPOINT,
    "generator.http_endpoint_port": _ENDPOINT,
    "generator.served_model_name": _ENDPOINT,
    "generator.rope_scaling": _ROPE,
    "generator.rope_theta": _ROPE,
    "generator.miniswe_config_path": "the mini-SWE-agent example",
    "generator.miniswe_traj_dir": "the mini-SWE-agent example",
}
"""A setting, or the section that holds it -> what it waits for."""

NOT_YET_SUPPORTED_VALUES: dict[str, dict[str, str]] = {
    "trainer.strategy": {
        "fsdp": "means FSDP version 1, which is not supported; use fsdp2, which takes the same settings",
        "megatron": f"is not supported yet: {_MEGATRON}; use fsdp2",
        "deepspeed": "is not supported yet: the DeepSpeed backend; use fsdp2",
    },
    "generator.backend": {
        "vllm": f"is not supported yet: {_VLLM}; use native, or auto for the best engine there is",
        "sglang": "is not supported yet: the SGLang engine; use native, or auto for the best engine there is",
    },
}
"""A setting -> a choice known from other releases -> why it is refused and what to use."""


def reason_not_supported(name: str) -> str | None:
    """What the setting `name` waits for, or None if it is not one of these settings nor inside of one."""
    for entry, reason in NOT_YET_SUPPORTED.items():
        if name == entry or name.startswith(entry + "."):
            return reason
    return None

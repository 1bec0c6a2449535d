"""Settings and choices that users of other SkyRL releases know and this release does not act on yet.

Nothing is ignored silently: setting one of them is an error that says what it waits for. An entry leaves these tables
in the change that makes it do something.
"""

_MEGATRON = "the Megatron backend"
_ROPE = "changing rotary embeddings of a loaded model"

NOT_YET_SUPPORTED: dict[str, str] = {
    "trainer.policy.model.lora.lora_sync_path": "nothing: generator.weight_sync_directory is where adapters are left",
    "trainer.policy.record_memory": "recording of CUDA memory history",
    "trainer.policy.megatron_config": _MEGATRON,
    "trainer.ref.megatron_config": _MEGATRON,
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
}
"""A setting, or the section that holds it -> what it waits for."""

NOT_YET_SUPPORTED_VALUES: dict[str, dict[str, str]] = {
    "trainer.strategy": {
        "fsdp": "means FSDP version 1, which is not supported; use fsdp2, which takes the same settings",
        "megatron": f"is not supported yet: {_MEGATRON}; use fsdp2",
        "deepspeed": "is not supported yet: the DeepSpeed backend; use fsdp2",
    },
}
"""A setting -> a choice known from other releases -> why it is refused and what to use."""


def reason_not_supported(name: str) -> str | None:
    """Return the work that the setting `name` waits for; None if it is not one of these settings nor inside of one."""
    for entry, reason in NOT_YET_SUPPORTED.items():
        if name == entry or name.startswith(entry + "."):
            return reason
    return None

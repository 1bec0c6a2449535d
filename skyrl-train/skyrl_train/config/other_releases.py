"""Settings and choices known from other SkyRL releases, DeepSpeed or Megatron that do not exist here.

Nothing is ignored silently: setting one of them is an error that gives the reason and what to use, unless the value
asks for what is done anyway. An entry leaves these tables in the change that makes it do something.
"""

import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from skyrl_train.errors import ConfigError


@dataclass(frozen=True)
class Refusal:
    """Refusal of a setting known from other releases."""

    reason: str
    """Reason for the refusal: what is done instead, or is not implemented, and what to use."""

    accepted: tuple[object, ...] | None = ()
    """Values that ask for what is done anyway. None: every value does."""

    warned: tuple[object, ...] = ()
    """Values that change speed alone: accepted, with a warning."""


def _off(reason: str, *accepted: object) -> Refusal:
    """Refuse what is not built; values that switch it off are accepted."""
    return Refusal(reason, (False, None, *accepted))


_NO_BALANCE = "the loss is the objective's alone, as in other runs that train by reinforcement; leave it out"
_NO_MTP = "heads that predict several tokens are not trained"
_ANY_LAYOUT = "checkpoints hold whole tensors, fit any layout, and are written by all ranks"
_ASYNC = "checkpoints have one format; use trainer.ckpt_async=true, which writes them beside training"
_ROPE = "rotary embeddings of a loaded model are not changed; use model_config_kwargs"
_NOT_TRAINED = "the reference model takes no optimizer step; leave it out"
_STEPPED = (
    "each data-parallel rank steps its part of the state on its GPU: use more of them, or trainer.strategy=deepspeed"
)

_MEGATRON = {
    "torch_profiler_config": Refusal("profiles of single ranks are not built"),
    "torch_profiler_config.enable": _off("profiles of single ranks are not built"),
    "lora_config": Refusal("use trainer.strategy=fsdp2 or deepspeed, which train adapters (trainer.policy.model.lora)"),
    "lora_config.lora_type": Refusal("use trainer.strategy=fsdp2 or deepspeed for adapters", ("lora",)),
    "lora_config.merge_lora": Refusal("use trainer.strategy=fsdp2 or deepspeed for adapters", (True,)),
    "optimizer_config_kwargs": Refusal("AdamW is set by optimizer_config"),
    "optimizer_config_kwargs.overlap_cpu_optimizer_d2h_h2d": _off(_STEPPED),
    "optimizer_config_kwargs.optimizer_cpu_offload": _off(_STEPPED),
    "optimizer_config_kwargs.optimizer_offload_fraction": Refusal(_STEPPED, (0, None)),
    "optimizer_config_kwargs.use_precision_aware_optimizer": _off("moments and weights of the optimizer are float32"),
    "moe_router_load_balancing_type": Refusal(_NO_BALANCE, ("none", None)),
    "moe_aux_loss_coeff": Refusal(_NO_BALANCE, (0, None)),
    "moe_grouped_gemm": Refusal(
        "experts compute one by one, which is slower: its kernels are those of Transformer Engine",
        (False, None),
        warned=(True,),
    ),
    "moe_router_score_function": Refusal("it follows the model's config.json", (None, "softmax")),
    "moe_router_enable_expert_bias": _off("it follows the model's config.json"),
    "moe_router_dtype": Refusal(
        "routers compute in float32; use transformer_config_kwargs.moe_router_dtype to change it", ("fp32",)
    ),
    "moe_enable_routing_replay": _off("routes are those of the policy alone: use trainer.policy.routing_replay"),
    "moe_per_layer_logging": _off("loads of experts are logged over all layers"),
    "mtp_num_layers": Refusal(_NO_MTP, (0, None)),
    "mtp_loss_weight": Refusal(_NO_MTP, (0.1, None)),
    "mtp_loss_chunk_size": Refusal(_NO_MTP, (1024, None)),
    "mtp_loss_topk": Refusal(_NO_MTP, (None,)),
    "dist_ckpt_optim_fully_reshardable": Refusal(_ANY_LAYOUT, (True, False)),
    "async_dist_ckpt_save": _off(_ASYNC),
    "async_dist_ckpt_strategy": Refusal(_ASYNC, ("mcore", None)),
    "async_save_prestage_to_cpu": _off(_ASYNC),
    "hf_export_config": Refusal("rank 0 writes exports"),
    "hf_export_config.distributed_save": _off("rank 0 writes exports; checkpoints are written by all ranks"),
    "hf_export_config.save_every_n_ranks": Refusal("rank 0 writes exports", (1,)),
}
"""Settings of SkyRL's `megatron_config`: of the policy, and of critic and reference, unless these have their own."""

_COMPUTED = "it follows from other settings (batch sizes are those of `trainer`); leave it out"
_LOGGED = "metrics go where trainer.logger says"
_DEFAULT = "DeepSpeed's default is used; leave it out"
_DEEPSPEED = {
    "train.compile": Refusal("DeepCompile is not built"),
    "train.tensor_parallel": Refusal("tensor parallelism (AutoTP) is not built; use sequence_parallel_size or stage 3"),
    "train.pipeline": Refusal("pipelines are not built; use trainer.strategy=megatron"),
    "train.fp16": Refusal("loss scaling is not built; use trainer.bf16, which needs none"),
    "train.fp16.enabled": _off("loss scaling is not built; use trainer.bf16, which needs none", "auto"),
    "train.amp": Refusal("NVIDIA's Apex is not used; use trainer.bf16"),
    "train.amp.enabled": _off("NVIDIA's Apex is not used; use trainer.bf16", "auto"),
    "train.bf16": Refusal("use trainer.bf16, and torch_autocast.enabled=false for bfloat16 parameters"),
    "train.bf16.enabled": Refusal(
        "use trainer.bf16, and torch_autocast.enabled=false for bfloat16 parameters", ("auto",)
    ),
    "train.optimizer": Refusal("it is AdamW; use optimizer_config for its settings"),
    "train.scheduler": Refusal("use optimizer_config.scheduler and num_warmup_steps"),
    "train.checkpoint": Refusal("checkpoints are in a format of any strategy and number of ranks; leave it out"),
    "train.train_batch_size": Refusal(_COMPUTED, ("auto",)),
    "train.train_micro_batch_size_per_gpu": Refusal(_COMPUTED, ("auto",)),
    "train.gradient_accumulation_steps": Refusal(_COMPUTED, ("auto",)),
    "train.steps_per_print": Refusal("it changes a line in the logs of workers", None),
    "train.dump_state": _off("it is not built"),
    "train.memory_breakdown": _off("it is not built"),
    "train.prescale_gradients": _off("use prescale_gradient, which is SkyRL's name of it"),
    "train.gradient_predivide_factor": Refusal("gradients are averaged over all ranks", (1,)),
    "train.communication_data_type": Refusal("gradients are reduced in the format that they have", (None,)),
    "train.sparse_gradients": _off("gradients of embeddings are dense"),
    "train.zero_allow_untested_optimizer": Refusal("the optimizer is torch's AdamW", (True, False)),
    "train.zero_force_ds_cpu_optimizer": _off("the optimizer is torch's AdamW"),
    "train.activation_checkpointing": Refusal("use trainer.gradient_checkpointing"),
    "train.flops_profiler": Refusal("profiles are not built"),
    "train.flops_profiler.enabled": _off("profiles are not built"),
    "train.comms_logger": Refusal("profiles are not built"),
    "train.comms_logger.enabled": _off("profiles are not built"),
    **{f"train.{name}": Refusal(_LOGGED) for name in ("tensorboard", "wandb", "comet", "csv_monitor")},
    **{f"train.{name}.enabled": _off(_LOGGED) for name in ("tensorboard", "wandb", "comet", "csv_monitor")},
    **{
        f"train.{name}": Refusal("it is not built")
        for name in ("elasticity", "autotuning", "compression_training", "data_efficiency", "hybrid_engine", "aio")
    },
    "train.zero_optimization.overlap_comm": Refusal(
        "stage 3 overlaps, stages 1 and 2 reduce when the step is taken; leave it out"
    ),
    "train.zero_optimization.contiguous_gradients": Refusal(_DEFAULT, (True,)),
    "train.zero_optimization.allgather_partitions": Refusal(_DEFAULT, (True,)),
    "train.zero_optimization.allgather_bucket_size": Refusal(_DEFAULT, (500_000_000, "auto")),
    "train.zero_optimization.reduce_scatter": Refusal(_DEFAULT, (True,)),
    "train.zero_optimization.ignore_unused_parameters": Refusal(_DEFAULT, (True,)),
    "train.zero_optimization.load_from_fp32_weights": Refusal(_DEFAULT, (True,)),
    "train.zero_optimization.elastic_checkpoint": _off("checkpoints fit any number of ranks"),
    "train.zero_optimization.stage3_gather_16bit_weights_on_model_save": Refusal(
        "exports gather all weights", (True, False)
    ),
    "train.zero_optimization.cpu_offload": _off("use offload_optimizer.device=cpu, which has replaced it"),
    "train.zero_optimization.zero_quantized_nontrainable_weights": _off("quantized ZeRO++ is not built"),
    "train.zero_optimization.mics_shard_size": Refusal("MiCS is not built; use trainer.strategy=fsdp2", (-1,)),
    "train.zero_optimization.zenflow": Refusal("ZenFlow is not built", (None,)),
    "eval.gradient_clipping": Refusal("what only scores has no gradients", None),
    "eval.prescale_gradient": Refusal("what only scores has no gradients", None),
    "eval.data_types": Refusal("what only scores has no gradients", None),
    "eval.wall_clock_breakdown": _off("it is not built for what only scores"),
    "eval.zero_optimization.offload_optimizer": Refusal("what only scores has no optimizer", None),
}
"""Settings of DeepSpeed's JSON, by their names in the shared groups; those of `train` are refused in `eval` as well."""

OTHER_RELEASES: dict[str, Refusal] = {
    "trainer.policy.model.lora.lora_sync_path": Refusal("use generator.weight_sync_directory for adapters"),
    "trainer.policy.record_memory": _off("CUDA's history of memory is not recorded"),
    **{f"trainer.policy.megatron_config.{name}": refusal for name, refusal in _MEGATRON.items()},
    "trainer.ref.megatron_config.ddp_config": Refusal(_NOT_TRAINED),
    "trainer.ref.megatron_config.optimizer_config_kwargs": Refusal(_NOT_TRAINED),
    "trainer.ref.megatron_config.freeze_moe_router": Refusal(_NOT_TRAINED, (True, False)),
    "trainer.ref.megatron_config.empty_cuda_cache": Refusal(_NOT_TRAINED, (True, False)),
    "trainer.fully_async.simulate_training": _off("use skyrl_train.entrypoints.simulate"),
    "trainer.fully_async.simulate_training_step_seconds": Refusal("use skyrl_train.entrypoints.simulate", (30,)),
    "trainer.fully_async.simulate_weight_sync_seconds": Refusal("use skyrl_train.entrypoints.simulate", (0,)),
    "generator.use_cache_salt": Refusal("prefixes of other weights are never used by a new request", (True,)),
    "trainer.rope_scaling": Refusal(_ROPE, (None,)),
    "trainer.rope_theta": Refusal(_ROPE, (None,)),
    "trainer.num_dummy_steps": Refusal("the full-context memory check is not built"),
    "generator.external_proxy_url": Refusal("use generator.remote_inference_engine_urls", (None,)),
    "generator.external_server_urls": Refusal("use generator.remote_inference_engine_urls", (None,)),
    "generator.override_existing_update_group": Refusal(
        "an engine that is connected anew leaves its former group; leave it out", ("auto", "enable")
    ),
    "generator.async_engine": Refusal("engines always serve requests asynchronously; leave it out", (True,)),
    "generator.batched": Refusal("engines batch what arrives together", (True, False)),
    "generator.vllm_v1_disable_multiproc": _off("vLLM engines have processes of their own"),
    "generator.enable_ray_prometheus_stats": _off("metrics of engines do not go through Ray"),
    "generator.rope_scaling": Refusal(_ROPE, (None,)),
    "generator.rope_theta": Refusal(_ROPE, (None,)),
    "generator.miniswe_config_path": Refusal("the mini-SWE-agent example has other settings; see examples/"),
    "generator.miniswe_traj_dir": Refusal("the mini-SWE-agent example has other settings; see examples/"),
    **{f"deepspeed_config.{name}": refusal for name, refusal in _DEEPSPEED.items()},
}
"""A setting, or the section that holds it -> why it is refused."""

_NVME = {"nvme": "parameters and optimizer state on disk are not built; use cpu"}
REFUSED_CHOICES: dict[str, dict[str, str]] = {
    "deepspeed_config.train.zero_optimization.offload_param.device": _NVME,
    "deepspeed_config.train.zero_optimization.offload_optimizer.device": _NVME,
    "deepspeed_config.eval.zero_optimization.offload_param.device": _NVME,
    "trainer.policy.megatron_config.moe_token_dispatcher_type": {
        "allgather": "it needs equally many tokens on every rank, and packed rows differ; use alltoall",
        "flex": "the libraries that it needs are not used; use alltoall",
    },
}
"""A setting -> a choice known from other releases -> why it is refused and what to use."""


def translated(values: Mapping[str, Any], name: str = "") -> dict[str, Any]:
    """Return settings without those of other releases that ask for what is done anyway, and with their present names
    for those that have one.

    Args:
        name: of the section.
    """
    kept: dict[str, Any] = {}
    for key, value in values.items():
        full_name = f"{name}.{key}" if name else str(key)
        if isinstance(value, Mapping):
            inner = translated(value, full_name)
            if inner or not is_refused(full_name):
                kept[key] = inner
        elif not _accepts(full_name, value):
            kept[key] = value
    if is_refused(name) and any(key in values and key not in kept for key in ("enabled", "enable")):
        return {}  # the section is switched off: what else it says has no effect
    return _with_routing_replay(kept) if name == "trainer.policy" else kept


def _with_routing_replay(policy: dict[str, Any]) -> dict[str, Any]:
    """Replace SkyRL's switch of routing replay by the setting here."""
    megatron = policy.get("megatron_config")
    if isinstance(megatron, dict) and megatron.get("moe_enable_routing_replay") is True:
        del megatron["moe_enable_routing_replay"]
        other = policy.get("routing_replay")
        if other not in (None, "off", "R3"):
            raise ConfigError(
                "trainer.policy.megatron_config.moe_enable_routing_replay=true means trainer.policy.routing_replay=R3, "
                f"which is {other!r}: leave one of them out"
            )
        policy["routing_replay"] = "R3"
    return policy


def is_refused(name: str) -> bool:
    """Return whether `name` is a setting or section of other releases, or in such a section."""
    return _entry(name) is not None


def reason_refused(name: str, value: object) -> str | None:
    """Return an error's text for the setting or section `name` of other releases; None if it is not one."""
    entry = _entry(name)
    if entry is None:
        return None
    if isinstance(value, Mapping) and value:
        # One of those that are refused: those that are accepted have been taken out.
        key, item = next(iter(value.items()))
        return reason_refused(f"{name}.{key}", item)
    return f"{name}={_formatted(value)} is refused: {entry[1].reason}"


def _formatted(value: object) -> object:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else value


def reason_choice_refused(name: str, value: object) -> str | None:
    """Return why a choice known from other releases is refused for the setting `name`; None if it is not known."""
    if isinstance(value, str):
        for each in _names(name):
            if value in REFUSED_CHOICES.get(each, {}):
                return f"{name}={value} is refused: {REFUSED_CHOICES[each][value]}"
    return None


def _accepts(name: str, value: object) -> bool:
    """Return whether a value of another release's setting asks for what is done anyway."""
    entry = _entry(name)
    if entry is None:
        return False
    known, refusal = entry
    if refusal.accepted is None:
        return True
    if known in _names(name) and value in refusal.warned:
        warnings.warn(f"{name}={_formatted(value)} has no effect: {refusal.reason}", stacklevel=2)
        return True
    return known in _names(name) and value in refusal.accepted


def _entry(name: str) -> tuple[str, Refusal] | None:
    """Return the entry of a setting, or of the innermost section that holds it."""
    for each in _names(name):
        while each:
            if each in OTHER_RELEASES:
                return each, OTHER_RELEASES[each]
            each = each.rpartition(".")[0]
    return None


def _names(name: str) -> list[str]:
    """Return the names in the tables of a setting that several models have, its own first."""
    own = re.sub(r"^trainer\.(policy|critic)\.deepspeed_config", "deepspeed_config.train", name)
    own = re.sub(r"^trainer\.ref\.deepspeed_config", "deepspeed_config.eval", own)
    shared = re.sub(r"^trainer\.(critic|ref)\.megatron_config", "trainer.policy.megatron_config", own)
    return [own, shared.replace("deepspeed_config.eval", "deepspeed_config.train")]

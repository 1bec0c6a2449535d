"""DeepSpeed's JSON built from the settings of a run. Imports neither torch nor DeepSpeed."""

import math
from dataclasses import fields
from typing import Any

from skyrl_train.config import SkyRLConfig
from skyrl_train.config.deepspeed import (
    DeepSpeedAutocastConfig,
    DeepSpeedEvalConfig,
    DeepSpeedOffloadConfig,
    DeepSpeedTrainConfig,
)

JsonSection = dict[str, Any]

TRACE_CACHE = ("stage3_prefetch_bucket_size", "stage3_max_live_parameters", "stage3_max_reuse_distance")
"""Settings with which stage 3 relies on the module order of earlier forwards."""


def build_training_settings(
    config: DeepSpeedTrainConfig, *, micro_batch_size: int, max_norm: float, bf16: bool
) -> JsonSection:
    """Build DeepSpeed's settings for a trained model.

    Args:
        micro_batch_size: rows of one forward and backward; DeepSpeed only counts samples with it.
        max_norm: norm that gradients are clipped at; infinity for none.
        bf16: compute in bfloat16.
    """
    zero = config.zero_optimization
    names = [setting.name for setting in fields(zero) if not setting.name.startswith("offload_")]
    section: JsonSection = {name: _to_integer(getattr(zero, name)) for name in names if getattr(zero, name) != "auto"}
    section |= _offload("offload_param", zero.offload_param) | _offload("offload_optimizer", zero.offload_optimizer)
    if zero.stage in (1, 2):
        # Overlapped reduction of stage 1 does not support steps of several backwards.
        section["overlap_comm"] = False
    if config.disable_trace_cache:
        section |= dict.fromkeys(TRACE_CACHE, 0)
    return {
        "train_micro_batch_size_per_gpu": micro_batch_size,
        # The number of backwards differs between steps: a step is ended by `step()`, not by a count.
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "steps_per_print": 100,
        "zero_optimization": section,
        # The optimizer is torch's, even if its state is in host memory: DeepSpeed's would have to be compiled.
        "zero_force_ds_cpu_optimizer": False,
        # Stage 0 clips in its optimizer (`replicated_optimizer.py`), which returns the norm; DeepSpeed drops it.
        "gradient_clipping": 0.0 if math.isinf(max_norm) or zero.stage == 0 else max_norm,
        "prescale_gradients": config.prescale_gradient,
        "wall_clock_breakdown": config.wall_clock_breakdown,
        **_build_precision_settings(config.torch_autocast, config.data_types.grad_accum_dtype, bf16=bf16),
    }


def build_scoring_settings(config: DeepSpeedEvalConfig, *, micro_batch_size: int, bf16: bool) -> JsonSection:
    """Build DeepSpeed's settings for a model of stage 3 that only scores."""
    zero = config.zero_optimization
    section: JsonSection = {"stage": zero.stage, **_offload("offload_param", zero.offload_param)}
    if zero.stage3_param_persistence_threshold != "auto":
        section["stage3_param_persistence_threshold"] = _to_integer(zero.stage3_param_persistence_threshold)
    return {
        "train_micro_batch_size_per_gpu": micro_batch_size,
        "gradient_accumulation_steps": 1,
        "steps_per_print": 100,
        "zero_optimization": section,
        **_build_precision_settings(config.torch_autocast, None, bf16=bf16),
    }


def build_model_settings(cfg: SkyRLConfig, name: str) -> JsonSection:
    """Build DeepSpeed's settings for the model `trainer.<name>`."""
    trainer = cfg.trainer
    if name == "ref":
        rows = trainer.micro_forward_batch_size_per_gpu
        return build_scoring_settings(trainer.ref.deepspeed_config, micro_batch_size=rows, bf16=trainer.bf16)
    model = trainer.critic if name == "critic" else trainer.policy
    return build_training_settings(
        model.deepspeed_config,
        micro_batch_size=trainer.micro_train_batch_size_per_gpu,
        max_norm=model.optimizer_config.max_grad_norm,
        bf16=trainer.bf16,
    )


def _build_precision_settings(
    autocast: DeepSpeedAutocastConfig, grad_accum_dtype: str | None, *, bf16: bool
) -> JsonSection:
    if not bf16:
        return {}
    if autocast.enabled:
        return {"torch_autocast": {"enabled": True, "dtype": autocast.dtype}}
    # Without the check, a non-finite bfloat16 gradient would be stepped on.
    section: JsonSection = {"bf16": {"enabled": True, "check_grad_overflow": True}}
    if grad_accum_dtype is not None:
        section["data_types"] = {"grad_accum_dtype": grad_accum_dtype}
    return section


def _offload(name: str, offload: DeepSpeedOffloadConfig) -> JsonSection:
    if offload.device == "none":
        return {}
    return {name: {"device": offload.device, "pin_memory": offload.pin_memory}}


def _to_integer(value: object) -> object:
    """Convert a number of elements to an int: YAML reads 1e4 as a float, which DeepSpeed rejects."""
    return int(value) if isinstance(value, float) else value

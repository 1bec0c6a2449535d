"""Rows for the settings of the DeepSpeed backend: what DeepSpeed is given, or why it is refused."""

from typing import Any

from effects import All, Bench, OneChoice, Row, See, Settings, refusal
from rows_trainer import CRITIC, KL

from skyrl_train.training_backends.deepspeed.engine_settings import build_model_settings

DEEPSPEED = {"trainer.strategy": "deepspeed", "trainer.bf16": True}


def given(*models: str) -> See:
    """DeepSpeed's JSON for these models, each of which must change (`tests/training_backends` shows what it does)."""

    def seen(bench: Bench, settings: Settings) -> Any:
        config = bench.config(settings)
        return All(*(build_model_settings(config, name) for name in models))

    return seen


ROWS: list[Row | OneChoice] = []
SECTIONS = {
    "deepspeed_config.train": ("policy", "critic"),
    "deepspeed_config.eval": ("ref",),
    "trainer.policy.deepspeed_config": ("policy",),
    "trainer.critic.deepspeed_config": ("critic",),
    "trainer.ref.deepspeed_config": ("ref",),
}
for section, models in SECTIONS.items():
    zero, needs = f"{section}.zero_optimization", DEEPSPEED | CRITIC | KL
    see = given(*models)
    amounts = ["stage3_param_persistence_threshold"]
    ROWS += [
        Row(f"{zero}.stage", 0, see, needs),
        Row(f"{zero}.offload_param.device", "cpu", see, needs | {f"{zero}.offload_param.device": "none"}),
        Row(
            f"{zero}.offload_param.pin_memory",
            True,
            see,
            needs | {f"{zero}.offload_param.device": "cpu", f"{zero}.offload_param.pin_memory": False},
        ),
        Row(f"{section}.torch_autocast.enabled", False, see, needs),
        OneChoice(f"{section}.torch_autocast.dtype", "float16"),
    ]
    if "ref" not in models:
        offload = f"{zero}.offload_optimizer"
        amounts += ["sub_group_size", "reduce_bucket_size", "stage3_prefetch_bucket_size"]
        amounts += ["stage3_max_live_parameters", "stage3_max_reuse_distance"]
        ROWS += [
            Row(f"{offload}.device", "cpu", see, needs),
            Row(f"{offload}.pin_memory", False, see, needs | {f"{offload}.device": "cpu"}),
            Row(f"{zero}.round_robin_gradients", False, see, needs),
            Row(f"{zero}.zero_hpz_partition_size", 2, refusal, needs),
            Row(f"{zero}.zero_quantized_weights", True, refusal, needs),
            Row(f"{zero}.zero_quantized_gradients", True, refusal, needs),
            Row(
                f"{section}.data_types.grad_accum_dtype",
                "bf16",
                see,
                needs | {f"{section}.torch_autocast.enabled": False},
            ),
            Row(f"{section}.disable_trace_cache", True, see, needs),
            Row(f"{section}.gradient_clipping", 0.5, refusal, needs),
            Row(f"{section}.wall_clock_breakdown", True, see, needs),
            Row(f"{section}.prescale_gradient", True, see, needs),
        ]
    ROWS += [Row(f"{zero}.{name}", 1e4, see, needs) for name in amounts]

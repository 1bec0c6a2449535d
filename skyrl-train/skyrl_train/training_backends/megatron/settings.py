"""Rules of `megatron_config`, checked before any process starts. Imports neither torch nor megatron-core."""

import ast
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from skyrl_train.config.config import SkyRLConfig
from skyrl_train.config.megatron import MegatronConfig, MegatronModelConfig
from skyrl_train.config.typed import find_nearest_name
from skyrl_train.errors import ConfigError
from skyrl_train.training_backends.megatron.families import get_family
from skyrl_train.training_backends.megatron.layout import ModelSizes, ParallelSizes, check_model, check_world

OWN_FIELDS: dict[str, str] = {
    **{
        name: f"megatron_config.{name}"
        for name in (
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "context_parallel_size",
            "expert_model_parallel_size",
            "expert_tensor_parallel_size",
            "moe_token_dispatcher_type",
        )
    },
    "moe_enable_routing_replay": "trainer.policy.routing_replay",
    "sequence_parallel": "megatron_config.tensor_model_parallel_size, which enables it",
    **{name: "trainer.bf16" for name in ("bf16", "fp16", "params_dtype", "pipeline_dtype")},
    **{
        name: "the model's config.json (megatron_config.model_config_kwargs)"
        for name in (
            "num_layers",
            "hidden_size",
            "num_attention_heads",
            "num_query_groups",
            "kv_channels",
            "ffn_hidden_size",
            "normalization",
            "layernorm_epsilon",
            "qk_layernorm",
            "add_bias_linear",
            "add_qkv_bias",
            "gated_linear_unit",
            "activation_func",
            "num_moe_experts",
            "moe_ffn_hidden_size",
            "moe_router_topk",
            "moe_router_score_function",
            "moe_router_pre_softmax",
            "moe_layer_freq",
        )
    },
}
"""Field of megatron-core's configuration -> the setting that controls it."""

REFUSED_FIELDS: dict[str, str] = {
    "hidden_dropout": "log-probs of the same weights would differ from one forward to the next",
    "attention_dropout": "log-probs of the same weights would differ from one forward to the next",
    "virtual_pipeline_model_parallel_size": "virtual pipeline stages are not supported",
    "pipeline_model_parallel_layout": "it may put the embedding or the loss on separate stages, which the weight "
    "mapping does not support; use num_layers_in_first_pipeline_stage and "
    "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split": "use num_layers_in_first_pipeline_stage",
    "account_for_loss_in_pipeline_split": "use num_layers_in_last_pipeline_stage",
    "mtp_num_layers": "multi-token prediction heads are not trained",
    "moe_aux_loss_coeff": "the loss comes from the objective alone",
    "moe_z_loss_coeff": "the loss comes from the objective alone",
    "moe_router_fusion": "its kernel needs Transformer Engine",
    "moe_grouped_gemm": "its kernels need Transformer Engine, whose layers are not used",
    "variable_seq_lengths": "micro-batches of packed rows differ in length",
    "calculate_per_token_loss": "the objective sets the token weights",
    "init_method": "weights are loaded",
    "use_cpu_initialization": "weights are loaded",
    "finalize_model_grads_func": "gradients are reduced once per optimizer step",
    "grad_scale_func": "gradients are not scaled in bfloat16 and float32",
    "no_sync_func": "gradients are reduced once per optimizer step",
}
"""Field of megatron-core's configuration -> reason why it must not be set."""


def get_layout(settings: MegatronModelConfig) -> ParallelSizes:
    """Return the parallel layout in `megatron_config`."""
    tensor = settings.tensor_model_parallel_size
    expert_tensor = settings.expert_tensor_parallel_size
    return ParallelSizes(
        tensor=tensor,
        pipeline=settings.pipeline_model_parallel_size,
        context=settings.context_parallel_size,
        expert=settings.expert_model_parallel_size,
        expert_tensor=tensor if expert_tensor is None else expert_tensor,
    )


def check_settings(config: SkyRLConfig) -> None:
    """Check the rules between settings of a run under `trainer.strategy=megatron`.

    Raises:
        ConfigError: with the setting, the value, and the nearest valid one.
    """
    trainer, placement = config.trainer, config.trainer.placement
    if not trainer.use_sample_packing or not trainer.flash_attn:
        raise ConfigError(
            "trainer.strategy=megatron supports attention only for packed rows: trainer.use_sample_packing and "
            "trainer.flash_attn must be true, or use trainer.strategy=fsdp2"
        )
    _check_section(trainer.policy.megatron_config, "trainer.policy.megatron_config", placement.policy_world_size)
    if trainer.critic.model.path is not None:
        _check_section(trainer.critic.megatron_config, "trainer.critic.megatron_config", placement.critic_world_size)
    if trainer.algorithm.uses_reference_model:
        _check_section(trainer.ref.megatron_config, "trainer.ref.megatron_config", placement.ref_world_size)


def _check_section(settings: MegatronModelConfig, section: str, world_size: int) -> None:
    layout = get_layout(settings)
    check_world(layout, world_size, section)
    if layout.context > 1:
        raise ConfigError(
            f"{section}.context_parallel_size={layout.context} must be 1: attention for packed rows over several "
            "ranks needs kernels of Transformer Engine. Use tensor_model_parallel_size, which shards the tokens "
            "between layers, or trainer.strategy=fsdp2 with sequence_parallel_size"
        )
    if isinstance(settings, MegatronConfig):
        for name in ("overlap_grad_reduce", "overlap_param_gather"):
            if getattr(settings.ddp_config, name):
                raise ConfigError(
                    f"{section}.ddp_config.{name}=true must be false: backward hooks would start the gradient "
                    "reduction after the first micro-batch group, and later ones would be lost"
                )
    _check_fields(settings.transformer_config_kwargs, f"{section}.transformer_config_kwargs")


def _check_fields(given: Mapping[str, object], section: str) -> None:
    """Check the names of fields of megatron-core's configuration."""
    known = _read_field_names()
    for name, value in given.items():
        if name not in known:
            nearest = find_nearest_name(name, sorted(known))
            hint = f"; did you mean {nearest}?" if nearest else ""
            raise ConfigError(
                f"unknown setting {section}.{name}: megatron-core's TransformerConfig has no such field{hint}"
            )
        if name in OWN_FIELDS:
            raise ConfigError(f"{section}.{name}={value!r} must not be set: it is derived from {OWN_FIELDS[name]}")
        if name in REFUSED_FIELDS and value:
            raise ConfigError(f"{section}.{name}={value!r} must not be set: {REFUSED_FIELDS[name]}")


@cache
def _read_field_names() -> frozenset[str]:
    """Read the fields of megatron-core's configuration from its source: importing it takes seconds, and torch."""
    found = find_spec("megatron.core")  # imports `megatron` only, which is a namespace and may have several folders
    assert found is not None and found.submodule_search_locations, "checked before: the library is installed"
    [root] = found.submodule_search_locations
    names = set()
    for module in ("model_parallel_config.py", "transformer/transformer_config.py"):
        for node in ast.parse((Path(root) / module).read_text()).body:
            if isinstance(node, ast.ClassDef) and node.name in ("ModelParallelConfig", "TransformerConfig"):
                names |= {
                    line.target.id
                    for line in node.body
                    if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
                }
    return frozenset(names)


def check_model_config(config: object, model: Any, section: str) -> None:
    """Check that a model is supported, and that a layout divides it.

    Args:
        config: config of the transformers model.
        model: its section of the settings, named `section` (`trainer.<name>`).
    """
    get_family(config)
    settings: MegatronModelConfig = model.megatron_config
    section = f"{section}.megatron_config"
    uneven = {"num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"}
    layout = get_layout(settings)
    sizes = ModelSizes.from_config(config)
    check_model(layout, sizes, section, even_stages=not uneven & set(settings.transformer_config_kwargs))
    replay = getattr(model, "routing_replay", "off")
    if replay != "off":
        _check_replay(f"trainer.policy.routing_replay={replay}", config, settings, section)


def _check_replay(setting: str, config: Any, settings: MegatronModelConfig, section: str) -> None:
    """Check that the model has routers, and that activation recomputation supports replay of their routes."""
    if not get_family(config).is_mixture:
        raise ConfigError(
            f"{setting} needs a mixture of experts, and model_type={config.model_type!r} has no router; remove it"
        )
    recompute = settings.transformer_config_kwargs
    if recompute.get("recompute_granularity") == "selective" and "moe" in (recompute.get("recompute_modules") or ()):
        raise ConfigError(
            f"{section}.transformer_config_kwargs.recompute_modules={recompute['recompute_modules']} must not include "
            f"'moe' with {setting}: the backward would route tokens again. Remove 'moe', or use "
            "recompute_granularity=full, which replays the routes"
        )

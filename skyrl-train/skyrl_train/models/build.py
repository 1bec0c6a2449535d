"""Construction of the policy, critic and reference model from the settings, unsharded and in float32 on the CPU."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from skyrl_train.config import CriticConfig, PolicyConfig, RefConfig, SkyRLConfig
from skyrl_train.distributed.sharded_tensor import gather_full_tensor
from skyrl_train.distributed.ulysses import SequenceParallel
from skyrl_train.models.causal_lm import load_causal_lm
from skyrl_train.models.lora import add_adapters, find_adapters, gather_exported_parameters, has_weight_based_init
from skyrl_train.models.scoring import ScoringModel
from skyrl_train.models.value_model import ValueModel, load_value_model
from skyrl_train.models.weight_files import use_placeholders


def build_model(
    cfg: SkyRLConfig,
    name: Literal["policy", "critic", "ref"],
    path: str,
    *,
    device: torch.device,
    is_trained: bool,
    with_weights: bool = True,
    sequence_parallel: SequenceParallel | None = None,
) -> ScoringModel | ValueModel:
    """Load a model with the head of its role: log-probs for policy and reference, values for the critic.

    Args:
        device: device it will compute on; its parameters are on the CPU.
        is_trained: add the configured adapters and activation recomputation. An untrained model keeps nothing for a
            backward.
        with_weights: False if the weights are read later: parameters then have only shapes (meta device), while
            adapters and a critic's head have values.
    """
    trainer = cfg.trainer
    settings: PolicyConfig | CriticConfig | RefConfig = getattr(trainer, name)
    loading: dict[str, Any] = dict(
        device=device,
        flash_attn=trainer.flash_attn,
        config_overrides=settings.model_config_kwargs,
        with_weights=with_weights,
    )
    if is_trained:
        loading |= dict(
            gradient_checkpointing=bool(trainer.gradient_checkpointing),
            use_reentrant=trainer.gradient_checkpointing_use_reentrant,
        )
    # Eager attention (`flash_attn=false`) supports padded rows only.
    dropout = 0.0 if isinstance(settings, RefConfig) else settings.model.lora.dropout
    layout: dict[str, Any] = dict(
        packing=trainer.use_sample_packing and trainer.flash_attn,
        sequence_parallel=sequence_parallel,
        # With dropout, rows with shared tokens would share the dropout mask.
        share_prefixes=trainer.use_shared_prefixes and not (is_trained and dropout),
    )
    if isinstance(settings, CriticConfig):
        head_name, seed = trainer.algorithm.value_head_prefix, trainer.seed
        critic = load_value_model(path, head_name=head_name, seed=seed, **loading, **layout)
        if is_trained:
            _add_adapters(critic.backbone, settings, name, with_weights=with_weights)
        return critic
    causal_lm = load_causal_lm(path, **loading)
    compile_scores = False
    if isinstance(settings, PolicyConfig) and is_trained:
        _add_adapters(causal_lm, settings, name, with_weights=with_weights)
        compile_scores = settings.use_torch_compile
    return ScoringModel(
        causal_lm,
        chunk_size=trainer.logprobs_chunk_size,
        compile=compile_scores,
        replay_setting=get_replay_setting(settings),
        **layout,
    )


def get_replay_setting(settings: PolicyConfig | CriticConfig | RefConfig) -> str | None:
    """Return the setting that requests replay of routes in this model, for errors, or None."""
    if not isinstance(settings, PolicyConfig) or settings.routing_replay == "off":
        return None
    return f"trainer.policy.routing_replay={settings.routing_replay}"


def _add_adapters(
    transformer: PreTrainedModel, settings: PolicyConfig | CriticConfig, name: str, *, with_weights: bool
) -> None:
    lora = settings.model.lora
    if lora.rank == 0:
        return
    if with_weights:
        add_adapters(transformer, lora, setting=f"trainer.{name}.model.lora")
        return
    with use_placeholders(transformer):
        # Values derived from the weights are sent by rank 0: shapes suffice here.
        add_adapters(transformer, replace(lora, init_method="kaiming") if has_weight_based_init(lora) else lora)


def get_transformer(model: ScoringModel | ValueModel) -> PreTrainedModel:
    """Return the wrapped transformers model."""
    return model.backbone if isinstance(model, ValueModel) else model.causal_lm


def gather_parameters(
    model: ScoringModel | ValueModel, dtype: torch.dtype = torch.float32
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every parameter gathered, few at a time, adapters merged, under the names of transformers; a critic's head
    under the name that `load_value_model` reads. A collective."""
    yield from gather_exported_parameters(get_transformer(model), dtype)
    if isinstance(model, ValueModel):
        yield f"{model.head_name}.weight", gather_full_tensor(model.head.weight, dtype)


def iter_trained_parameters(model: ScoringModel | ValueModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield this rank's shard of every trained parameter under its checkpoint name: the name in `gather_parameters`, or
    in peft's files for adapter matrices."""
    transformer = get_transformer(model)
    matrices = {id(matrix): name for adapter in find_adapters(transformer) for name, matrix in adapter.matrices.items()}
    for name, parameter in transformer.named_parameters():
        if parameter.requires_grad:
            yield matrices.get(id(parameter), name.replace(".base_layer.", ".")), parameter
    if isinstance(model, ValueModel):
        yield f"{model.head_name}.weight", model.head.weight

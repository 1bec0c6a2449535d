"""One rank's part of a model: the layers of its pipeline stage, on its device."""

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import nn

from skyrl_train.training_backends.megatron.groups import get_tensor_group, select_rank_slice
from skyrl_train.training_backends.megatron.layers import build_block_spec
from skyrl_train.training_backends.megatron.layout import ParallelSizes, compute_padded_vocabulary
from skyrl_train.training_backends.megatron.vocabulary_parallel import VocabularyShard

if not hasattr(moe_utils, "te_general_gemm"):
    # Routers request this kernel of Transformer Engine by a name that exists only if it is installed.
    moe_utils.te_general_gemm = None


class HiddenStatesModel(GPTModel):
    """Decoder without output layer: the loss computes the logits of few tokens, in chunks, or the values of a
    critic."""

    value_head: nn.Linear | None
    """Value head on a critic's last stage, unsharded on each tensor-parallel rank."""

    def _postprocess(self, hidden_states: torch.Tensor, *_args: object, **_options: object) -> torch.Tensor:
        return hidden_states

    def get_output_weight(self) -> torch.Tensor:
        """Return this rank's rows of the output layer, on the last stage."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        weight = self.output_layer.weight
        assert weight is not None, "untied heads have their own weight"
        return weight


def build_stage(
    config: TransformerConfig,
    model: Any,
    layout: ParallelSizes,
    device: torch.device,
    *,
    padding_id: int | None,
    is_critic: bool,
) -> HiddenStatesModel:
    """Build the layers of this rank's pipeline stage, with uninitialized weights.

    Args:
        model: config of the transformers model.
        padding_id: `padding_idx` of that model's embedding.
        is_critic: the last stage ends with a value head.
    """
    first_layer, num_layers = get_stage_layers(config)
    stage = HiddenStatesModel(
        config,
        build_block_spec(config, first_layer, num_layers),  # type: ignore[arg-type]
        vocab_size=compute_padded_vocabulary(model.vocab_size, layout.tensor),
        max_sequence_length=model.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=model.tie_word_embeddings and not is_critic,
        position_embedding_type="none",  # the attention applies the rotary embedding of the transformers model
    )
    stage.value_head = None
    if is_critic and stage.post_process:
        stage.output_layer = None  # type: ignore[assignment]
        # Every tensor-parallel rank computes all values from all tokens, so its gradient is complete on each: unlike
        # norms it is not marked for sequence parallelism, because marked gradients are summed over these ranks.
        stage.value_head = nn.Linear(config.hidden_size, 1, bias=False, dtype=config.params_dtype)
    _mark_shards(stage)
    if stage.pre_process and padding_id is not None:
        _drop_input_gradient(stage, padding_id)
    return stage.to(device)


def _drop_input_gradient(stage: HiddenStatesModel, token: int) -> None:
    """Drop the gradient of a token as an input, as `padding_idx` of torch's embeddings does, so that all backends train
    it equally, even where it is an attended token of a prompt or response. Tied embeddings keep the gradient of the
    output layer, so the states are masked and not the weight's gradient."""

    def mask_gradient(_module: nn.Module, _args: Any, kwargs: dict[str, Any], states: torch.Tensor) -> None:
        if states.requires_grad:
            is_token = (kwargs["input_ids"] == token).transpose(0, 1)  # [N, 1], as states are [n, 1, H]
            own = select_rank_slice(is_token)[..., None]
            states.register_hook(lambda gradient: gradient.masked_fill(own, 0.0))

    stage.embedding.register_forward_hook(mask_gradient, with_kwargs=True)


def _mark_shards(stage: nn.Module) -> None:
    """Mark weights that are sharded over tensor-parallel ranks. megatron-core marks them at initialization, which is
    skipped here; unmarked, they would count in the gradient norm on one rank only."""
    for module in stage.modules():
        if isinstance(module, (ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding)):
            dimension = int(isinstance(module, RowParallelLinear))
            if module.weight is not None and not hasattr(module.weight, "tensor_model_parallel"):
                set_tensor_model_parallel_attributes(module.weight, True, dimension, 1)


def get_stage_layers(config: TransformerConfig, stage: int | None = None) -> tuple[int, int]:
    """Return the number of the first layer of a pipeline stage (None: this rank's) and its number of layers, as
    megatron-core counts them."""
    return get_transformer_layer_offset(config, pp_rank=stage), get_num_layers_to_build(config, pp_rank=stage)


def get_vocabulary_shard(model: Any, layout: ParallelSizes) -> VocabularyShard:
    """Return the part of the vocabulary that this rank holds."""
    size = compute_padded_vocabulary(model.vocab_size, layout.tensor) // layout.tensor
    first = parallel_state.get_tensor_model_parallel_rank() * size
    group = get_tensor_group()
    return VocabularyShard(group, first, max(0, min(size, model.vocab_size - first)))

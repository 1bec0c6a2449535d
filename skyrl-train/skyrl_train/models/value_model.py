"""Critic: a transformers model with a scalar value head instead of its output layer.

Shapes: B sequences, T tokens of prompt and response, R of the response, H hidden size.
"""

import math
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from skyrl_train.distributed.ulysses import SequenceParallel
from skyrl_train.errors import ConfigError
from skyrl_train.models.causal_lm import load_backbone
from skyrl_train.models.linear_attention import has_delta_nets
from skyrl_train.models.packing import Layout
from skyrl_train.models.scoring import build_layout, compute_hidden_states, set_attention


class ValueModel(nn.Module):
    """Root module for FSDP.

    Args:
        backbone: a transformers model without an output layer. Its parameters keep their names, under "backbone.".
        head_name: name of the linear value head (no bias), as an attribute and in checkpoints.
        seed: seed of its initial weights, drawn from normal(0, 1 / sqrt(H + 1)) on the CPU: equal on all ranks.
            packing, sequence_parallel, share_prefixes: as in `ScoringModel`.
    """

    def __init__(
        self,
        backbone: nn.Module,
        *,
        head_name: str = "value_head",
        seed: int = 0,
        packing: bool = True,
        sequence_parallel: SequenceParallel | None = None,
        share_prefixes: bool = False,
    ):
        super().__init__()
        set_attention(backbone, packing, sequence_parallel)
        if hasattr(self, head_name) or head_name == "backbone":
            raise ConfigError(
                f"trainer.algorithm.value_head_prefix: {head_name!r} is an attribute of the model; choose another name"
            )
        self.backbone: Any = backbone
        self.head_name = head_name
        self.packing = packing
        self.sequence_parallel = sequence_parallel
        self.share_prefixes = share_prefixes and not has_delta_nets(self.backbone.config)
        self._no_split_modules = getattr(backbone, "_no_split_modules", None)
        like = next(backbone.parameters())
        hidden_size = self.backbone.config.get_text_config().hidden_size
        weight = torch.empty(1, hidden_size).normal_(
            0, 1 / math.sqrt(hidden_size + 1), generator=torch.Generator().manual_seed(seed)
        )
        device = "cpu" if like.is_meta else like.device
        head = nn.Linear(hidden_size, 1, bias=False, device=device, dtype=like.dtype)
        head.weight.data.copy_(weight)
        self.add_module(head_name, head)

    @property
    def config(self) -> Any:
        """Config of the transformers model."""
        return self.backbone.config

    @property
    def head(self) -> nn.Linear:
        """Value head."""
        return getattr(self, self.head_name)

    def build_layout(self, sequences: torch.Tensor, attention_mask: torch.Tensor, num_response: int) -> Layout:
        """Build the layout of a batch for this model, on the batch's device."""
        return build_layout(
            sequences, attention_mask, num_response, self.packing, self.sequence_parallel, self.share_prefixes
        )

    def forward(
        self,
        sequences: torch.Tensor,
        attention_mask: torch.Tensor,
        num_response: int,
        *,
        layout: Layout | None = None,
    ) -> torch.Tensor:
        """Compute the value of the state before each response token, from the hidden state that predicts the token.

        Args:
            sequences, attention_mask: [B, T]; prompts padded on the left, responses (the last `num_response` columns)
                on the right. Values at padding are ignored.
            layout: `build_layout` of the batch, on the model's device; None: built here, which reads values of the
                mask.

        Returns:
            values [B, R] float32, 0 at padding and at a token without a predecessor.
        """
        if layout is None:
            layout = self.build_layout(sequences, attention_mask, num_response)
        hidden, _ = layout.select_scored(compute_hidden_states(self.backbone, layout))
        values = hidden.float() @ self.head.weight[0].float()
        return layout.scatter_scored(values)


def load_value_model(
    path: str,
    *,
    device: torch.device,
    head_name: str = "value_head",
    seed: int = 0,
    packing: bool = True,
    sequence_parallel: SequenceParallel | None = None,
    share_prefixes: bool = False,
    **loading: object,
) -> ValueModel:
    """Load a critic from a model folder or hub name; its head too, if the folder has one.

    Args:
        loading: as for `load_causal_lm`.
    """
    backbone = load_backbone(path, device=device, **loading)
    layout: dict[str, Any] = dict(packing=packing, sequence_parallel=sequence_parallel, share_prefixes=share_prefixes)
    model = ValueModel(backbone, head_name=head_name, seed=seed, **layout)
    name = f"{head_name}.weight"
    for file in sorted(Path(path).glob("*.safetensors")):
        with safe_open(str(file), framework="pt") as tensors:
            if name in tensors.keys():  # noqa: SIM118
                model.head.weight.data.copy_(tensors.get_tensor(name))
    return model

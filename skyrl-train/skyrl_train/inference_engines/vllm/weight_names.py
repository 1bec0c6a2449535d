"""Conversion of tensor names between the trainer (transformers 5) and vLLM.

transformers renames and fuses experts when it loads a checkpoint: Mixtral's `block_sparse_moe.experts.0.w1.weight` and
its like become one `mlp.experts.gate_up_proj`. vLLM keeps the checkpoint's names, and uses another name for fused
experts. The names are derived from a model's layers, not from a table of models.
"""

from collections.abc import Iterator
from typing import Any

import torch

_THEIRS, _OURS = "block_sparse_moe", "mlp"


class WeightNames:
    """Map from the trainer's tensor names to those that a vLLM model loads.

    Args:
        model: vLLM's model.
    """

    def __init__(self, model: Any):
        self._blocks = {name for name, _ in model.named_modules() if name.rpartition(".")[2] in (_OURS, _THEIRS)}
        self._split_experts = {
            name.removesuffix(".routed_experts"): layer.ckpt_down_proj_name
            for name, layer in model.named_modules()
            if getattr(layer, "ckpt_gate_proj_name", None) == "w1"
        }

    def to_vllm(self, name: str) -> str:
        """Convert the trainer's tensor name `name` to vLLM's."""
        before, found, after = name.partition(f".{_OURS}.")
        if not found or f"{before}.{_OURS}" in self._blocks or f"{before}.{_THEIRS}" not in self._blocks:
            return name
        path, _, kind = f"{before}.{_THEIRS}.{after}".rpartition(".")
        if path in self._split_experts:
            kind = {"gate_up_proj": "w13", "down_proj": self._split_experts[path]}.get(kind, kind)
        return f"{path}.{kind}"

    def iter_checkpoint_tensors(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield a trainer's tensor in checkpoint form: renamed, and fused experts one by one."""
        renamed = self.to_vllm(name)
        path, _, kind = renamed.rpartition(".")
        if path not in self._split_experts or tensor.dim() != 3:
            yield renamed, tensor
            return
        for expert, matrix in enumerate(tensor):
            parts = zip(("w1", "w3"), matrix.chunk(2), strict=True) if kind == "w13" else [(kind, matrix)]
            for part, values in parts:
                yield f"{path}.{expert}.{part}.weight", values

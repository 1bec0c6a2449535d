"""Persistent buffers of a model, which its checkpoints contain, such as expert routing biases."""

from collections.abc import Iterator

import torch
from torch import nn


def iter_persistent_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield persistent buffers by name; not those computed from the config, such as rotary frequencies."""
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{path}.{name}" if path else name, buffer

"""Broadcast of buffers from rank 0."""

import torch
import torch.distributed as dist
from torch import nn


def broadcast_buffers(model: nn.Module, device: torch.device) -> None:
    """Move the buffers of a model to a device, with the values of rank 0: rotary frequencies and other buffers missing
    in a state dict. On other ranks they may be on the meta device. A collective."""
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            on_device = torch.empty_like(buffer, device=device) if buffer.is_meta else buffer.to(device)
            dist.broadcast(on_device, src=0)
            setattr(module, name, on_device)

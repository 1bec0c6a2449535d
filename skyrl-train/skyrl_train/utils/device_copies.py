"""Copies between host and device that do not make one wait for the other."""

from dataclasses import fields, is_dataclass, replace
from typing import TypeVar

import torch

T = TypeVar("T")


def copy_to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor to a device. From host memory to a GPU through pinned memory: a copy of pageable memory would wait
    for the kernels queued before it."""
    if tensor.device.type == "cpu" and device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def copy_fields_to_device(value: T, device: torch.device) -> T:
    """Copy the tensors among the fields of a dataclass, and of dataclasses in it."""
    assert is_dataclass(value) and not isinstance(value, type)
    moved = {}
    for field in fields(value):
        own = getattr(value, field.name)
        if isinstance(own, torch.Tensor):
            moved[field.name] = copy_to_device(own, device)
        elif is_dataclass(own) and not isinstance(own, type):
            moved[field.name] = copy_fields_to_device(own, device)
    return replace(value, **moved) if moved else value

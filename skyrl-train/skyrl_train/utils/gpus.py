"""GPUs of this machine."""

import os

import torch

from skyrl_train.errors import ConfigError

NO_GPUS = "trainer.placement.device=cuda needs GPUs, and"
GPU_REMEDY = "set trainer.placement.device=cpu (or auto), or see INSTALL.md for torch with CUDA"


def get_indexed_device(name: str | torch.device) -> torch.device:
    """Return a device with its index: `cuda` is this process's current GPU. Some functions of torch
    (`cuda.set_device`) reject a CUDA device without an index."""
    device = torch.device(name)
    if device.type != "cuda" or device.index is not None:
        return device
    return torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_available() else 0)


def check_local_gpus() -> None:
    """Raise ConfigError unless torch sees a GPU on this machine."""
    if torch.cuda.is_available():
        return
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    because = "" if hidden is None else f" (CUDA_VISIBLE_DEVICES={hidden!r})"
    raise ConfigError(f"{NO_GPUS} torch finds no GPU on this machine{because}: {GPU_REMEDY}")

"""Parameters sharded by DeepSpeed (ZeRO, stage 3). Outside of a forward such a parameter is empty, and `ds_shape` is
its shape."""

import torch


def is_zero_parameter(tensor: torch.Tensor) -> bool:
    """Return whether a parameter is sharded by DeepSpeed."""
    return hasattr(tensor, "ds_id")


def get_full_shape(tensor: torch.Tensor) -> torch.Size:
    """Return the shape of the whole parameter."""
    return getattr(tensor, "ds_shape", tensor.shape)


def gather_zero_parameter(parameter: torch.Tensor) -> torch.Tensor:
    """Return a copy of the whole parameter. A collective: every rank must call it, in the same order."""
    from deepspeed.runtime.zero import GatheredParameters  # optional and heavy

    # A forward without a backward stays registered as user of a parameter, but the gather asserts at its end that there
    # are no users. No module is computing now.
    getattr(parameter, "ds_active_sub_modules", set()).clear()
    with GatheredParameters([parameter]):
        return parameter.detach().clone()

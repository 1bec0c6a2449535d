"""AdamW for stage 0, in which DeepSpeed averages gradients but neither clips nor checks them."""

import math
from typing import Any

import torch


class ReplicatedAdamW(torch.optim.AdamW):
    """AdamW that clips the gradient by its global norm and skips non-finite gradients.

    Every rank has the same weights and the same averaged gradient, so all make the same decision. DeepSpeed's engine
    reads `overflow` and `_global_grad_norm` after a step, as with its own optimizers.
    """

    max_norm: float = math.inf
    overflow = False
    _global_grad_norm: float | None = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Step on the gradients of the parameters."""
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, self.max_norm))
        self._global_grad_norm, self.overflow = norm, not math.isfinite(norm)
        if not self.overflow:
            super().step(closure)

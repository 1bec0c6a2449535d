"""Optimizer tensors of megatron-core's distributed optimizer, sharded over data-parallel ranks.

Shapes: a weight of the rank's stage has n elements; this rank owns `start` to `end`.
"""

from collections.abc import Iterator
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import ChainedOptimizer
from torch import nn

from skyrl_train.training_backends.optimizer import iter_moments, move_optimizer_state

Moment = Literal["exp_avg", "exp_avg_sq"]
"""Running mean of a weight's gradient, or of its square."""

Kind = Moment | Literal["weight"]
"""Optimizer tensor of a trained weight: its float32 value, or a moment."""


class OptimizerShards:
    """Access to the optimizer tensors of each weight of a stage, gathered on every data-parallel rank when read."""

    def __init__(self, model: DistributedDataParallel, optimizer: ChainedOptimizer):
        self.model, self.optimizer = model, optimizer
        self._part_of: dict[nn.Parameter, Any] = {}
        for part in iter_optimizers(optimizer):
            for group in part.opt_group_ranges:
                self._part_of |= {parameter: part for parameter in group["params"]}

    def gather(self, parameter: nn.Parameter, kind: Kind) -> torch.Tensor:
        """Gather an optimizer tensor of a weight, float32 and shaped like it. A collective of its data-parallel
        ranks.
        """
        whole = torch.zeros(parameter.numel(), device=parameter.device)
        start, own = self._get_own(parameter, kind)
        if own is not None:
            whole[start : start + own.numel()] = own.detach().to(whole.device)
        group = self._group(parameter)
        if group.size() > 1:
            # Bits of disjoint parts are summed as integers: a sum of floats would lose the sign of -0.
            dist.all_reduce(whole.view(torch.int32), group=group)
        return whole.view(parameter.shape)

    def count_steps(self) -> int:
        """Return the number of optimizer steps. A collective: a rank may own no weight."""
        own = [
            int(state.get("step", 0))
            for part in iter_optimizers(self.optimizer)
            for state in part.optimizer.state.values()
        ]
        most = torch.tensor(max(own, default=0), device=next(self.model.parameters()).device)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return int(most)

    def iter_tensors(self) -> Iterator[torch.Tensor]:
        """Yield the float32 weights that the model does not compute with, and the moments."""
        for part in iter_optimizers(self.optimizer):
            for group in part.shard_fp32_from_float16_groups:
                yield from group
            yield from iter_moments(part.optimizer)

    def move(self, device: torch.device) -> None:
        """Move the optimizer tensors to a device. (Float32 weights used by the model are not copied.)"""
        for part in iter_optimizers(self.optimizer):
            for group in part.shard_fp32_from_float16_groups:
                for shard in group:
                    shard.data = shard.data.to(device)
            move_optimizer_state(part.optimizer, device)

    def reset(self) -> None:
        """Delete all moments."""
        for part in iter_optimizers(self.optimizer):
            part.optimizer.state.clear()

    @torch.no_grad()
    def write(self, parameter: nn.Parameter, kind: Kind, whole: torch.Tensor, step: torch.Tensor | None = None) -> None:
        """Replace this rank's part of an optimizer tensor of a weight; for the float32 weight, also the model's copy.
        No collective.

        Args:
            whole: shaped like the weight.
            step: number of steps taken, a scalar, stored with moments.
        """
        if kind == "weight":
            parameter.copy_(whole)
        start, own = self._get_own(parameter, kind, make=True)
        if own is not None:
            own.copy_(whole.reshape(-1)[start : start + own.numel()])
        if step is not None and own is not None:
            part = self._part_of[parameter]
            shard = part._get_main_param_and_optimizer_states(parameter)["param"]
            part.optimizer.state[shard]["step"] = step.clone()

    def _get_own(self, parameter: nn.Parameter, kind: Kind, make: bool = False) -> tuple[int, torch.Tensor | None]:
        """Return the start of this rank's part of a tensor, and the part; None if it owns none, or none yet."""
        part = self._part_of.get(parameter)
        if part is None:
            return 0, None
        bounds = part._get_model_param_range_map(parameter)["param"]
        tensors = part._get_main_param_and_optimizer_states(parameter)
        shard = tensors["param"]
        if kind == "weight":
            return bounds.start, shard
        if make and kind not in tensors:  # before the first step there are no moments
            part.optimizer.state[shard][kind] = torch.zeros_like(shard, dtype=torch.float32).detach()
            tensors = part._get_main_param_and_optimizer_states(parameter)
        return bounds.start, tensors.get(kind)

    def _group(self, parameter: nn.Parameter) -> dist.ProcessGroup:
        # Weights of experts are marked: they are replicated over fewer ranks.
        return self.model.dp_cp_group if getattr(parameter, "allreduce", True) else self.model.expt_dp_group


def iter_optimizers(optimizer: ChainedOptimizer) -> Iterator[Any]:
    """Yield the optimizers of dense weights and of experts, if a rank has any."""
    return (part for part in optimizer.chained_optimizers if not part.is_stub_optimizer)  # type: ignore[attr-defined]

"""Weights and AdamW moments of a sharded model: gathered in checkpoints, sharded in memory."""

from collections.abc import Iterator

import torch

from skyrl_train.distributed.sharded_tensor import copy_into, gather_full_tensor
from skyrl_train.models.build import iter_trained_parameters
from skyrl_train.models.scoring import ScoringModel
from skyrl_train.models.value_model import ValueModel
from skyrl_train.training_backends.checkpoint import StateFiles
from skyrl_train.training_backends.optimizer import get_step_device

_MOMENTS = ("exp_avg", "exp_avg_sq")


def gather_training_state(
    model: ScoringModel | ValueModel, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, torch.Tensor]]:
    """Implement `TrainingBackend.training_state` for torch's AdamW. A collective."""
    for name, parameter in iter_trained_parameters(model):
        yield name, gather_full_tensor(parameter.detach())
        # Without a gradient so far (an expert without tokens, a run before its first step) there are no moments.
        if state := optimizer.state.get(parameter):
            for moment in _MOMENTS:
                yield f"{name}/{moment}", gather_full_tensor(state[moment])
            yield f"{name}/step", state["step"]


@torch.no_grad()
def load_training_state(model: ScoringModel | ValueModel, optimizer: torch.optim.Optimizer, files: StateFiles) -> None:
    """Load this rank's shard of the weights and moments of a checkpoint."""
    optimizer.state.clear()
    for name, parameter in iter_trained_parameters(model):
        copy_into(parameter, files.read(name, parameter.shape))
        if f"{name}/step" in files:
            step = files.read(f"{name}/step")
            state = {"step": step.to(get_step_device(optimizer, parameter), copy=True)}
            for moment in _MOMENTS:
                state[moment] = torch.zeros_like(parameter)
                copy_into(state[moment], files.read(f"{name}/{moment}", parameter.shape))
            optimizer.state[parameter] = state

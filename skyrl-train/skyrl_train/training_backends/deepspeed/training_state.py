"""Weights and AdamW moments of a DeepSpeed engine: gathered in checkpoints, sharded in memory."""

from collections.abc import Iterator

import torch

from skyrl_train.distributed.zero_parameter import get_full_shape
from skyrl_train.models.build import iter_trained_parameters
from skyrl_train.models.scoring import ScoringModel
from skyrl_train.models.value_model import ValueModel
from skyrl_train.training_backends.checkpoint import StateFiles
from skyrl_train.training_backends.deepspeed.partitions import (
    MOMENTS,
    Engine,
    find_part_in_optimizer,
    free_gathered_parameters,
    gather_from_parts,
    get_flat_weights,
    write_parameter,
)
from skyrl_train.training_backends.optimizer import get_step_device


def gather_training_state(
    engine: Engine, model: ScoringModel | ValueModel, device: torch.device
) -> Iterator[tuple[str, torch.Tensor]]:
    """Implement `TrainingBackend.training_state`. A collective."""
    for name, parameter in iter_trained_parameters(model):
        flat, part = get_flat_weights(engine, parameter), find_part_in_optimizer(engine, parameter)
        yield name, gather_from_parts(flat.detach(), part, parameter, device)
        # Either all ranks have stepped, or none.
        if state := engine.basic_optimizer.state.get(flat):
            for moment in MOMENTS:
                yield f"{name}/{moment}", gather_from_parts(state[moment], part, parameter, device)
            yield f"{name}/step", state["step"]


@torch.no_grad()
def load_training_state(engine: Engine, model: ScoringModel | ValueModel, files: StateFiles) -> None:
    """Load this rank's shard of the weights and moments of a checkpoint.

    A flat tensor has a single step count: the largest of its parameters. (Under FSDP2 a parameter without a gradient in
    its first steps counts fewer.)
    """
    free_gathered_parameters(engine)
    states = engine.basic_optimizer.state
    steps: dict[torch.Tensor, torch.Tensor] = {}
    for name, parameter in iter_trained_parameters(model):
        shape = get_full_shape(parameter)
        write_parameter(engine, parameter, files.read(name, shape))
        flat, part = get_flat_weights(engine, parameter), find_part_in_optimizer(engine, parameter)
        if f"{name}/step" in files:
            step = files.read(f"{name}/step")
            steps[flat] = torch.maximum(steps.get(flat, step), step)
            if not states.get(flat):
                states[flat] = _build_state(engine.basic_optimizer, flat)
            for moment in MOMENTS:
                whole = files.read(f"{name}/{moment}", shape)
                if part is not None:
                    part.get_from_flat(states[flat][moment]).copy_(part.slice_parameter(whole))
    for flat, step in steps.items():
        states[flat]["step"].copy_(step)
    for flat in set(states) - set(steps):
        del states[flat]


def _build_state(optimizer: torch.optim.Optimizer, flat: torch.Tensor) -> dict[str, torch.Tensor]:
    step = torch.zeros((), device=get_step_device(optimizer, flat))
    return {"step": step, **{moment: torch.zeros_like(flat) for moment in MOMENTS}}

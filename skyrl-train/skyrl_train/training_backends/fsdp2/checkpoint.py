"""Sharded checkpoints of a model and its optimizer, for any number of ranks (`torch.distributed.checkpoint`)."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_sharded
from torch.distributed.checkpoint.state_dict_saver import save as save_sharded

from skyrl_train.errors import CheckpointError
from skyrl_train.training_backends.base import WrittenFiles
from skyrl_train.utils.nodes import node_name


def write_state(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: dict[str, object], rank: int
) -> WrittenFiles:
    """Write the trained weights, optimizer, scheduler and this rank's random state into a folder. A collective.

    Returns: the sharded state as this rank sees it when all ranks have written theirs, and the rank's own file.

    Raises:
        CheckpointError: the disk refuses.
    """
    model_state, optimizer_state = _trained_state(model, optimizer)
    try:
        path.mkdir(parents=True, exist_ok=True)
        save_sharded({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path / "sharded")
    except CheckpointException as error:  # no Exception: left alone, it would end this process
        raise CheckpointError(_reasons(error)) from None
    except OSError as error:
        raise CheckpointError(str(error)) from error
    own = path / f"rank_{rank}.pt"
    try:
        torch.save({"scheduler": scheduler, "rng": _random_state()}, own)
        files = [own, *(file for file in (path / "sharded").rglob("*") if file.is_file())]
        return WrittenFiles(node_name(), {str(file.relative_to(path)): file.stat().st_size for file in files})
    except (OSError, RuntimeError) as error:  # torch's writer says that the disk is full by a RuntimeError
        raise CheckpointError(str(error)) from error


def read_state(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> dict[str, Any]:
    """Load the state that `write_state` wrote, on any number of ranks. A collective.

    Returns:
        the scheduler's state.

    Raises:
        CheckpointError: it is of another model, or damaged.
    """
    model_state, optimizer_state = _trained_state(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    try:
        load_sharded(state, checkpoint_id=path / "sharded")
    except CheckpointException as error:
        raise CheckpointError(f"{path} does not fit this model: {_reasons(error)}") from None
    except (OSError, RuntimeError, KeyError) as error:
        raise CheckpointError(f"{path} does not fit this model: {error}") from error
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=StateDictOptions(strict=False),  # frozen weights are absent
    )
    # A rank that is new (more ranks than before) goes on with rank 0's random state, set apart by its number.
    own = path / f"rank_{rank}.pt"
    extra = torch.load(own if own.exists() else path / "rank_0.pt", weights_only=False)
    _set_random_state(extra["rng"])
    if not own.exists():
        torch.manual_seed(torch.initial_seed() + rank)
    return extra["scheduler"]


def _trained_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the state dicts of model and optimizer without frozen weights, which are where they were loaded from."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    for name, parameter in model.named_parameters(remove_duplicate=False):  # tied ones have two names
        if not parameter.requires_grad:
            del model_state[name]
    return model_state, optimizer_state


def _reasons(error: CheckpointException) -> str:
    """Return the failure of each rank, without tracebacks."""
    return "; ".join(f"rank {rank}: {type(reason).__name__}: {reason}" for rank, (reason, _) in error.failures.items())


def _random_state() -> dict[str, object]:
    state: dict[str, Any] = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])

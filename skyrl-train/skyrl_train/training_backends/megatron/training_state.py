"""Weights and Adam moments of a sharded model, gathered in checkpoints under the names of transformers.

Moments have the shapes of their weights, and so the same weight map and sharding.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import get_args

import torch
from torch import nn

from skyrl_train.training_backends.checkpoint import StateFiles
from skyrl_train.training_backends.megatron.optimizer_shards import Moment, OptimizerShards
from skyrl_train.training_backends.megatron.weight_map import Entry
from skyrl_train.training_backends.megatron.weights import Gather, StageWeights

MOMENTS: tuple[Moment, ...] = get_args(Moment)


def gather_training_state(
    weights: StageWeights, shards: OptimizerShards, of_weight: Gather
) -> Iterator[tuple[str, torch.Tensor]]:
    """Implement `TrainingBackend.training_state`. A collective.

    Args:
        of_weight: returns a rank's shard of a weight, in float32.
    """
    num_steps = shards.count_steps()

    def gather_moment(moment: Moment) -> Gather:
        return lambda parameter: shards.gather(parameter, moment)

    # Iterators in lockstep, each a collective: all ranks advance them in the same order.
    walks = [weights.gather(of_weight, trained_only=True)]
    if num_steps:  # before the first step there are no moments
        walks += [weights.gather(gather_moment(moment), trained_only=True) for moment in MOMENTS]
    for (name, weight), *moments in zip(*walks, strict=True):
        yield name, weight
        for moment, (_, tensor) in zip(MOMENTS, moments, strict=False):
            yield f"{name}/{moment}", tensor
        if num_steps:
            yield f"{name}/step", torch.tensor(float(num_steps))


def load_training_state(weights: StageWeights, shards: OptimizerShards, files: StateFiles) -> None:
    """Load this rank's shard of the weights and moments of a checkpoint."""
    shards.reset()
    steps: dict[str, torch.Tensor] = {}

    def read_weight(name: str) -> torch.Tensor:
        if f"{name}/step" in files:
            steps[name] = files.read(f"{name}/step")
        return files.read(name, weights.shapes[name]).to(weights.device)

    weights.scatter(read_weight, lambda _, parameter, part: shards.write(parameter, "weight", part), trained_only=True)
    for moment in MOMENTS:
        weights.scatter(
            partial(_read_moment, weights, files, moment),
            partial(_write_moment, shards, steps, moment),
            trained_only=True,
        )


def _read_moment(weights: StageWeights, files: StateFiles, moment: Moment, name: str) -> torch.Tensor:
    # A backend that keeps moments only for weights with a gradient lacks some.
    if f"{name}/{moment}" not in files:
        return torch.zeros(weights.shapes[name], device=weights.device)
    return files.read(f"{name}/{moment}", weights.shapes[name]).to(weights.device)


def _write_moment(
    shards: OptimizerShards,
    steps: Mapping[str, torch.Tensor],
    moment: Moment,
    entry: Entry,
    parameter: nn.Parameter,
    part: torch.Tensor,
) -> None:
    # Weights that are one tensor here (q, k, v) have equal step counts.
    taken = [steps[name] for name in entry.names if name in steps]
    if taken:
        shards.write(parameter, moment, part, max(taken))

"""Faults of training in the engine process; see `faults`."""

import dataclasses
import importlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from faults import ENGINE, fault, faults

LOSS_NAMES = ("cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo")
LOSSES = [f"tx.tinker.backends.torch.losses:LOSSES.{name}" for name in LOSS_NAMES]
TRAINING = "tx.tinker.backends.torch.training:TorchTraining"
ADAMW = "tx.tinker.backends.torch.training:adamw"
"""(before, gradient, number, params, scaling)"""


def other_loss(name: str) -> Callable[..., Any]:
    def compute(original, *args):
        return getattr(importlib.import_module("tx.tinker.backends.torch.losses"), name)(*args)

    return compute


def other_params(**values: float) -> Callable[..., Any]:
    """A step of AdamW with parameters that were not asked for."""

    def step(original, before, gradient, number, params, scaling):
        return original(before, gradient, number, msgspec.structs.replace(params, **values), scaling)

    return step


def other_lora(**values: Callable[[], Any]) -> Callable[..., Any]:
    """An adapter that was not asked for."""

    def create(original, self, model_id, lora):
        drawn = {name: value() for name, value in values.items()}
        original(self, model_id, msgspec.structs.replace(lora, **drawn))

    return create


def of_passes(change: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda run, self, passes: run(self, [change(one) for one in passes])


# ---- losses, passes

faults(
    ENGINE,
    "losses.",
    [
        ("weights_are_ignored", "cross_entropy counts every token once", LOSSES[0],
         lambda loss, log_probs, inputs: (-log_probs, {})),
        ("ppo_does_not_clip", "ppo is importance_sampling", LOSSES[2], other_loss("importance_sampling")),
        ("cispo_takes_the_gradient_of_ppo", "a target whose ratio is clipped has no gradient in cispo", LOSSES[3],
         other_loss("ppo")),
        ("bounds_are_distances", "clip thresholds are taken as distances from 1",
         "tx.tinker.backends.torch.losses:LossInputs.bounds",
         lambda bounds, inputs: (1 - bounds(inputs)[0], 1 + bounds(inputs)[1])),
    ],
)  # fmt: skip


@fault(ENGINE, "losses.", *LOSSES)
def loss_is_a_mean(loss, log_probs, inputs):
    """losses and their gradients are divided by the number of targets"""
    losses, metrics = loss(log_probs, inputs)
    return losses / len(losses), metrics


@fault(ENGINE, "losses. optimizer.", *LOSSES)
def gradient_is_a_mean(loss, log_probs, inputs):
    """the loss is a sum, its gradient that of a mean"""
    losses, metrics = loss(log_probs, inputs)
    return losses.detach() + (losses - losses.detach()) / len(losses), metrics


faults(
    ENGINE,
    "training.",
    [
        ("forward_learns", "a forward adds its gradient", f"{TRAINING}.run",
         of_passes(lambda one: dataclasses.replace(one, forward_only=False))),
    ],
)  # fmt: skip


@fault(ENGINE, "training.", f"{TRAINING}.run")
def no_accumulation(run, self, passes):
    """a pass forgets the gradients of those before it"""
    for one in passes:
        if not one.forward_only:
            self.put_gradient(one.model_id, None)
    return run(self, passes)


@fault(ENGINE, "training. losses.", f"{TRAINING}.run")
def results_in_another_order(run, self, passes):
    """log-probs of a pass come by length, not in the order of its data"""
    return [dataclasses.replace(one, logprobs=sorted(one.logprobs, key=len)) for one in run(self, passes)]


# ---- optimizer, adapters

faults(
    ENGINE,
    "optimizer.",
    [
        ("learning_rate_is_ignored", "every step has the learning rate 0.001", ADAMW,
         other_params(learning_rate=1e-3)),
        ("betas_are_ignored", "beta1 is 0.9, beta2 0.95", ADAMW, other_params(beta1=0.9, beta2=0.95)),
        ("no_bias_correction", "moments are not corrected for their start", ADAMW,
         lambda step, before, gradient, number, *args: step(before, gradient, 10**6, *args)),
        ("clip_is_ignored", "grad_clip_norm does nothing", "tx.tinker.backends.torch.training:clip_gradient",
         lambda clipped, gradient, largest: clipped(gradient, 0.0)),
        ("parts_are_ignored", "train_attn and train_mlp are always on", f"{TRAINING}.create",
         other_lora(train_attn=lambda: True, train_mlp=lambda: True)),
    ],
)  # fmt: skip
faults(
    ENGINE,
    "life_cycle.",
    [
        ("seed_of_adapters_is_ignored", "A of an adapter is drawn anew each time", f"{TRAINING}.create",
         other_lora(seed=lambda: random.getrandbits(31))),
    ],
)  # fmt: skip


@fault(ENGINE, "optimizer.", ADAMW)
def decay_is_coupled(step, before, gradient, number, params, scaling):
    """weight decay passes through the moments, as in plain Adam"""
    gradient = gradient.add(before.weights, alpha=params.weight_decay)
    return step(before, gradient, number, msgspec.structs.replace(params, weight_decay=0.0), scaling)


@fault(ENGINE, "optimizer.", ADAMW)
def impossible_steps_are_taken(step, before, *args):
    """a step whose weights are not finite is taken"""
    from tx.errors import ModelError

    try:
        return step(before, *args)
    except ModelError:
        return before._replace(weights=before.weights * float("inf"))


@fault(ENGINE, "optimizer.", f"{TRAINING}.optim_step")
def gradient_is_kept(optim_step, self, model_id, adam):
    """a step does not use the gradient up"""
    gradient = self.copy_gradient(model_id)
    metrics = optim_step(self, model_id, adam)
    self.put_gradient(model_id, gradient)
    return metrics


@fault(ENGINE, "optimizer.", f"{TRAINING}.optim_step")
def neighbours_decay(optim_step, self, model_id, adam):
    """one model's weight decay is every model's"""
    for name, adapter in self._adapters.items():
        if name != model_id:
            adapter.weights.mul_(1 - adam.learning_rate * adam.weight_decay)
            adapter.changed()
    return optim_step(self, model_id, adam)


# ---- checkpoints


@fault(ENGINE, "checkpoints.", f"{TRAINING}.load")
def load_without_optimizer(load, self, model_id, folder, *, optimizer):
    """the optimizer of a checkpoint is never loaded"""
    load(self, model_id, folder, optimizer=False)


@fault(ENGINE, "checkpoints.", f"{TRAINING}.load")
def load_always_with_optimizer(load, self, model_id, folder, *, optimizer):
    """the optimizer of a checkpoint is always loaded, where it has one"""
    load(self, model_id, folder, optimizer=(folder / "optimizer.safetensors").exists())


@fault(ENGINE, "checkpoints.", f"{TRAINING}.load")
def load_keeps_the_gradient(load, self, model_id, folder, *, optimizer):
    """the gradient accumulated before a load is still there after it"""
    gradient = self.copy_gradient(model_id)
    load(self, model_id, folder, optimizer=optimizer)
    self.put_gradient(model_id, gradient)


@fault(ENGINE, "checkpoints.", "tx.tinker.engine.sampling:Sampling.begin")
def samplers_see_the_newest_weights(begin, self, command):
    """an old sampler samples what was saved last for its model"""
    if command.adapter is not None:
        siblings = Path(command.adapter).parent.iterdir()
        newest = max(siblings, key=lambda folder: folder.stat().st_mtime_ns)
        command = msgspec.structs.replace(command, adapter=str(newest))
    begin(self, command)

"""Faults of training in the engine process; see `faults`."""

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import msgspec
from faults import ENGINE, around, either, fault


def _losses(changed: Callable[..., Any], *names: str) -> None:
    """Puts `changed(original, log_probs, inputs)` in the place of these losses, or of all."""
    from tx.tinker.backends.torch.losses import LOSSES

    for name in names or LOSSES:
        original = LOSSES[name]
        LOSSES[name] = either(original, lambda *args, original=original: changed(original, *args))


# ---- losses, passes


@fault(ENGINE, "losses.")
def loss_is_a_mean() -> None:
    """losses and their gradients are divided by the number of targets"""

    def mean(loss, log_probs, inputs):
        losses, metrics = loss(log_probs, inputs)
        return losses / len(losses), metrics

    _losses(mean)


@fault(ENGINE, "losses.", "optimizer.")
def gradient_is_a_mean() -> None:
    """the loss is a sum, its gradient that of a mean"""

    def mean(loss, log_probs, inputs):
        losses, metrics = loss(log_probs, inputs)
        return losses.detach() + (losses - losses.detach()) / len(losses), metrics

    _losses(mean)


@fault(ENGINE, "losses.")
def weights_are_ignored() -> None:
    """cross_entropy counts every token once"""
    _losses(lambda _, log_probs, inputs: (-log_probs, {}), "cross_entropy")


@fault(ENGINE, "losses.")
def ppo_does_not_clip() -> None:
    """ppo is importance_sampling"""
    from tx.tinker.backends.torch.losses import importance_sampling

    _losses(lambda _, *args: importance_sampling(*args), "ppo")


@fault(ENGINE, "losses.")
def bounds_are_distances() -> None:
    """clip thresholds are taken as distances from 1"""
    from tx.tinker.backends.torch.losses import LossInputs

    around(LossInputs, "bounds", lambda bounds, inputs: (1 - bounds(inputs)[0], 1 + bounds(inputs)[1]))


@fault(ENGINE, "losses.")
def cispo_takes_the_gradient_of_ppo() -> None:
    """a target whose ratio is clipped has no gradient in cispo"""
    from tx.tinker.backends.torch.losses import ppo

    _losses(lambda _, *args: ppo(*args), "cispo")


def _trainer() -> Any:
    from tx.tinker.backends.torch.training import TorchTraining

    return TorchTraining


@fault(ENGINE, "training.")
def forward_learns() -> None:
    """a forward adds its gradient"""
    around(
        _trainer(),
        "run",
        lambda run, self, passes: run(self, [dataclasses.replace(one, forward_only=False) for one in passes]),
    )


@fault(ENGINE, "training.")
def no_accumulation() -> None:
    """a pass forgets the gradients of those before it"""

    def run(original, self, passes):
        for one in passes:
            if not one.forward_only:
                self.put_gradient(one.model_id, None)
        return original(self, passes)

    around(_trainer(), "run", run)


@fault(ENGINE, "training.", "losses.")
def results_in_another_order() -> None:
    """log-probs of a pass come by length, not in the order of its data"""

    def run(original, self, passes):
        outputs = original(self, passes)
        return [dataclasses.replace(one, logprobs=sorted(one.logprobs, key=len)) for one in outputs]

    around(_trainer(), "run", run)


# ---- optimizer


def _adam(change: Callable[..., Any]) -> None:
    """`change(step, before, gradient, number, params, scaling)` in the place of a step of AdamW."""
    from tx.tinker.backends.torch import training

    around(training, "adamw", change)


def _other(params: Any, **values: float) -> Any:
    return msgspec.structs.replace(params, **values)


@fault(ENGINE, "optimizer.")
def learning_rate_is_ignored() -> None:
    """every step has the learning rate 0.001"""
    _adam(lambda step, *args: step(*args[:-2], _other(args[-2], learning_rate=1e-3), args[-1]))


@fault(ENGINE, "optimizer.")
def betas_are_ignored() -> None:
    """beta1 is 0.9, beta2 0.95"""
    _adam(lambda step, *args: step(*args[:-2], _other(args[-2], beta1=0.9, beta2=0.95), args[-1]))


@fault(ENGINE, "optimizer.")
def no_bias_correction() -> None:
    """moments are not corrected for their start"""
    _adam(lambda step, before, gradient, number, *args: step(before, gradient, 10**6, *args))


@fault(ENGINE, "optimizer.")
def decay_is_coupled() -> None:
    """weight decay passes through the moments, as in plain Adam"""

    def step(original, before, gradient, number, params, scaling):
        gradient = gradient.add(before.weights, alpha=params.weight_decay)
        return original(before, gradient, number, _other(params, weight_decay=0.0), scaling)

    _adam(step)


@fault(ENGINE, "optimizer.")
def clip_is_ignored() -> None:
    """grad_clip_norm does nothing"""
    from tx.tinker.backends.torch import training

    around(training, "clipped", lambda clipped, gradient, largest: clipped(gradient, 0.0))


@fault(ENGINE, "optimizer.")
def impossible_steps_are_taken() -> None:
    """a step whose weights are not finite is taken"""
    from tx.errors import ModelError

    def step(original, before, *args):
        try:
            return original(before, *args)
        except ModelError:
            return before._replace(weights=before.weights * float("inf"))

    _adam(step)


@fault(ENGINE, "optimizer.")
def gradient_is_kept() -> None:
    """a step does not use the gradient up"""

    def optim_step(original, self, model_id, adam):
        gradient = self.copy_gradient(model_id)
        metrics = original(self, model_id, adam)
        self.put_gradient(model_id, gradient)
        return metrics

    around(_trainer(), "optim_step", optim_step)


@fault(ENGINE, "optimizer.")
def neighbours_decay() -> None:
    """one model's weight decay is every model's"""

    def optim_step(original, self, model_id, adam):
        for name, adapter in self._adapters.items():
            if name != model_id:
                adapter.weights.mul_(1 - adam.learning_rate * adam.weight_decay)
                adapter.changed()
        return original(self, model_id, adam)

    around(_trainer(), "optim_step", optim_step)


# ---- models, checkpoints


@fault(ENGINE, "life_cycle.")
def seed_of_adapters_is_ignored() -> None:
    """A of an adapter is drawn anew each time"""
    around(
        _trainer(),
        "create",
        lambda create, self, model_id, lora: create(self, model_id, _other(lora, seed=random.getrandbits(31))),
    )


@fault(ENGINE, "optimizer.")
def parts_are_ignored() -> None:
    """train_attn and train_mlp are always on"""
    around(
        _trainer(),
        "create",
        lambda create, self, model_id, lora: create(self, model_id, _other(lora, train_attn=True, train_mlp=True)),
    )


@fault(ENGINE, "checkpoints.")
def load_without_optimizer() -> None:
    """the optimizer of a checkpoint is never loaded"""
    around(
        _trainer(),
        "load",
        lambda load, self, model_id, folder, optimizer: load(self, model_id, folder, optimizer=False),
    )


@fault(ENGINE, "checkpoints.")
def load_always_with_optimizer() -> None:
    """the optimizer of a checkpoint is always loaded, where it has one"""

    def load(original, self, model_id, folder, *, optimizer):
        original(self, model_id, folder, optimizer=(folder / "optimizer.safetensors").exists())

    around(_trainer(), "load", load)


@fault(ENGINE, "checkpoints.")
def load_keeps_the_gradient() -> None:
    """what was accumulated before a load is there after it"""

    def load(original, self, model_id, folder, *, optimizer):
        gradient = self.copy_gradient(model_id)
        original(self, model_id, folder, optimizer=optimizer)
        self.put_gradient(model_id, gradient)

    around(_trainer(), "load", load)


@fault(ENGINE, "checkpoints.")
def samplers_see_the_newest_weights() -> None:
    """an old sampler samples what was saved last for its model"""
    from pathlib import Path

    from tx.tinker.engine.sampling import Sampling

    def begin(original, self, order):
        if order.adapter is not None:
            siblings = Path(order.adapter).parent.iterdir()
            newest = max(siblings, key=lambda folder: folder.stat().st_mtime_ns)
            order = msgspec.structs.replace(order, adapter=str(newest))
        original(self, order)

    around(Sampling, "begin", begin)

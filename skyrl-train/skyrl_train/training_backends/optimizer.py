"""AdamW and the learning-rate schedule from settings, for all backends."""

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn

from skyrl_train.config import OptimizerConfig

AdamW = TypeVar("AdamW", bound=torch.optim.AdamW)


class LearningRateSchedule:
    """Learning rate as a function of the number of optimizer steps (skipped ones count).

    Args:
        num_training_steps: optimizer steps of the whole run.
    """

    def __init__(self, config: OptimizerConfig, num_training_steps: int):
        from transformers import get_scheduler  # imports its trainer modules, which the driver does not need

        carrier = torch.optim.SGD([torch.zeros(1)], lr=config.lr)  # transformers creates schedules for optimizers only
        scheduler = get_scheduler(
            config.scheduler,
            carrier,
            num_warmup_steps=config.num_warmup_steps,
            num_training_steps=num_training_steps,
        )
        [self._factor] = scheduler.lr_lambdas  # type: ignore[attr-defined]  every schedule that can be set is a LambdaLR
        self._highest = config.lr
        self.num_steps = 0

    @property
    def rate(self) -> float:
        """Learning rate of the next step."""
        return self._highest * self._factor(self.num_steps)

    def step(self) -> None:
        """Count a step."""
        self.num_steps += 1


def build_adamw(
    parameters: Iterable[nn.Parameter], config: OptimizerConfig, kind: type[AdamW] = torch.optim.AdamW, **options: Any
) -> AdamW:
    """Create AdamW for the trained parameters. Weight decay applies to all trained weights (including norms, biases and
    embeddings), as in SkyRL's FSDP backend.

    Args:
        options: further arguments of `torch.optim.AdamW`.
    """
    beta1, beta2 = config.adam_betas
    return kind(
        [parameter for parameter in parameters if parameter.requires_grad],
        lr=config.lr,
        betas=(beta1, beta2),
        weight_decay=config.weight_decay,
        **options,
    )


def get_step_device(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> torch.device:
    """Return the device where torch's AdamW needs the step count of a parameter."""
    return parameter.device if optimizer.defaults["fused"] else torch.device("cpu")


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of every group of parameters."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def iter_moments(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Yield the optimizer state of all parameters except step counts."""
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor) and value.dim() > 0)


def move_optimizer_state(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Move the optimizer state of all parameters. Step counts stay where the optimizer needs them."""
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim() > 0:
                state[name] = value.to(device)

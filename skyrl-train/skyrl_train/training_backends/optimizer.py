"""AdamW and learning-rate schedules from settings, for backends that step with torch's optimizers."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import get_scheduler

from skyrl_train.config import OptimizerConfig


def new_optimizer(
    parameters: Iterable[nn.Parameter], config: OptimizerConfig, num_training_steps: int
) -> tuple[torch.optim.AdamW, LambdaLR]:
    """Make AdamW and its schedule over `num_training_steps` optimizer steps. Weight decay spares no weight that is
    trained (norms, biases and embeddings decay too), as in SkyRL's FSDP backend."""
    beta1, beta2 = config.adam_betas
    optimizer = torch.optim.AdamW(
        [parameter for parameter in parameters if parameter.requires_grad],
        lr=config.lr,
        betas=(beta1, beta2),
        weight_decay=config.weight_decay,
    )
    scheduler = get_scheduler(
        config.scheduler,
        optimizer,
        num_warmup_steps=config.num_warmup_steps,
        num_training_steps=num_training_steps,
    )
    assert isinstance(scheduler, LambdaLR), "every schedule that can be set is one"
    return optimizer, scheduler


def resume_schedule(
    optimizer: torch.optim.Optimizer, scheduler: LambdaLR, state: dict[str, Any], config: OptimizerConfig
) -> None:
    """Continue a schedule after the step of `state` with the settings of this run: the learning rate is the
    checkpoint's own, to the bit, if nothing has changed.

    Args:
        state: `scheduler.state_dict()` of the checkpoint.
    """
    rates = [config.lr * factor(state["last_epoch"]) for factor in scheduler.lr_lambdas]
    scheduler.load_state_dict(state | {"base_lrs": [config.lr] * len(rates), "_last_lr": rates})
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group |= {"lr": rate, "initial_lr": config.lr}
        group |= {"betas": tuple(config.adam_betas), "weight_decay": config.weight_decay}

"""Registration of DeepSpeed as `trainer.strategy=deepspeed`."""

import os
from typing import TYPE_CHECKING, Any

from skyrl_train.config.rules.deepspeed import check_deepspeed
from skyrl_train.config.training_backends import TrainingBackendTraits, register_training_backend

if TYPE_CHECKING:
    from skyrl_train.training_backends.deepspeed.backend import DeepSpeedBackend


@register_training_backend(
    "deepspeed",
    requires=TrainingBackendTraits(
        library="deepspeed",
        install_hint="scripts/setup.sh --extra deepspeed",
        section="deepspeed_config",
        routing_replay=True,
        candidates=True,
        sampling_masks=True,
        memory_like="deepspeed",
        check_settings=check_deepspeed,
    ),
)
def deepspeed(*args: Any) -> "DeepSpeedBackend":
    """Make this rank's backend. Arguments: those of `TrainingBackend`."""
    # DeepSpeed decides at its import which device it computes on, and would take any GPU that it sees.
    os.environ.setdefault("DS_ACCELERATOR", args[0].trainer.placement.resolved_device())
    from skyrl_train.training_backends.deepspeed.backend import DeepSpeedBackend

    return DeepSpeedBackend(*args)

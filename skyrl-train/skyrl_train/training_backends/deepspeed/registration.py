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
    """Build this rank's backend. Arguments: as for `TrainingBackend`."""
    # DeepSpeed selects its device at import, and would take any visible GPU.
    os.environ.setdefault("DS_ACCELERATOR", args[0].trainer.placement.resolve_device())
    from skyrl_train.training_backends.deepspeed.backend import DeepSpeedBackend

    return DeepSpeedBackend(*args)

"""Registration of FSDP2 as `trainer.strategy=fsdp2`."""

from typing import Any

from skyrl_train.config.training_backends import register_training_backend


@register_training_backend("fsdp2")
def fsdp2(*args: Any) -> Any:
    """Make this rank's backend. Arguments: those of `TrainingBackend`."""
    from skyrl_train.training_backends.fsdp2.backend import FSDP2Backend

    return FSDP2Backend(*args)

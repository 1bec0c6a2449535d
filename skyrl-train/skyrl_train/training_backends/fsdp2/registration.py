"""Registration of FSDP2 as `trainer.strategy=fsdp2`, and as `fsdp` for scripts of other releases."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from skyrl_train.config.training_backends import TrainingBackendTraits, register_training_backend

if TYPE_CHECKING:
    from skyrl_train.training_backends.fsdp2.backend import FSDP2Backend


TRAITS = TrainingBackendTraits(
    section="fsdp_config",
    routing_replay=True,
    candidates=True,
    sampling_masks=True,
    compiled_layers=True,
    memory_like="fsdp2",
)


@register_training_backend("fsdp", requires=replace(TRAITS, alias_of="fsdp2", section=None))
@register_training_backend("fsdp2", requires=TRAITS)
def fsdp2(*args: Any) -> "FSDP2Backend":
    """Build this rank's backend. Arguments: as for `TrainingBackend`."""
    from skyrl_train.training_backends.fsdp2.backend import FSDP2Backend

    return FSDP2Backend(*args)

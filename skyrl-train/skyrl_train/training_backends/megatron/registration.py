"""Registration of Megatron-Core as `trainer.strategy=megatron`."""

import logging
import warnings
from typing import TYPE_CHECKING, Any

from skyrl_train.config.training_backends import TrainingBackendTraits, register_training_backend
from skyrl_train.training_backends.megatron.settings import check_model_config, check_settings

if TYPE_CHECKING:
    from skyrl_train.training_backends.megatron.backend import MegatronBackend

_TRAITS = TrainingBackendTraits(
    library="megatron.core",
    install_hint="scripts/setup.sh --extra mcore",
    sequence_parallel=False,
    adapters=False,
    routing_replay=True,
    ranks_per_replica=lambda settings: settings.megatron_config.ranks_per_replica,
    memory_like="megatron",
    check_settings=check_settings,
    check_model_config=check_model_config,
)


@register_training_backend("megatron", requires=_TRAITS)
def megatron(*args: Any) -> "MegatronBackend":
    """Build this rank's backend. Arguments: as for `TrainingBackend`."""
    logging.getLogger("megatron").setLevel(logging.WARNING)  # it prints its environment, and buckets of each model
    with warnings.catch_warnings():
        # At import megatron-core warns of each missing library, and uses names that torch has deprecated.
        warnings.simplefilter("ignore")
        from skyrl_train.training_backends.megatron.backend import MegatronBackend
    # Later it warns of its own defaults, and calls collectives by names that newer releases of torch have replaced.
    warnings.filterwarnings("ignore", module=r"megatron\.")
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated")
    return MegatronBackend(*args)

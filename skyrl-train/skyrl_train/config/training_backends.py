"""Training backends: the registry that `trainer.strategy` is checked against, and the traits of each.

Each is declared in `training_backends/<name>/registration.py`, which imports neither its library nor torch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from skyrl_train.config.registry import Registry

if TYPE_CHECKING:
    from skyrl_train.config.config import SkyRLConfig


def _accept(*_args: object) -> None:
    """Check nothing."""


def _get_sequence_parallel_size(settings: Any) -> int:
    return settings.sequence_parallel_size


@dataclass(frozen=True, kw_only=True)
class TrainingBackendTraits:
    """Static facts of a training backend, known before a model is loaded."""

    library: str | None = None
    """Package that must be installed; None: nothing beyond the trainer's dependencies."""

    install_hint: str = "see INSTALL.md"

    alias_of: str | None = None
    """Current name of this backend, which replaces the old name with a warning."""

    section: str | None = None
    """Section of a model's settings that only this backend reads, such as `fsdp_config`."""

    max_ranks: int | None = None
    """Maximum number of ranks of a model; None: no limit."""

    sequence_parallel: bool = True
    """Ranks may share sequences (`sequence_parallel_size`)."""

    adapters: bool = True
    """Trains low-rank adapters (`model.lora.rank`)."""

    routing_replay: bool = False
    """Replays and records the routes of a mixture of experts (`trainer.policy.routing_replay`)."""

    sampling_masks: bool = False
    """Renormalizes log-probs over recorded tokens (`trainer.policy.sampling_mask_replay`)."""

    compiled_layers: bool = False
    """Trains models whose layers are compiled (`trainer.compile_layers`)."""

    candidates: bool = False
    """Scores tokens that were not sampled (`trainer.distillation.tokens=top_k` and `full`)."""

    ranks_per_replica: Callable[[Any], int] = _get_sequence_parallel_size
    """Section of a model -> number of ranks that share the rows of a data-parallel rank."""

    memory_like: str | None = None
    """Name of its memory estimate (`skyrl_train/memory_plan/backends.py`); None: memory is not estimated."""

    check_settings: Callable[["SkyRLConfig"], None] = _accept
    """Check backend-specific rules between settings. Raises ConfigError."""

    check_model_config: Callable[[Any, Any, str], None] = _accept
    """Check (transformers config, section of a model, section name) for support of the model. Raises ConfigError."""

    @property
    def is_installed(self) -> bool:
        """Whether the required library is installed."""
        if self.library is None:
            return True
        try:
            return find_spec(self.library) is not None
        except ModuleNotFoundError:  # of a package inside a missing one
            return False


TrainingBackendRegistry: Registry[Callable[..., Any], TrainingBackendTraits] = Registry(
    "training backend",
    TrainingBackendTraits,
    (
        "skyrl_train.training_backends.fsdp2.registration",
        "skyrl_train.training_backends.megatron.registration",
        "skyrl_train.training_backends.deepspeed.registration",
    ),
)
"""Name -> builder of a `TrainingBackend` from `(cfg, model name, number of optimizer steps or None)`, called on every
rank; it imports its library there. A subclass of `TrainingBackend` is a builder."""

register_training_backend = TrainingBackendRegistry.build_decorator


def get_ranks_per_replica(config: "SkyRLConfig", model: str) -> int:
    """Return the number of ranks of a model ("policy", "critic", "ref") that share the rows of a data-parallel rank."""
    traits = TrainingBackendRegistry.get_requirements(config.trainer.strategy)
    return traits.ranks_per_replica(getattr(config.trainer, model))

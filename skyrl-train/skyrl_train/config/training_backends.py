"""Training backends: the registry that `trainer.strategy` is checked against, and what each declares.

Each is declared in `training_backends/<name>/registration.py`, which imports neither its library nor torch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from skyrl_train.config.registry import Registry


@dataclass(frozen=True, kw_only=True)
class TrainingBackendTraits:
    """Static facts of a training backend, known before a model is loaded."""

    library: str | None = None
    """Package that must be installed; None: no other than the trainer's own."""

    install_hint: str = "see INSTALL.md"

    max_ranks: int | None = None
    """Most ranks of a model; None: any number."""

    sequence_parallel: bool = True
    """Ranks may share sequences (`sequence_parallel_size`)."""

    adapters: bool = True
    """Trains low-rank adapters (`model.lora.rank`)."""

    @property
    def is_installed(self) -> bool:
        """Whether its library is there."""
        return self.library is None or find_spec(self.library) is not None


TrainingBackendRegistry: Registry[Callable[..., Any], TrainingBackendTraits] = Registry(
    "training backend",
    TrainingBackendTraits,
    ("skyrl_train.training_backends.fsdp2.registration",),
)
"""Name -> builder of a `TrainingBackend` from `(cfg, model name, number of optimizer steps or None)`, called on every
rank; it imports its library there. A subclass of `TrainingBackend` is one."""

register_training_backend = TrainingBackendRegistry.decorator

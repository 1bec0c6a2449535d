"""Training backends by the name that `trainer.strategy` gives them. One line adds a backend."""

from importlib import import_module

from skyrl_train.config import SkyRLConfig
from skyrl_train.training_backends.base import ModelName, TrainingBackend

TRAINING_BACKENDS = {
    "fsdp2": "skyrl_train.training_backends.fsdp2.backend:FSDP2Backend",
}
"""Name to `module:Class`, imported when it is used: a backend's libraries may be an optional extra."""


def create_backend(cfg: SkyRLConfig, name: ModelName, num_training_steps: int | None = None) -> TrainingBackend:
    """Make this rank's backend of a model, of the class that `trainer.strategy` names."""
    module, _, kind = TRAINING_BACKENDS[cfg.trainer.strategy].partition(":")
    return getattr(import_module(module), kind)(cfg, name, num_training_steps)

"""Shapes of the models of a run, from their configs."""

from collections.abc import Mapping

from skyrl_train.config import RefConfig, SkyRLConfig
from skyrl_train.config.training_backends import TrainingBackendRegistry
from skyrl_train.memory_plan.backends import Role
from skyrl_train.memory_plan.memory import list_roles
from skyrl_train.memory_plan.model_shape import ModelShape, compute_model_shape, load_model_config


def load_shapes(
    cfg: SkyRLConfig, files: Mapping[str, str] | None = None, *, offline: bool = True
) -> dict[Role, ModelShape]:
    """Return the shapes of a run's models.

    Args:
        files: path of a model -> config.json to read instead.
        offline: take hub names from the local cache alone.

    Raises:
        ConfigError: a config cannot be read, or the training backend cannot hold the model.
    """
    shapes: dict[Role, ModelShape] = {}
    check = TrainingBackendRegistry.get_requirements(cfg.trainer.strategy).check_model_config
    for role in list_roles(cfg):
        settings = getattr(cfg.trainer, role)
        path = settings.model.path
        config = load_model_config(
            path, f"trainer.{role}.model.path", config_file=(files or {}).get(path), offline=offline
        )
        check(config, settings, f"trainer.{role}")
        lora = None if isinstance(settings, RefConfig) else settings.model.lora
        shapes[role] = compute_model_shape(
            config, lora=lora, overrides=settings.model_config_kwargs, is_critic=role == "critic"
        )
    return shapes

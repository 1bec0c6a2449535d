"""Base class of all sections of settings."""

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any

from skyrl_train.config.other_releases import translate_settings
from skyrl_train.config.typed import build, to_dict
from skyrl_train.errors import ConfigError

if TYPE_CHECKING:
    from typing import Self

    from omegaconf import DictConfig


class BaseConfig:
    """Base of a section of settings. Errors have full names when the section is built as a part of `SkyRLConfig`."""

    @classmethod
    def from_dict(cls, values: "Mapping[str, object] | DictConfig") -> "Self":
        """Build typed settings from plain values or OmegaConf's, resolving interpolations first. Settings of other
        releases are accepted if they request the existing behaviour.

        Raises:
            ConfigError: an unknown name, a type or choice that does not fit, or a missing value.
        """
        return build(cls, translate_settings(to_plain_values(values), lambda: get_default_values(cls)))

    @classmethod
    def from_dict_config(cls, values: "Mapping[str, object] | DictConfig") -> "Self":
        """Same as `from_dict`, under the name that other SkyRL releases use."""
        return cls.from_dict(values)


def get_default_values(config_type: type[Any]) -> dict[str, Any]:
    """Return the defaults as plain values. References to other settings stay text, so that Hydra resolves them last."""
    return {
        field.name: to_dict(field.default if field.default_factory is MISSING else field.default_factory())
        for field in fields(config_type)
    }


def to_plain_values(values: "Mapping[str, object] | DictConfig") -> dict[str, Any]:
    """Convert a dict or a DictConfig to plain values."""
    if isinstance(values, dict):
        return values
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    if not isinstance(values, DictConfig):
        return dict(values)
    try:
        plain = OmegaConf.to_container(values, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"the settings cannot be resolved: {error}") from error
    return plain  # type: ignore[return-value]

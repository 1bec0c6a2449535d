"""Hydra's view of the settings: the defaults under the name `ppo_base_config`, built from the dataclasses.

No YAML file is needed. `@hydra.main(config_path=config_dir, config_name="ppo_base_config")` finds the defaults, and so
does a user's YAML with `defaults: [ppo_base_config, _self_]`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from skyrl_train.config.base import BaseConfig, get_default_values
from skyrl_train.config.config import SkyRLConfig
from skyrl_train.errors import ConfigError

if TYPE_CHECKING:
    from omegaconf import DictConfig

_composed_names: dict[tuple[type[BaseConfig], str], str] = {}
"""Settings type and changed defaults -> name under which `compose_config` registered them."""

config_dir = str(Path(__file__).resolve().parent)
"""Folder to pass to Hydra as `config_path`: this package."""

_HYDRA_SETTINGS: dict[str, object] = {
    # trainer.run_dir is the run folder: Hydra must not change directory or write files.
    "output_subdir": None,
    "run": {"dir": "."},
    "job": {"chdir": False},
    # Its file handler cannot be removed by merging, but opens its file only on the first write, which never happens.
    "job_logging": {"root": {"handlers": ["console"]}, "handlers": {"file": {"delay": True}}},
}


_APPENDED = ("trainer.algorithm.overlong_buffer",)
"""Sections that scripts of other releases append (`+section.name=value`). Hydra appends only missing names, so these
sections are not part of its defaults; they can be set without the `+`, too. Their defaults come from the dataclass."""


def register_config_store(
    config_type: type[BaseConfig] = SkyRLConfig,
    name: str = "ppo_base_config",
    changes: Mapping[str, object] | None = None,
) -> None:
    """Register the defaults of `config_type` with Hydra as `name`. A second call replaces the first.

    Args:
        changes: setting -> default that differs under this name.
    """
    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf

    node = get_default_config(config_type)
    for setting, value in (changes or {}).items():
        OmegaConf.update(node, setting, value)
    for name_of_section in _APPENDED:
        *path, last = name_of_section.split(".")
        parent = node
        for part in path:
            parent = parent.get(part, {})
        parent.pop(last, None)
    node["hydra"] = _HYDRA_SETTINGS
    ConfigStore.instance().store(name=name, node=node)


def compose_config(
    overrides: Sequence[str],
    config_type: type[BaseConfig] = SkyRLConfig,
    changes: Mapping[str, object] | None = None,
) -> "DictConfig":
    """Compose the settings of a command line (`key=value`) like an entry point, for a script or a notebook.

    Names and values are checked by the consumer: an experiment such as `BasePPOExp`, or `validate_cfg`.

    Args:
        changes: as in `register_config_store`.

    Raises:
        ConfigError: an override that Hydra cannot parse.
    """
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    key = config_type, repr(sorted((changes or {}).items()))
    if key not in _composed_names:
        _composed_names[key] = f"composed_base_config_{len(_composed_names)}"
        register_config_store(config_type, _composed_names[key], changes)
    try:
        with initialize_config_dir(config_dir, version_base=None):
            return compose(_composed_names[key], overrides=list(overrides))
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(f"the settings {' '.join(overrides)} cannot be composed: {error}") from error


def get_default_config(config_type: type[BaseConfig] = SkyRLConfig) -> "DictConfig":
    """Return the defaults as an OmegaConf tree with live interpolations.

    Its sections accept unknown names, so that `from_dict` can reject them and suggest the nearest valid one.
    """
    from omegaconf import DictConfig, OmegaConf

    def accept_unknown_names(section: DictConfig) -> None:
        OmegaConf.set_struct(section, False)
        for _, child in section.items_ex(resolve=False):  # parsing the references takes most of the time
            if isinstance(child, DictConfig):
                accept_unknown_names(child)

    defaults = OmegaConf.create(get_default_values(config_type))
    accept_unknown_names(defaults)
    return defaults

"""Rules of the environments' own sections."""

from skyrl_train.config.config import SkyRLConfig
from skyrl_train.config.rules.checks import require
from skyrl_train.config.typed import build, nearest_name
from skyrl_train.errors import ConfigError


def validate_environments(config: SkyRLConfig) -> None:
    """Every environment that the settings name must be registered, and have the settings its section gives it: what is
    misspelt would be read by nobody.

    Call it where custom environments have been registered (they are registered per process), before the first rollout.
    """
    from skyrl_gym.envs.registration import env_class_of, registry

    names = {}
    if config.generator.task is None:
        require(
            config.environment.env_class is not None,
            "environment.env_class is null: name an environment, or set generator.task to a task file",
        )
        names["environment.env_class"] = config.environment.env_class
    names |= {f"section environment.skyrl_gym.{name}": name for name in config.environment.skyrl_gym.env_configs}
    for setting, name in names.items():
        near = nearest_name(name, sorted(registry))
        require(
            name in registry,
            f"{setting}: no environment {name!r} is registered"
            + (f"; did you mean {near}?" if near else f"; registered are {', '.join(sorted(registry))}"),
        )
    for name, section in config.environment.skyrl_gym.env_configs.items():
        config_class = getattr(env_class_of(registry[name]), "config_class", None)
        if config_class is not None:
            try:
                build(config_class, section, f"environment.skyrl_gym.{name}", config_class)
            except ConfigError:
                raise
            except ValueError as error:  # a rule of the environment's own
                raise ConfigError(f"environment.skyrl_gym.{name}: {error}") from error

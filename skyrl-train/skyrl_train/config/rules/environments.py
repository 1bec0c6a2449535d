"""Rules of environment sections."""

from typing import TYPE_CHECKING

from skyrl_train.config.config import SkyRLConfig
from skyrl_train.config.rules.checks import check_rule
from skyrl_train.config.typed import build
from skyrl_train.errors import ConfigError

if TYPE_CHECKING:
    from skyrl_gym.envs.registration import EnvSpec


def validate_environments(config: SkyRLConfig) -> None:
    """Check that all configured environments exist and accept the settings of their sections. Misspelt settings would
    otherwise be ignored.

    Call it where custom environments have been registered (registration is per process), before the first rollout.
    """
    from skyrl_gym.envs.registration import env_class_of

    env_class = config.environment.env_class
    if config.generator.uses_environments:
        check_rule(
            env_class is not None,
            "environment.env_class is null: set it to an environment, or set generator.task or generator.harness",
        )
        assert env_class is not None
        _get_spec("environment.env_class", env_class)
    for name, section in config.environment.skyrl_gym.env_configs.items():
        # An environment given as "package.module:Class" has a section named after the class.
        env_id = env_class if env_class and env_class.endswith(f":{name}") else name
        env_spec = _get_spec(f"section environment.skyrl_gym.{name}", env_id)
        config_class = getattr(env_class_of(env_spec), "config_class", None)
        if config_class is not None:
            try:
                build(config_class, section, f"environment.skyrl_gym.{name}", config_class)
            except ConfigError:
                raise
            except ValueError as error:  # a rule of the environment itself
                raise ConfigError(f"environment.skyrl_gym.{name}: {error}") from error


def _get_spec(setting: str, env_id: str) -> "EnvSpec":
    """Return the environment that a setting names. Raises ConfigError with the nearest id or the import error."""
    from skyrl_gym import error
    from skyrl_gym.envs.registration import registry, spec
    from skyrl_gym.suggestions import did_you_mean

    try:
        return spec(env_id)
    except error.Error as unknown:
        reason = unknown.__cause__ or did_you_mean(env_id, sorted(registry))
        raise ConfigError(f"{setting}: environment {env_id!r} is not registered; {reason}") from unknown

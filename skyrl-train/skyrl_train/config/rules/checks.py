"""Building blocks of the rules."""

from collections.abc import Iterable
from typing import Any

from skyrl_train.config.config import SkyRLConfig
from skyrl_train.config.generation import GeneratorConfig
from skyrl_train.errors import ConfigError


def check_rule(holds: bool, message: str) -> None:
    """Raise ConfigError with `message` unless the rule holds."""
    if not holds:
        raise ConfigError(message)


def get_setting(config: SkyRLConfig, name: str) -> Any:
    """Return the value of the setting with this full name."""
    value: Any = config
    for part in name.split("."):
        value = getattr(value, part)
    return value


def check_positive(config: SkyRLConfig, names: Iterable[str]) -> None:
    """Check that each of these settings is above 0, or an allowed null."""
    for name in names:
        value = get_setting(config, name)
        check_rule(value is None or value > 0, f"{name} must be greater than 0; got {value}")


def check_not_negative(config: SkyRLConfig, names: Iterable[str]) -> None:
    """Check that none of these settings is below 0."""
    for name in names:
        value = get_setting(config, name)
        check_rule(value >= 0, f"{name} must be 0 or greater; got {value}")


def check_shares(config: SkyRLConfig, names: Iterable[str]) -> None:
    """Check that each of these settings is from 0 to 1."""
    for name in names:
        value = get_setting(config, name)
        check_rule(0 <= value <= 1, f"{name} must be from 0 to 1; got {value}")


def check_order(config: SkyRLConfig, low: str, high: str) -> None:
    """Check that, of two bounds that are both set, the lower is not above the upper."""
    lower, upper = get_setting(config, low), get_setting(config, high)
    check_rule(
        lower is None or upper is None or lower <= upper,
        f"{low}={lower} must not be above {high}={upper}: the range would be empty",
    )


def format_choices(setting: str, names: list[str]) -> str:
    """Format `setting=a or setting=b`, for the fix in an error."""
    return " or ".join(f"{setting}={name}" for name in names)


def check_sampled_tokens_are_kept(generator: GeneratorConfig, setting: str, fix: str) -> None:
    """Require that conversations keep the sampled tokens, for which `setting` records data.

    Raises:
        ConfigError: a chat template renders them again at each turn.
    """
    is_rendered_anew = (
        generator.chat_template.name_or_path is not None
        and generator.use_conversation_multi_turn
        and not generator.step_wise_trajectories
    )
    check_rule(
        not is_rendered_anew,
        f"{setting} cannot be combined with "
        f"generator.chat_template.name_or_path={generator.chat_template.name_or_path!r}: the conversation is "
        "tokenized again in each turn, so its tokens can differ from the sampled ones. Set "
        f"generator.step_wise_trajectories=true, or {fix}",
    )

"""Agents as generators: `generator.task` and `generator.harness`. skyrl-agent is imported only if a run uses it."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from skyrl_train.config.generation import GeneratorConfig
from skyrl_train.errors import ConfigError
from skyrl_train.generators.base import GeneratorInterface
from skyrl_train.generators.harness.generator import HarnessGenerator
from skyrl_train.inference_engines.base import InferenceEngineInterface

if TYPE_CHECKING:
    from skyrl_agent.integrations.skyrl_train.skyrl_train_backend import SkyRLAgentGenerator


def build_agent_generator(
    cfg: GeneratorConfig, tokenizer: Any, client: InferenceEngineInterface | None
) -> GeneratorInterface:
    """Build the generator of agent trajectories.

    Args:
        client: None to only check the settings.

    Raises:
        ConfigError: skyrl-agent is not installed, or the task file or the harness is invalid.
    """
    return _get_generator_class(cfg)(cfg, client, tokenizer)


def check_agent(cfg: GeneratorConfig, tokenizer: Any, data: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Check the agent, and that it can read the rows of the data (setting -> rows). Raises ConfigError."""
    generator = _get_generator_class(cfg)(cfg, None, tokenizer)
    for setting, rows in data.items():
        generator.check_rows(rows, setting)


def _get_generator_class(cfg: GeneratorConfig) -> "type[SkyRLAgentGenerator | HarnessGenerator]":
    if cfg.harness.is_on:
        return HarnessGenerator
    try:
        from skyrl_agent.integrations.skyrl_train.skyrl_train_backend import SkyRLAgentGenerator
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"generator.task={cfg.task} needs the package skyrl-agent ({error.name} is not installed); install it, or "
            "remove generator.task"
        ) from error
    return SkyRLAgentGenerator

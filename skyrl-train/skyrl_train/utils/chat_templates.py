"""Chat template of the settings `generator.chat_template` and `generator.chat_template_kwargs`."""

from typing import TYPE_CHECKING

from skyrl_gym.chat.template import ChatTemplate, ChatTemplateError, ChatTokenizer, bundled_template, read_template_file
from skyrl_train.errors import ConfigError

if TYPE_CHECKING:
    from skyrl_train.config import ChatTemplateConfig, GeneratorConfig

CUSTOM_CHAT_TEMPLATES: dict[str, str] = {
    name: bundled_template(name) for name in ("qwen3_with_thinking", "qwen3_without_thinking")
}
"""Templates shipped with this package, by name."""


def get_custom_chat_template(config: "ChatTemplateConfig") -> str | None:
    """Return the configured template; None: the tokenizer's.

    Raises:
        ConfigError: an unknown name or source, or a file that is missing, larger than 1 MB or not text.
    """
    name = config.name_or_path
    if not name:
        return None
    if config.source not in ("name", "file"):
        raise ConfigError(f"generator.chat_template.source must be one of name, file; got {config.source!r}")
    if config.source == "name" and name not in CUSTOM_CHAT_TEMPLATES:
        raise ConfigError(
            f"generator.chat_template.name_or_path must be one of {', '.join(sorted(CUSTOM_CHAT_TEMPLATES))} (or set "
            f"generator.chat_template.source=file to use a path); got {name!r}"
        )
    if config.source == "name":
        return CUSTOM_CHAT_TEMPLATES[name]
    try:
        return read_template_file("generator.chat_template.name_or_path", name)
    except ChatTemplateError as error:
        raise ConfigError(str(error)) from error


def get_configured_chat_template(tokenizer: ChatTokenizer, generator: "GeneratorConfig") -> ChatTemplate:
    """Return the template used to render prompts wherever a run measures, encodes or continues them.

    Raises:
        ConfigError: as `get_custom_chat_template`.
    """
    return ChatTemplate(tokenizer, get_custom_chat_template(generator.chat_template), generator.chat_template_kwargs)

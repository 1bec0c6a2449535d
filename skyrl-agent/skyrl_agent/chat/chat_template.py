"""Chat template of the task file's settings."""

from skyrl_agent.errors import ConfigError
from skyrl_gym.chat.template import ChatTemplateError, bundled_template, read_template_file


def get_configured_chat_template(path: str | None, qwen3_acc_thinking: bool = False) -> str | None:
    """Return the template of `generator.chat_template` or `generator.qwen3_acc_thinking`; None: the tokenizer's own.

    Raises:
        ConfigError: both are given, or the file is missing, larger than 1 MiB or not text.
    """
    if path is None:
        return bundled_template("qwen3_acc_thinking") if qwen3_acc_thinking else None
    if qwen3_acc_thinking:
        raise ConfigError(
            f"generator.chat_template={path!r} and generator.qwen3_acc_thinking both set the chat template; remove "
            "one of them"
        )
    try:
        return read_template_file("generator.chat_template", path)
    except ChatTemplateError as error:
        raise ConfigError(str(error)) from error

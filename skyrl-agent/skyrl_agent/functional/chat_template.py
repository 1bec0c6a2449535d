"""Chat templates in place of the tokenizer's own."""

from importlib.resources import files
from pathlib import Path

from skyrl_agent.errors import ConfigError

QWEN3_ACC_THINKING = "qwen3_acc_thinking.jinja2"
MAX_BYTES = 1 << 20


def bundled_chat_template(name: str = QWEN3_ACC_THINKING) -> str:
    """One of `functional/templates`."""
    return files("skyrl_agent.functional").joinpath("templates", name).read_text(encoding="utf-8")


def chat_template_of(path: str | None, qwen3_acc_thinking: bool = False) -> str | None:
    """What the task file's `generator.chat_template` and `generator.qwen3_acc_thinking` ask for; None: the tokenizer's.

    Raises:
        ConfigError: both are given, or the file is missing, larger than 1 MiB or not text.
    """
    if path is None:
        return bundled_chat_template() if qwen3_acc_thinking else None
    setting = f"generator.chat_template={path!r}"
    if qwen3_acc_thinking:
        raise ConfigError(f"{setting} and generator.qwen3_acc_thinking each choose a template; give one of them")
    file = Path(path).expanduser()
    try:
        if file.stat().st_size > MAX_BYTES:
            raise ConfigError(f"{setting} has {file.stat().st_size} bytes; a chat template has at most {MAX_BYTES}")
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{setting} cannot be read (looked in {Path.cwd()}): {error}") from error

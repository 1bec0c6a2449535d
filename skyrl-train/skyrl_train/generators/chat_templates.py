"""Chat templates of our own, and how a configured one is found. Knows no tokenizer."""

from pathlib import Path
from typing import TYPE_CHECKING

from skyrl_train.errors import ConfigError

if TYPE_CHECKING:
    from skyrl_train.config import ChatTemplateConfig

MAX_TEMPLATE_BYTES = 1024 * 1024

# ChatML. The `generation` block marks what the model writes (its text and the token that ends it), which is what makes
# `return_assistant_tokens_mask` possible.
_CHATML_WITH_GENERATION_MARKS = """\
{%- set ns = namespace(last_answer=-1) -%}
{%- for message in messages -%}
  {%- if message['role'] == 'assistant' -%}{%- set ns.last_answer = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
  {{- '<|im_start|>' + message['role'] + '\\n' -}}
  {%- if message['role'] == 'assistant' -%}
    {%- set text = ANSWER_TEXT -%}
    {%- generation -%}{{- text + '<|im_end|>' -}}{%- endgeneration -%}
    {{- '\\n' -}}
  {%- else -%}
    {{- message['content'] + '<|im_end|>\\n' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""

_WHOLE_ANSWER = "message['content']"
_ANSWER_WITHOUT_EARLIER_THOUGHTS = (
    "(message['content'] if loop.index0 == ns.last_answer "
    "else message['content'].split('</think>')[-1].lstrip('\\n') if '</think>' in message['content'] "
    "else message['content'])"
)

CUSTOM_CHAT_TEMPLATES: dict[str, str] = {
    "qwen3_with_thinking": _CHATML_WITH_GENERATION_MARKS.replace("ANSWER_TEXT", _WHOLE_ANSWER),
    "qwen3_without_thinking": _CHATML_WITH_GENERATION_MARKS.replace("ANSWER_TEXT", _ANSWER_WITHOUT_EARLIER_THOUGHTS),
}
"""`qwen3_with_thinking` keeps all thinking text; `qwen3_without_thinking` drops `<think>…</think>` from every answer
but the last."""


def get_custom_chat_template(config: "ChatTemplateConfig") -> str | None:
    """The template that `generator.chat_template` asks for; None if it asks for the tokenizer's own.

    Raises:
        ConfigError: an unknown name or source, or a file that is missing, larger than 1 MB or not text.
    """
    if not config.name_or_path:
        return None
    if config.source == "name":
        return _template_by_name(config.name_or_path)
    if config.source == "file":
        return _template_from_file(config.name_or_path)
    raise ConfigError(f"generator.chat_template.source must be one of name, file; got {config.source!r}")


def _template_by_name(name: str) -> str:
    if name not in CUSTOM_CHAT_TEMPLATES:
        raise ConfigError(
            f"generator.chat_template.name_or_path must be one of {', '.join(sorted(CUSTOM_CHAT_TEMPLATES))} "
            f"(or set generator.chat_template.source=file to give a path); got {name!r}"
        )
    return CUSTOM_CHAT_TEMPLATES[name]


def _template_from_file(path_text: str) -> str:
    setting = f"generator.chat_template.name_or_path={path_text!r}"
    if "\0" in path_text:
        raise ConfigError(f"{setting} has a null byte; give the path of a Jinja file")
    path = Path(path_text).expanduser()
    if not path.is_file():
        raise ConfigError(f"{setting} is not a file (looked in {Path.cwd()})")
    if path.stat().st_size > MAX_TEMPLATE_BYTES:
        raise ConfigError(
            f"{setting} has {path.stat().st_size} bytes; a chat template has at most {MAX_TEMPLATE_BYTES}"
        )
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{setting} is not UTF-8 text: {error}") from error

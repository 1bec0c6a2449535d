"""Chat templates: messages to text and token ids. Independent of conversation state."""

from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Protocol

from skyrl_gym.chat.turn_ends import TurnEnds, find_turn_ends
from skyrl_gym.valid_unicode import replace_lone_surrogates

Message = dict[str, Any]
"""OpenAI chat message: `role`, `content`, and whatever else the chat template reads."""

MAX_TEMPLATE_BYTES = 1024 * 1024
MAX_HEADS, LONGEST_HEAD = 64, 64
"""Number and length of texts whose ids `ChatTemplate.encode_after` remembers."""

_MARK = "skyrl-mark"
_QUESTION: Message = {"role": "user", "content": "Hello."}
_ANSWER: Message = {"role": "assistant", "content": _MARK}


class ChatTokenizer(Protocol):
    """Tokenizer interface, as transformers implement it."""

    chat_template: Any

    def __call__(self, text: str, *, add_special_tokens: bool) -> Mapping[str, list[int]]: ...
    def decode(
        self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool = ...
    ) -> Any: ...
    def get_chat_template(self, chat_template: str | None, tools: list[Message] | None) -> str: ...
    def apply_chat_template(self, conversation: list[Message], **options: Any) -> Any: ...


class ChatTemplateError(ValueError):
    """Failure of a chat template to render its messages."""


class ChatTemplate:
    """Tokenizer with its chat template.

    Args:
        chat_template: Jinja text; None: the tokenizer's own.
        kwargs: variables of the template besides messages, such as `enable_thinking`.
    """

    def __init__(
        self, tokenizer: ChatTokenizer, chat_template: str | None = None, kwargs: Mapping[str, object] | None = None
    ) -> None:
        self.tokenizer, self.chat_template = tokenizer, chat_template
        self.kwargs: Message = dict(kwargs or {})
        self._backend = _get_backend(tokenizer)
        self._heads: dict[str, list[int]] = {}

    @property
    def source(self) -> str | None:
        """Jinja text; None if the tokenizer has no template, or several under names."""
        template = self.chat_template or self.tokenizer.chat_template
        return template if isinstance(template, str) else None

    @cached_property
    def turn_ends(self) -> TurnEnds:
        """Ends of the model's turns, as its files and this template define them."""
        rests = []
        for messages in ([_QUESTION, _ANSWER], [_QUESTION, _ANSWER, _QUESTION]):
            try:
                rests.append(ChatTemplate.text(self, messages).rpartition(_MARK)[2])
            except ChatTemplateError:  # the template of completions, or none
                rests.append("")
        return find_turn_ends(self.tokenizer, *rests)

    def text(self, messages: Sequence[Message], add_generation_prompt: bool = False, **options: object) -> str:
        """Render a conversation. `options` override `kwargs`.

        Raises:
            ChatTemplateError: the template cannot render these messages.
        """
        from jinja2 import TemplateError  # comes with every tokenizer that has a template; environments need none

        try:
            text = self.tokenizer.apply_chat_template(
                list(messages),
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                chat_template=self.chat_template,
                **(self.kwargs | options),
            )
        except (TemplateError, TypeError, ValueError, AttributeError, LookupError) as error:
            raise ChatTemplateError(f"the chat template cannot render these messages: {error}") from error
        return replace_lone_surrogates(text)

    def encode(self, text: str) -> list[int]:
        """Encode a text without special tokens around it."""
        text, backend = replace_lone_surrogates(text), self._backend
        # Settings of the backend that calls of others may have left behind.
        if backend is None or backend.padding or backend.truncation or backend.encode_special_tokens:
            return self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return backend.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def encode_after(self, before: str, text: str) -> list[int]:
        """Encode `text` as a continuation of `before`, since some tokenizers encode the start of a text differently. If
        a token spans the boundary, `text` is encoded separately."""
        head, whole = self._encode_head(before), self.encode(before + text)
        return whole[len(head) :] if whole[: len(head)] == head else self.encode(text)

    def _encode_head(self, text: str) -> list[int]:
        """Encode a text that precedes others. The end of a turn is used in every turn, and remembered."""
        if len(text) > LONGEST_HEAD:
            return self.encode(text)
        if text not in self._heads:
            self._heads = {} if len(self._heads) >= MAX_HEADS else self._heads
            self._heads[text] = self.encode(text)
        return self._heads[text]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        if self._backend is not None:
            return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return self.tokenizer.decode(
            list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )


def turn_ends_of(tokenizer: ChatTokenizer) -> TurnEnds:
    """Return the ends of turns with the tokenizer's own chat template."""
    return _find_turn_ends(tokenizer, str(tokenizer.chat_template))


@lru_cache(maxsize=8)
def _find_turn_ends(tokenizer: ChatTokenizer, template: str) -> TurnEnds:
    return ChatTemplate(tokenizer).turn_ends


def _get_backend(tokenizer: ChatTokenizer) -> Any:
    """Return the `tokenizers` backend of a transformers tokenizer, which is faster; None without a backend, or if the
    class overrides encoding or decoding."""
    kind = type(tokenizer)
    base = next((each for each in kind.__mro__ if each.__name__ == "TokenizersBackend"), None)
    names = ("__call__", "_encode_plus", "decode", "_decode")
    if base is None or any(getattr(kind, name, None) is not getattr(base, name, None) for name in names):
        return None
    backend = getattr(tokenizer, "backend_tokenizer", None)
    splits = getattr(tokenizer, "split_special_tokens", False)
    return None if splits or not hasattr(backend, "encode_batch_fast") else backend


def bundled_template(name: str) -> str:
    """Return the text of `templates/<name>.jinja2`:

    - `qwen3_with_thinking`: ChatML that keeps all thoughts, with `generation` blocks, which mark what the model writes.
    - `qwen3_without_thinking`: the same, but `<think>...</think>` is dropped from all answers but the last.
    - `qwen3_acc_thinking`: Qwen3's own template with tools and thoughts of earlier turns.
    """
    return files("skyrl_gym.chat").joinpath("templates", f"{name}.jinja2").read_text(encoding="utf-8")


def read_template_file(setting: str, path: str) -> str:
    """Read a Jinja file.

    Args:
        setting: name for the error text.

    Raises:
        ChatTemplateError: the file is missing, larger than 1 MiB or not text.
    """
    named, file = f"{setting}={path!r}", Path(path).expanduser()
    if "\0" in path:
        raise ChatTemplateError(f"{named} has a null byte; use the path of a Jinja file")
    if not file.is_file():
        raise ChatTemplateError(f"{named} is not a file (looked in {Path.cwd()})")
    if file.stat().st_size > MAX_TEMPLATE_BYTES:
        raise ChatTemplateError(
            f"{named} has {file.stat().st_size} bytes; a chat template has at most {MAX_TEMPLATE_BYTES}"
        )
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ChatTemplateError(f"{named} is not UTF-8 text: {error}") from error

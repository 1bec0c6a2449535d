"""From chat messages to token ids, with a tokenizer and its chat template. Knows no conversation's state."""

import json
import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import jinja2

from skyrl_agent.errors import ConfigError
from skyrl_agent.types import Message

_STAND_IN: list[Message] = [{"role": "user", "content": "?"}]
"""The conversation in which `MessageEncoder.step` looks at one step alone."""

# String literals of a template, and those that look for more than words.
_STRING = re.compile(r"'((?:[^'\\\n]|\\.)*)'|\"((?:[^\"\\\n]|\\.)*)\"")
_TAG_LIKE = re.compile(r"[^\w\s.,:;!?'\"-]")


class MessageEncoder:
    """A tokenizer with its chat template and what the template reads beside messages.

    Args:
        tokenizer: of transformers, with an end-of-sequence token.
        tools: schemas for the template, in OpenAI's form.
        chat_template: Jinja text; None: the tokenizer's own.
        template_kwargs: such as `enable_thinking`.

    Raises:
        ConfigError: there is no template, or no end-of-sequence token.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        chat_template: str | None = None,
        template_kwargs: dict[str, Any] | None = None,
    ) -> None:
        if tokenizer.eos_token_id is None:
            raise ConfigError("the tokenizer has no end-of-sequence token (eos_token); set it in tokenizer_config.json")
        if chat_template is None and not tokenizer.chat_template:
            raise ConfigError(
                "the tokenizer has no chat template: use an instruct model, or set generator.chat_template"
            )
        self.tokenizer = tokenizer
        self.tools = list(tools) if tools else None
        self.chat_template: str = tokenizer.get_chat_template(chat_template, self.tools)
        self.template_kwargs = dict(template_kwargs or {})
        self.trusted: set[Any] = set()
        """Kinds of steps that `dialogue.Dialogue` has verified with this template."""

    def text(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
        """The conversation as the template renders it.

        Raises:
            ConfigError: it cannot.
        """
        prepared = [
            self._with_readable_calls(message) if message.get("tool_calls") else message for message in messages
        ]
        try:
            return self._rendered(prepared, add_generation_prompt)
        except (jinja2.TemplateError, TypeError, ValueError, AttributeError) as error:
            roles = ", ".join(_described(message) for message in messages[-6:])
            raise ConfigError(
                f"the chat template cannot render a conversation that ends in {roles}: {error}; "
                f"check generator.chat_template and generator.tool_format"
            ) from error

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """Ids of the conversation and the header after which the model writes. Raises ConfigError."""
        return self.ids(self.text(messages, add_generation_prompt=True))

    def ids(self, text: str) -> list[int]:
        """Of a whole text, without special tokens around it."""
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def ids_after(self, text: str) -> list[int]:
        """Of a text that follows others: some tokenizers treat the beginning of a text differently."""
        end, whole = self.ids(self.end_of_text), self.ids(self.end_of_text + text)
        return whole[len(end) :] if whole[: len(end)] == end else self.ids(text)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids, special tokens included."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    @property
    def end_of_text(self) -> str:
        return str(self.tokenizer.eos_token)

    def is_special(self, token_id: int) -> bool:
        return token_id in self._specials

    def split_at_end(self, text: str) -> tuple[str, str]:
        """A text up to its last special token, and that; empty where there is none."""
        found = [(text.rfind(special), special) for special in self._specials.values()]
        position, special = max(found, default=(-1, ""))
        return (text[:position], special) if position >= 0 else ("", "")

    def step(self, answer: Message, added: Sequence[Message]) -> str | None:
        """What the template writes for an answer, the messages after it and the next header, seen in a conversation of
        one question; None if it does not just append, or cannot."""
        try:
            text = self.text([*_STAND_IN, answer, *added], add_generation_prompt=True)
        except ConfigError:
            return None
        return text[len(self._question) :] if text.startswith(self._question) else None

    def last_answer(self, answer: Message) -> str | None:
        """What the template writes for an answer after which nothing follows, as in `step`."""
        try:
            text = self.text([*_STAND_IN, answer])
        except ConfigError:
            return None
        return text[len(self._question) :] if text.startswith(self._question) else None

    def shape(self, message: Message) -> tuple[Any, ...]:
        """What templates look at in a message beside copying it: role, fields that are there, white space at the ends,
        and which of the tags that the template names stand in it."""
        fields = []
        for key, value in sorted(message.items()):
            text = value if isinstance(value, str) else ""
            marks = tuple(tag for tag in self._tags if tag in text)
            edges = (text[:1].isspace(), text[-1:].isspace(), text.startswith(marks), text.endswith(marks))
            count = len(value) if isinstance(value, list | dict) else -1
            fields.append((key, type(value).__name__, bool(value), count, marks, edges))
        return message.get("role"), *fields

    @cached_property
    def _tags(self) -> tuple[str, ...]:
        strings = ((first or second).replace("\\n", "\n") for first, second in _STRING.findall(self.chat_template))
        return tuple(sorted({text.strip() for text in strings if _TAG_LIKE.search(text)}))

    @cached_property
    def _question(self) -> str:
        return self.text(_STAND_IN, add_generation_prompt=True)

    @cached_property
    def _specials(self) -> dict[int, str]:
        added = {id: str(token) for id, token in self.tokenizer.added_tokens_decoder.items() if token.special}
        return {**added, self.tokenizer.eos_token_id: self.end_of_text}

    def _rendered(self, messages: list[Message], add_generation_prompt: bool) -> str:
        return self.tokenizer.apply_chat_template(
            messages,
            tools=self.tools,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            chat_template=self.chat_template,
            **self.template_kwargs,
        )

    def _with_readable_calls(self, message: Message) -> Message:
        style = self._call_style
        if style is None:
            raise ConfigError(
                "the chat template does not render tool calls: set generator.chat_template to one that does, or "
                "generator.tool_format to function_xml"
            )
        return _in_style(message, *style)

    @cached_property
    def _call_style(self) -> tuple[bool, bool] | None:
        """(arguments are text, no content is null): templates differ in what they can read of a call."""
        call = {
            "id": "call00000",
            "type": "function",
            "function": {"name": "skyrl_name", "arguments": '{"skyrl_key": "x"}'},
        }
        probe: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
        for style in ((False, False), (True, False), (False, True), (True, True)):
            try:
                text = self._rendered([*_STAND_IN, _in_style(probe, *style)], False)
            except (jinja2.TemplateError, TypeError, ValueError, AttributeError):
                continue
            if "skyrl_name" in text and "skyrl_key" in text and "\\" not in text.partition("skyrl_name")[2]:
                return style
        return None


def _in_style(message: Message, arguments_are_text: bool, nothing_is_null: bool) -> Message:
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        arguments = function["arguments"]
        if arguments_are_text and not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        elif not arguments_are_text and isinstance(arguments, str):
            arguments = json.loads(arguments or "{}")
        calls.append({**call, "function": {**function, "arguments": arguments}})
    content = message.get("content") or (None if nothing_is_null else "")
    return {**message, "content": content, "tool_calls": calls}


def _described(message: Message) -> str:
    return f"{message.get('role')}{' with calls' if message.get('tool_calls') else ''}"

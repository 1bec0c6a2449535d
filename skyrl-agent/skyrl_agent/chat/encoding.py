"""Encoder of chat messages that verifies steps of a conversation. Independent of conversation state."""

import json
import re
from collections.abc import Hashable, Sequence
from functools import cached_property

from skyrl_agent.errors import ConfigError
from skyrl_agent.types import Message, Tokenizer
from skyrl_gym.chat.template import ChatTemplate, ChatTemplateError
from skyrl_gym.tools.signature import Schema

_QUESTION: list[Message] = [{"role": "user", "content": "?"}]
"""Conversation in which `MessageEncoder.step` renders one step alone."""
_ANSWER = "skyrl-answer"
"""Placeholder that `MessageEncoder.render_after_response` replaces by the model's response."""

# String literals of a template, and those that contain more than words.
_STRING = re.compile(r"'((?:[^'\\\n]|\\.)*)'|\"((?:[^\"\\\n]|\\.)*)\"")
_TAG_LIKE = re.compile(r"[^\w\s.,:;!?'\"-]")


class MessageEncoder(ChatTemplate):
    """Chat template with tools. Template failures raise ConfigError.

    Args:
        tokenizer: a transformers tokenizer with an end-of-sequence token.
        tools: schemas for the template, in OpenAI's form.
        chat_template: Jinja text; None: the tokenizer's template.
        template_kwargs: variables of the template, such as `enable_thinking`.

    Raises:
        ConfigError: the tokenizer has no template or no end-of-sequence token.
    """

    tokenizer: Tokenizer

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        tools: Sequence[Schema] | None = None,
        chat_template: str | None = None,
        template_kwargs: dict[str, object] | None = None,
    ) -> None:
        if tokenizer.eos_token_id is None:
            raise ConfigError("the tokenizer has no end-of-sequence token (eos_token); set it in tokenizer_config.json")
        if chat_template is None and not tokenizer.chat_template:
            raise ConfigError(
                "the tokenizer has no chat template: use an instruct model, or set generator.chat_template"
            )
        tool_list = list(tools) if tools else None
        source = tokenizer.get_chat_template(chat_template, tool_list)
        super().__init__(tokenizer, source, {"tools": tool_list, **(template_kwargs or {})})
        self.trusted: set[Hashable] = set()
        """Kinds of steps that `conversation.Conversation` has verified with this template."""

    def text(self, messages: Sequence[Message], add_generation_prompt: bool = False, **options: object) -> str:
        """Render a conversation.

        Raises:
            ConfigError: the template cannot render it.
        """
        prepared = [
            self._parse_call_arguments(message) if message.get("tool_calls") else message for message in messages
        ]
        try:
            return super().text(prepared, add_generation_prompt, **options)
        except ChatTemplateError as error:
            roles = ", ".join(_get_role(message) for message in messages[-6:])
            raise ConfigError(
                f"{error} (the conversation ends in {roles}); check generator.chat_template and generator.tool_format"
            ) from error

    def ids(self, messages: Sequence[Message]) -> list[int]:
        """Encode a conversation and the header of the next response. Raises ConfigError."""
        return self.encode(self.text(messages, add_generation_prompt=True))

    def encode_continuation(self, text: str) -> list[int]:
        """Encode a text that continues another one."""
        return self.encode_after(self.end_of_text, text)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return super().decode(ids, skip_special_tokens)

    @property
    def end_of_text(self) -> str:
        """Text that closes a response."""
        return self.turn_ends.closing or str(self.tokenizer.eos_token)

    def is_special(self, token_id: int) -> bool:
        return token_id in self._specials

    def split_at_end(self, text: str) -> tuple[str, str]:
        """Split a text into the part before its last special token, and that token; both empty without one."""
        position, special = max((text.rfind(special), special) for special in self._specials.values())
        return (text[:position], special) if position >= 0 else ("", "")

    def step(self, answer: Message, added: Sequence[Message]) -> str | None:
        """Render a response, the messages after it and the next header in a conversation of one question. Returns: the
        text after the question; None if the template does not only append, or cannot render it.
        """
        return self._render_after_question([answer, *added], add_generation_prompt=True)

    def render_last_response(self, answer: Message) -> str | None:
        """Render a response at the end of a conversation, as `step` does."""
        return self._render_after_question([answer], add_generation_prompt=False)

    def _render_after_question(self, messages: Sequence[Message], add_generation_prompt: bool) -> str | None:
        try:
            text = self.text([*_QUESTION, *messages], add_generation_prompt)
        except ConfigError:
            return None
        return text[len(self._question) :] if text.startswith(self._question) else None

    def render_after_response(self, answer: Message, added: Sequence[Message]) -> tuple[str, str]:
        """Render what follows a response in a conversation of one question, however the template renders the response.
        Returns: the end of its turn; the messages after it and the next header.

        Raises:
            ConfigError: the template cannot render it.
        """
        probe = {"role": "assistant", "content": _ANSWER}
        if answer.get("tool_calls"):
            probe["tool_calls"] = answer["tool_calls"]
        alone = self.text([*_QUESTION, probe]).partition(_ANSWER)[2]
        rest = self.text([*_QUESTION, probe, *added], add_generation_prompt=True).rpartition(_ANSWER)[2]
        shared = alone[: next((i for i, (a, b) in enumerate(zip(alone, rest, strict=False)) if a != b), len(alone))]
        body, end = self.split_at_end(shared)
        return end, rest[len(body) + len(end) :]

    def shape(self, message: Message) -> Hashable:
        """Return the properties of a message that templates test: role, present fields, white space at the ends, and
        the tags that occur both in the template and in the message."""
        fields = []
        for key, value in sorted(message.items()):
            text = value if isinstance(value, str) else ""
            marks = tuple(tag for tag in self._tags if tag in text)
            edges = (text[:1].isspace(), text[-1:].isspace(), text.startswith(marks), text.endswith(marks))
            count = len(value) if isinstance(value, list | dict) else -1
            fields.append((key, type(value).__name__, bool(value), count, marks, edges))
        return (message.get("role"), *fields)

    @cached_property
    def _tags(self) -> tuple[str, ...]:
        strings = ((first or second).replace("\\n", "\n") for first, second in _STRING.findall(self.source or ""))
        return tuple(sorted({text.strip() for text in strings if _TAG_LIKE.search(text)}))

    @cached_property
    def _question(self) -> str:
        return self.text(_QUESTION, add_generation_prompt=True)

    @cached_property
    def _specials(self) -> dict[int, str]:
        added = {id: str(token) for id, token in self.tokenizer.added_tokens_decoder.items() if token.special}
        return {**added, **{id: token for token, id in self.turn_ends.tokens.items()}}

    def _parse_call_arguments(self, message: Message) -> Message:
        style = self._call_style
        if style is None:
            raise ConfigError(
                "the chat template does not render tool calls: set generator.chat_template to one that does, or "
                "generator.tool_format to function_xml"
            )
        return _apply_style(message, *style)

    @cached_property
    def _call_style(self) -> tuple[bool, bool] | None:
        """(arguments are text, missing content is null): the form of a call that the template can read."""
        call = {
            "id": "call00000",
            "type": "function",
            "function": {"name": "skyrl_name", "arguments": '{"skyrl_key": "x"}'},
        }
        probe: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
        for style in ((False, False), (True, False), (False, True), (True, True)):
            try:
                text = super().text([*_QUESTION, _apply_style(probe, *style)])
            except ChatTemplateError:
                continue
            if "skyrl_name" in text and "skyrl_key" in text and "\\" not in text.partition("skyrl_name")[2]:
                return style
        return None


def _apply_style(message: Message, arguments_are_text: bool, missing_is_null: bool) -> Message:
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        arguments = function["arguments"]
        if arguments_are_text and not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        elif not arguments_are_text and isinstance(arguments, str):
            arguments = json.loads(arguments or "{}")
        calls.append({**call, "function": {**function, "arguments": arguments}})
    content = message.get("content") or (None if missing_is_null else "")
    return {**message, "content": content, "tool_calls": calls}


def _get_role(message: Message) -> str:
    return f"{message.get('role')}{' with calls' if message.get('tool_calls') else ''}"

"""Tokenization of chat messages, and masks of generated tokens. Independent of engines and environments.

Generated text is never retokenized. The text between two completions is found by rendering a small fixed conversation
whose last message has a marker, and taking the template's output after that marker.
"""

import re
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, Any

from skyrl_gym.chat.template import ChatTemplate, ChatTemplateError
from skyrl_train.errors import ConfigError
from skyrl_train.types import ConversationType, MessageType

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MARK = "skyrl-mark"
_QUESTION: MessageType = {"role": "user", "content": "Hello."}
_ANSWER: MessageType = {"role": "assistant", "content": "Hi."}
_MARKED_QUESTION: MessageType = {"role": "user", "content": _MARK}
_MARKED_ANSWER: MessageType = {"role": "assistant", "content": _MARK}


class ChatFormat(ChatTemplate):
    """Chat template that can be continued after a completion without re-encoding it.

    Raises:
        ConfigError: the tokenizer has no template or no end-of-sequence token, or the template omits assistant
            messages.
    """

    tokenizer: "PreTrainedTokenizerBase"

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        chat_template: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> None:
        if tokenizer.eos_token_id is None:
            raise ConfigError(
                "the tokenizer has no end-of-sequence token (eos_token); set one in tokenizer_config.json"
            )
        if chat_template is None and not tokenizer.chat_template:
            raise ConfigError(
                "the tokenizer has no chat template; use an instruct model, or set generator.chat_template"
            )
        super().__init__(tokenizer, chat_template, chat_template_kwargs)
        try:
            probe = self.text([_QUESTION, _MARKED_ANSWER])
        except ChatTemplateError as error:
            raise ConfigError(f"{error} (a plain conversation); check generator.chat_template_kwargs") from error
        if _MARK not in probe:
            raise ConfigError("the chat template drops assistant messages, so it cannot render a conversation")

    @cached_property
    def closing_ids(self) -> list[int]:
        """Tokens that close a truncated completion."""
        return self.encode(self.turn_ends.closing or str(self.tokenizer.eos_token))

    def get_ids_and_generated_mask(self, messages: ConversationType) -> tuple[list[int], list[int]]:
        """Return the conversation's ids, and a mask that is 1 inside the template's `generation` blocks."""
        rendered = self.tokenizer.apply_chat_template(
            messages,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
            chat_template=self.chat_template,
            **self.kwargs,
        )
        return rendered["input_ids"], rendered["assistant_masks"]  # pyright: ignore

    def marks_answers(self) -> bool:
        """Whether the template has `generation` blocks."""
        template = self.chat_template or self.tokenizer.chat_template
        return re.search(r"\{%-?\s*generation\s*-?%\}", str(template)) is not None

    def ids(self, messages: ConversationType, add_generation_prompt: bool = False) -> list[int]:
        """Return the conversation's token ids; with the generation prompt, the input of the next completion."""
        return self.encode(self.text(messages, add_generation_prompt))

    def get_continuation_ids(
        self, observations: ConversationType, *, answer_is_closed: bool, last_id: int | None = None
    ) -> list[int]:
        """Return the template's tokens between a completion and the next one.

        Args:
            observations: the messages after the completion; may be empty.
            answer_is_closed: the completion already has its end-of-turn token, so it is not added.
            last_id: last token of the completion.
        """
        text = self.text([_QUESTION, _MARKED_ANSWER, *observations], add_generation_prompt=True)
        cut = text.index(_MARK) + len(_MARK)
        if answer_is_closed:
            cut += self.turn_ends.count_leading_characters(text[cut:], last_id)
        return self.encode_after(text[:cut], text[cut:])

    def get_subset_ids(self, messages: ConversationType, *, after: str | None = None) -> list[int]:
        """Return the tokens that `messages` add to the preceding conversation.

        Args:
            after: role of the preceding message; some templates write no header for a response to a tool. None: user
                before an assistant message, assistant before others.

        Raises:
            ValueError: no messages, or the template rewrites the end of the preceding text.
        """
        if not messages:
            raise ValueError("messages list cannot be empty")
        base = [_MARKED_QUESTION] if messages[0]["role"] == "assistant" else [_QUESTION, _MARKED_ANSWER]
        if after in ("assistant", "tool"):
            marked = {"role": after, "content": _MARK}
            base = [_QUESTION, marked] if after == "assistant" else [_QUESTION, _ANSWER, marked]
        before, text = self.text(base), self.text([*base, *messages])
        end_of_base = before[before.index(_MARK) + len(_MARK) :]
        cut = text.index(_MARK) + len(_MARK)
        if not text.startswith(end_of_base, cut):
            raise ValueError(
                f"the chat template ends a message with {end_of_base!r}, but differently if a message of role "
                f"{messages[0]['role']!r} follows: messages cannot be encoded separately"
            )
        return self.encode_after(text[: cut + len(end_of_base)], text[cut + len(end_of_base) :])

    @cached_property
    def generation_prompt(self) -> str:
        """Header after which the model generates. Empty for templates without one."""
        before, text = self.text([_QUESTION]), self.text([_QUESTION], add_generation_prompt=True)
        return text[len(before) :] if text.startswith(before) else ""

    @cached_property
    def generation_prompt_ids(self) -> list[int]:
        return self.encode_after(self.text([_QUESTION]), self.generation_prompt)


def get_generation_prompt_ids(tokenizer: "PreTrainedTokenizerBase", chat_template: str | None = None) -> list[int]:
    """Return the ids of the header after which the model generates, such as `<|im_start|>assistant` and a line
    break."""
    return ChatFormat(tokenizer, chat_template).generation_prompt_ids


def encode_messages_subset(
    messages: ConversationType, tokenizer: "PreTrainedTokenizerBase", chat_template: str | None = None
) -> list[int]:
    """Return the ids that `messages` add to a conversation, independent of the preceding text. See
    `ChatFormat.get_subset_ids`."""
    return ChatFormat(tokenizer, chat_template).get_subset_ids(messages)


def get_response_ids_and_loss_mask_from_messages(
    messages: ConversationType,
    tokenizer: "PreTrainedTokenizerBase",
    assistant_logprobs: list[list[float]] | None = None,
    chat_template: str | None = None,
) -> tuple[list[int], list[int], list[float] | None]:
    """Return tokens, loss mask and log-probs of the messages after a prompt, for generators that only have text.

    The loss mask is 1 from after an assistant message's header up to and including its end-of-sequence token, else 0.

    Args:
        messages: user, tool and assistant messages.
        assistant_logprobs: for each assistant message, one log-prob per token with mask 1.

    Returns:
        ids, loss mask and log-probs (0.0 where the mask is 0; None if not given), all of equal length.

    Raises:
        ValueError: no messages, a role other than user, tool and assistant, or log-probs of another length.
    """
    if not messages:
        raise ValueError("messages list cannot be empty")
    chat = ChatFormat(tokenizer, chat_template)
    ids: list[int] = []
    loss_mask: list[int] = []
    logprobs: list[float] | None = None if assistant_logprobs is None else []
    num_answers = 0
    for message in messages:
        if message["role"] not in ("user", "assistant", "tool"):
            raise ValueError(f"Expected message role to be 'user' or 'assistant' (or 'tool'), got {message['role']!r}")
    after = None
    # Messages between two answers are encoded together: templates render results of parallel calls as one turn.
    for is_answer, run in groupby(messages, key=lambda message: message["role"] == "assistant"):
        for part in [[message] for message in run] if is_answer else [[*run]]:
            message_ids = chat.get_subset_ids(part, after=after)
            after = part[-1]["role"]
            start, end = _find_generated_part(chat, message_ids) if is_answer else (0, 0)
            ids += message_ids
            loss_mask += [0] * start + [1] * (end - start) + [0] * (len(message_ids) - end)
            num_answers += is_answer
            if assistant_logprobs is not None and logprobs is not None:
                given = _get_completion_logprobs(assistant_logprobs, num_answers, end - start) if end else []
                logprobs += [0.0] * start + given + [0.0] * (len(message_ids) - end)
    return ids, loss_mask, logprobs


def _find_generated_part(chat: ChatFormat, message_ids: list[int]) -> tuple[int, int]:
    """Return start and end of the generated tokens in an encoded assistant message."""
    start = 0
    # If the last header token merged with the first content token, the model generated that token.
    for header_id, message_id in zip(chat.generation_prompt_ids, message_ids, strict=False):
        if header_id != message_id:
            break
        start += 1
    ends = [place for place, id in enumerate(message_ids) if id in chat.turn_ends.ids and place >= start]
    return start, ends[-1] + 1 if ends else len(message_ids)


def _get_completion_logprobs(assistant_logprobs: list[list[float]], number: int, num_tokens: int) -> list[float]:
    if number > len(assistant_logprobs):
        raise ValueError(f"Missing logprobs for assistant message #{number}")
    given = assistant_logprobs[number - 1]
    if len(given) != num_tokens:
        raise ValueError(
            f"Logprobs count ({len(given)}) does not match token count ({num_tokens}) of assistant message #{number}"
        )
    return given

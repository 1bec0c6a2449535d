"""Message history of an agent, and a reader of its calls. Published names."""

import copy
import json
from collections.abc import Sequence

from skyrl_agent.functional.function_calling import (
    FunctionCallConversionError,
    FunctionCallValidationError,
    convert_non_fncall_messages_to_fncall_messages,
)
from skyrl_agent.types import Message
from skyrl_gym.tools.signature import Schema


class MessageHistory:
    """Messages of a conversation. `was_reset`: they do not continue those before; `clear_reset_flag` ends that."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._was_reset = False

    def initialize(self, messages: Sequence[Message]) -> None:
        """Start over from a copy of `messages`."""
        self.messages = copy.deepcopy(list(messages))
        self._was_reset = True

    def was_reset(self) -> bool:
        return self._was_reset

    def clear_reset_flag(self) -> None:
        self._was_reset = False

    def add_assistant(self, content: str) -> None:
        self.messages.append({"role": "assistant", "content": content})

    def add_tool_error(self, error: str, tool_call_id: str | None = None) -> None:
        self._add_tool({"error": error}, tool_call_id)

    def add_tool_response(self, output: object, tool_call_id: str | None = None) -> None:
        self._add_tool(output, tool_call_id)

    def _add_tool(self, output: object, tool_call_id: str | None) -> None:
        message: Message = {"role": "tool", "content": json.dumps(output, ensure_ascii=False, default=str)}
        self.messages.append(message | ({"tool_call_id": tool_call_id} if tool_call_id else {}))

    def add_user_guidance(self, content: str) -> None:
        self.messages.append({"role": "user", "content": content})

    def append_to_last_message(self, text: str) -> None:
        """Append text to the last message. Raises ValueError if the history is empty."""
        if not self.messages:
            raise ValueError("the history is empty: no message to append to")
        self.messages[-1]["content"] = (self.messages[-1].get("content") or "") + text

    def add_turn_reminder(self, text: str) -> None:
        """Append a paragraph to the last message."""
        self.append_to_last_message(f"\n\n{text}")

    def get_messages(self) -> list[Message]:
        return self.messages

    def __len__(self) -> int:
        return len(self.messages)


def parse_tool_call(text: str, tool_params: Sequence[Schema]) -> tuple[Schema | None, str | None]:
    """Return the first call of a response in OpenAI's form, or an error text for the model; neither without a call."""
    try:
        (message,) = convert_non_fncall_messages_to_fncall_messages(
            [{"role": "assistant", "content": text}], tool_params
        )
    except (FunctionCallConversionError, FunctionCallValidationError) as error:
        return None, str(error)
    calls = message.get("tool_calls")
    return (calls[0] if calls else None), None

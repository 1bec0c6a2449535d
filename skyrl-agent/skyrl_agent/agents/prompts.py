"""Texts of an agent to its model; the wording is free to change. Independent of the agent loop."""

from collections.abc import Sequence

from skyrl_agent.types import Message

NO_CALL = (
    "Your answer had no function call in it, so nothing was done. Call one of: {names}. "
    "When the task is done, call finish."
)
SUB_AGENT = (
    "Another agent handed you a part of its task. It sees nothing of your work but your final answer: do the whole "
    "part, then give an answer that can be understood without the rest."
)
FEW_TOKENS = 3_000
"""Limit below which reminders mention the tokens left."""

_REMINDER, _END = "\n\n<reminder>", "</reminder>"


def render_no_call(names: Sequence[str]) -> str:
    """Render the reply to a response without a call."""
    return NO_CALL.format(names=", ".join(names))


def render_reminder(step: int, max_iterations: int, early_step_threshold: int, tokens_left: int) -> str:
    """Render the reminder of step `step`, counted from 1."""
    text = f"Step {step} of {max_iterations}."
    if step == max_iterations:
        text += " This is the last one: finish now."
    elif step <= early_step_threshold:
        text += f" Take at least {early_step_threshold} steps before you finish."
    if tokens_left < FEW_TOKENS:
        text += f" Fewer than {FEW_TOKENS:,} tokens are left: come to an end."
    return text


def append_reminder(messages: Sequence[Message], text: str) -> list[Message]:
    """Append a reminder to the last message."""
    *before, last = messages
    return [*before, append_text(last, f"{_REMINDER}{text}{_END}")]


def remove_reminders(messages: Sequence[Message]) -> list[Message]:
    """Copy messages without the text of `append_reminder`."""
    return [_remove_reminder(message) for message in messages]


def append_text(message: Message, text: str) -> Message:
    """Append text to a message."""
    content = message.get("content") or ""
    return message | {
        "content": [*content, {"type": "text", "text": text}] if isinstance(content, list) else content + text
    }


def add_system_text(messages: Sequence[Message], before: str, after: str) -> list[Message]:
    """Put text before and after the first system message. Adds a system message if none exists."""
    if not (before or after):
        return list(messages)
    first = next((index for index, message in enumerate(messages) if message["role"] == "system"), None)
    if first is None:
        return [{"role": "system", "content": before + after.lstrip()}, *messages]
    own = str(messages[first]["content"])
    system = messages[first] | {"content": (f"{before}\n\n---\n\n{own}" if before else own) + after}
    return [*messages[:first], system, *messages[first + 1 :]]


def remove_thoughts(message: Message) -> Message:
    """Remove the text before `</think>` from a response."""
    content = message.get("content")
    return (
        message | {"content": content.rpartition("</think>")[2].lstrip("\n")} if isinstance(content, str) else message
    )


def _remove_reminder(message: Message) -> Message:
    content = message.get("content")
    if isinstance(content, list):
        kept = [part for part in content if not str(part.get("text", "")).startswith(_REMINDER)]
        return message | {"content": kept}
    if isinstance(content, str) and _REMINDER in content and content.endswith(_END) and message["role"] != "assistant":
        return message | {"content": content.rpartition(_REMINDER)[0]}
    return dict(message)

"""A model's thought in its answer: apart for protocols that return reasoning by itself, and together again for the chat
template, in the form in which models of the `<think>` family write it."""

from typing import NamedTuple

THOUGHT_OPEN, THOUGHT_CLOSE = "<think>", "</think>"


class Thinking(NamedTuple):
    """An answer's thought and the text behind it, without the white space between."""

    thought: str | None
    """None: the answer has none, or does not show one yet."""
    text: str
    is_closed: bool
    """The thought is complete."""


def opens_thought(prompt: str) -> bool:
    """Test whether a prompt ends inside of a thought: the answer then begins with it."""
    return prompt.rstrip().endswith(THOUGHT_OPEN)


def split_thought(content: str, is_open: bool, is_complete: bool) -> Thinking:
    """Split the content of an answer.

    Args:
        is_open: the prompt opened the thought.
        is_complete: nothing follows. Of an answer that grows only what stays is returned: neither a part of a tag nor
            white space that may turn out to be the last.
    """
    begun = content.lstrip()
    if begun.startswith(THOUGHT_OPEN):
        begun, is_open = begun.removeprefix(THOUGHT_OPEN), True
    elif not is_complete and THOUGHT_OPEN.startswith(begun):
        return Thinking(None, "", False)
    if not is_open:
        return Thinking(None, content, False)
    thought, end, text = begun.partition(THOUGHT_CLOSE)
    if not end and not is_complete:
        held = max(n for n in range(len(THOUGHT_CLOSE)) if thought.endswith(THOUGHT_CLOSE[:n]))
        thought = thought[: len(thought) - held]
    return Thinking(thought.strip(), text.lstrip(), bool(end))


def with_thought(thought: str, text: str) -> str:
    """Return the content of an assistant message with a thought before its text."""
    return f"{THOUGHT_OPEN}\n{thought}\n{THOUGHT_CLOSE}\n\n{text}"

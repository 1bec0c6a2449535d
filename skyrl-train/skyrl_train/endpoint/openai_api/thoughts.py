"""Thoughts in completions: split off for protocols that return reasoning separately, and joined for the chat template
in the `<think>` format.
"""

from typing import NamedTuple

THOUGHT_OPEN, THOUGHT_CLOSE = "<think>", "</think>"


class Thinking(NamedTuple):
    """Thought of a response and the text after it, without the white space between."""

    thought: str | None
    """None: no thought, or none visible yet."""
    text: str
    is_closed: bool
    """The thought is complete."""


def is_inside_thought(prompt: str) -> bool:
    """Return whether a prompt ends within a thought, so that the completion begins with it."""
    return prompt.rstrip().endswith(THOUGHT_OPEN)


def split_thought(content: str, is_open: bool, is_complete: bool) -> Thinking:
    """Split the content of a response.

    Args:
        is_open: the prompt opened the thought.
        is_complete: nothing follows. Of a partial response only the final part is returned: no partial tag and no white
            space that may be trailing.
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


def add_thought(thought: str, text: str) -> str:
    """Return the content of an assistant message with a thought before its text."""
    return f"{THOUGHT_OPEN}\n{thought}\n{THOUGHT_CLOSE}\n\n{text}"

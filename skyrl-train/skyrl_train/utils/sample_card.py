"""Card of a trajectory for a terminal, in a few readable lines. Model output is untrusted: control characters are
escaped."""

import unicodedata
from typing import Literal, NamedTuple

Colour = Literal["blue", "green", "yellow", "red"]

BASE_PROMPT_COLOR: Colour = "blue"
POSITIVE_RESPONSE_COLOR: Colour = "green"
NEGATIVE_RESPONSE_COLOR: Colour = "yellow"
_FAILURE_COLOUR: Colour = "red"
_JOINERS = "\u200c\u200d"
"""Format characters that emoji and several scripts need, and that are harmless."""


class Block(NamedTuple):
    """A titled text in one colour."""

    title: str
    text: str
    colour: Colour


def build_card_blocks(
    prompt: object,
    response: object,
    reward: float | None = None,
    stop_reason: str = "",
    failure: str = "",
    max_chars: int = 1200,
) -> list[Block]:
    """Build the blocks of a card, top to bottom; texts are escaped and at most about `max_chars` long."""
    good = isinstance(reward, int | float) and reward > 0
    facts = [f"reward {reward:.4g}"] if isinstance(reward, int | float) else []
    facts += [stop_reason] if stop_reason else []
    blocks = [
        Block("prompt", readable(_to_text(prompt), max_chars), BASE_PROMPT_COLOR),
        Block(
            " · ".join(["response", *facts]),
            readable(_to_text(response), max_chars),
            POSITIVE_RESPONSE_COLOR if good else NEGATIVE_RESPONSE_COLOR,
        ),
    ]
    if failure:
        blocks.append(Block("failed", readable(failure, max_chars), _FAILURE_COLOUR))
    return blocks


def readable(text: str, max_chars: int = 1200) -> str:
    """Escape control and unprintable characters, and truncate the middle of a long text."""
    if len(text) > max_chars:
        head, tail = max_chars * 2 // 3, max_chars // 3
        text = f"{text[:head]} … {len(text) - head - tail:,} characters … {text[len(text) - tail :]}"
    return "".join(_escape_character(character) for character in text)


def _escape_character(character: str) -> str:
    if character in "\n" or character in _JOINERS:
        return character
    if character == "\t":
        return "    "
    if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"):
        return character.encode("unicode_escape").decode()
    return character


def _to_text(value: object) -> str:
    """Format text unchanged, a conversation as `role: content` lines, and anything else by its repr."""
    if isinstance(value, list) and value and all(isinstance(message, dict) for message in value):
        return "\n".join(f"{message.get('role', '?')}: {message.get('content', '')}" for message in value)
    return str(value)

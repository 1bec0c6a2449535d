"""Card of a trajectory in a few readable lines for a terminal. Model output is untrusted: it must not steer the
terminal."""

import unicodedata
from typing import Literal, NamedTuple

Colour = Literal["blue", "green", "yellow", "red"]

BASE_PROMPT_COLOR: Colour = "blue"
POSITIVE_RESPONSE_COLOR: Colour = "green"
NEGATIVE_RESPONSE_COLOR: Colour = "yellow"
_FAILURE_COLOUR: Colour = "red"
_JOINERS = "\u200c\u200d"
"""Format characters that emoji and several scripts need, and that harm nothing."""


class Block(NamedTuple):
    """A titled text of one colour."""

    title: str
    text: str
    colour: Colour


def card_blocks(
    prompt: object,
    response: object,
    reward: float | None = None,
    stop_reason: str = "",
    failure: str = "",
    max_chars: int = 1200,
) -> list[Block]:
    """Return the blocks of a card, top to bottom; texts are escaped and at most about `max_chars` long."""
    good = isinstance(reward, int | float) and reward > 0
    facts = [f"reward {reward:.4g}"] if isinstance(reward, int | float) else []
    facts += [stop_reason] if stop_reason else []
    blocks = [
        Block("prompt", readable(_text_of(prompt), max_chars), BASE_PROMPT_COLOR),
        Block(
            " · ".join(["response", *facts]),
            readable(_text_of(response), max_chars),
            POSITIVE_RESPONSE_COLOR if good else NEGATIVE_RESPONSE_COLOR,
        ),
    ]
    if failure:
        blocks.append(Block("failed", readable(failure, max_chars), _FAILURE_COLOUR))
    return blocks


def readable(text: str, max_chars: int = 1200) -> str:
    """The text with every control or unprintable character escaped, and its middle left out if it is too long."""
    if len(text) > max_chars:
        head, tail = max_chars * 2 // 3, max_chars // 3
        text = f"{text[:head]} … {len(text) - head - tail:,} characters … {text[len(text) - tail :]}"
    return "".join(_printable(character) for character in text)


def _printable(character: str) -> str:
    if character in "\n" or character in _JOINERS:
        return character
    if character == "\t":
        return "    "
    if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"):
        return character.encode("unicode_escape").decode()
    return character


def _text_of(value: object) -> str:
    """Text as it is; a conversation as `role: content` lines; anything else as Python shows it."""
    if isinstance(value, list) and value and all(isinstance(message, dict) for message in value):
        return "\n".join(f"{message.get('role', '?')}: {message.get('content', '')}" for message in value)
    return str(value)

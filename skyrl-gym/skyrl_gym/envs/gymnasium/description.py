"""Descriptions read from a Gymnasium environment: names of its actions and sections of its class's docstring."""

import inspect
import re
from collections.abc import Callable, Iterable

import gymnasium
from gymnasium import spaces

SECTIONS = ("Description", "Action Space", "Observation Space", "Rewards", "Reward", "Episode End")

_HEADING = re.compile(r"^ *## *(.+?) *$", re.MULTILINE)
_LISTED_ACTION = re.compile(r"^ *- *(\d+): *(.+?)[ .]*$|^ *\| *(\d+) *\| *([^|]+?) *\|", re.MULTILINE)


def parse_docstring_sections(env: gymnasium.Env) -> dict[str, str]:
    """Sections (`## ...`) of the docstring, by heading; empty if it has none."""
    text = inspect.getdoc(type(env.unwrapped)) or ""
    parts = _HEADING.split(text)[1:]
    return {title: body.strip() for title, body in zip(parts[::2], parts[1::2], strict=True)}


def documentation(env: gymnasium.Env, max_chars: int) -> str:
    """Return the sections that say what the task is, each cut to `max_chars` characters with a note."""
    texts = [
        f"{title}:\n{truncate(body, max_chars)}"
        for title, body in parse_docstring_sections(env).items()
        if title in SECTIONS
    ]
    return "\n\n".join(texts)


def truncate(text: str, max_chars: int) -> str:
    """Return the text, or its beginning with a note of how much is left out."""
    if len(text) <= max_chars:
        return text
    return f"{text[:max_chars]} ... ({len(text) - max_chars} more characters left out)"


def parse_action_names(env: gymnasium.Env) -> dict[int, str]:
    """Return the meanings of a discrete action space's numbers, where the environment gives them; else an empty list.

    From `get_action_meanings()`, or else the list in the "Action Space" section of the docstring.
    """
    space = env.action_space
    if not isinstance(space, spaces.Discrete):
        return {}
    numbers = range(int(space.start), int(space.start + space.n))
    meanings: Callable[[], Iterable[object]] | None = getattr(env.unwrapped, "get_action_meanings", None)
    if meanings is not None:
        return dict(zip(numbers, map(str, meanings()), strict=False))
    section = parse_docstring_sections(env).get("Action Space", "")
    listed = {int(m[1] or m[3]): (m[2] or m[4]).strip() for m in _LISTED_ACTION.finditer(section)}
    return listed if set(listed) == set(numbers) and len(set(listed.values())) == len(listed) else {}

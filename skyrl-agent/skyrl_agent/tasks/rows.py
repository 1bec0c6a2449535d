"""Readers of dataset rows, from Parquet (arrays, JSON in texts) or written manually."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from skyrl_agent.errors import TaskRowError
from skyrl_agent.types import Message, Row
from skyrl_gym.graders.qa import as_list


def field(row: Row, *paths: str) -> Any:
    """Return the value at the first dotted path that exists; None if none does."""
    for path in paths:
        found: Any = row
        for name in path.split("."):
            found = from_json(found)
            found = found.get(name) if isinstance(found, Mapping) else None
        if _is_present(found := _to_plain(found)):
            return found
    return None


def messages_of(row: Row, *paths: str) -> list[Message]:
    """Return the conversation at the first existing dotted path. A text becomes a user message.

    Raises:
        TaskRowError: no path leads to a conversation.
    """
    found = field(row, *paths)
    if isinstance(found, str):
        return [{"role": "user", "content": found}]
    messages = [found] if isinstance(found, Mapping) else found
    if (
        not isinstance(messages, Sequence)
        or not messages
        or not all(isinstance(message, Mapping) and {"role", "content"} <= message.keys() for message in messages)
    ):
        raise TaskRowError(
            f"{' or '.join(paths)} must be a text or a list of messages with role and content; got {found!r:.200}"
        )
    return [dict(message) for message in messages]


def add_system_message(messages: list[Message], prompt: str) -> list[Message]:
    """Prepend a system message, unless one exists."""
    has_one = any(message["role"] == "system" for message in messages)
    return messages if has_one else [{"role": "system", "content": prompt}, *messages]


def get_question(messages: Sequence[Message]) -> str:
    """Return the user's question, for a judge."""
    text = next((str(message["content"]) for message in messages if message["role"] == "user"), "")
    return text.strip().removeprefix("Answer the given question:").strip()


def golds_of(row: Row, *paths: str) -> list[str]:
    """Return the accepted answers at the first existing dotted path: a text, a list, or either under `target`.

    Raises:
        TaskRowError: no answer exists.
    """
    found = field(row, *paths)
    if isinstance(found, Mapping):
        found = field(found, "target")
    if isinstance(found, int | float):
        found = str(found)
    try:
        golds = [gold for gold in as_list(found) if gold.strip()]
    except (TypeError, ValueError):
        golds = []
    if not golds:
        raise TaskRowError(f"{' or '.join(paths)} must hold an accepted answer, or several; got {found!r:.200}")
    return golds


def get_first(row: Row, *names: str) -> Any:
    """Return the first of some columns that is not null; None if all are."""
    return next((row[name] for name in names if row.get(name) is not None), None)


def from_json(value: object) -> Any:
    """Return a value, or the JSON object or list that a text holds, as tables keep nested values."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def parse_names(value: Any) -> tuple[str, ...]:
    """Return the names in a column: none, one, a list of them, or its JSON text."""
    value = from_json(value)
    return () if value is None else (value,) if isinstance(value, str) else tuple(map(str, value))


def remove_nulls(texts: Mapping[str, Any]) -> dict[str, Any]:
    """Return a column that maps paths to texts without the nulls with which tables fill gaps."""
    return {path: text for path, text in texts.items() if text is not None}


def _to_plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


def _is_present(value: object) -> bool:
    return value is not None and not (isinstance(value, str | Sequence | Mapping) and len(value) == 0)

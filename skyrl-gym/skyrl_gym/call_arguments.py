"""JSON arguments of tool calls, shared by the call formats (`chat`) and the tools (`tools`)."""

import json
from typing import Any

Schema = dict[str, Any]
"""A JSON schema."""

SOLE_ARGUMENT = ""
"""Key of an unnamed argument; it is bound to the first parameter of the tool."""


def parse_text(value: object) -> object:
    """Decode a string as JSON. Some call formats pass every value as text.

    Returns None if the value is no string, is invalid JSON, or decodes to a string again.
    """
    if not isinstance(value, str):
        return None
    text = {"True": "true", "False": "false"}.get(value.strip(), value)
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return None if isinstance(parsed, str) else parsed

"""System message of prompts: the functions and the form of a call."""

import json
from collections.abc import Sequence

from skyrl_gym.call_arguments import Schema


def system_message(functions: Sequence[Schema]) -> dict[str, str]:
    """Return the system message that lists functions (JSON schemas with `name`) and shows the form of a call."""
    listed = "\n".join(json.dumps(function, ensure_ascii=False) for function in functions)
    return {
        "role": "system",
        "content": (
            f"You can call these functions, each described by a JSON schema:\n<tools>\n{listed}\n</tools>\n\n"
            "Write each call as a JSON object between tags:\n"
            '<tool_call>\n{"name": "NAME", "arguments": {"ARGUMENT": "VALUE"}}\n</tool_call>\n'
            "An answer may have several calls. If no function fits, or a required value is not known, say so without "
            "a call."
        ),
    }

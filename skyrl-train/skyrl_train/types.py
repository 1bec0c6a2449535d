"""Types shared by several layers. Imports no module of this project."""

from typing import Any

JsonObject = dict[str, Any]
"""An object as `json.loads` gives it and `json.dumps` takes it."""

MessageType = JsonObject
"""One chat message: `role` and `content`, and whatever else the chat template reads."""

ConversationType = list[MessageType]

PromptRow = dict[str, Any]
"""A row of a prompt dataset: `prompt`, `env_class`, `env_extras`, `uid`."""

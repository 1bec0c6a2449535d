"""Types that several layers name. Imports nothing of ours."""

from typing import Any

MessageType = dict[str, Any]
"""One chat message: `role` and `content`, and whatever else the chat template reads."""

ConversationType = list[MessageType]

PromptRow = dict[str, Any]
"""A row of a prompt dataset: `prompt`, `env_class`, `env_extras`, `uid`."""

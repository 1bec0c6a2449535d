"""Reading of texts longer than the context, as in MemAgent (https://arxiv.org/abs/2507.02259): section by section,
keeping only a summary that the model writes.
"""

import re
from collections.abc import Iterator

from skyrl_agent.errors import ConfigError, TaskRowError
from skyrl_agent.tools.base import BaseTool, ToolContext, ToolOutput
from skyrl_agent.types import Message
from skyrl_gym.tags import last_tagged

PREFIX = (
    "You read a text that is too long to see at once. It comes in sections, and you see one at a time. <problem> is "
    "what to find out, <memory> is what you noted so far, <section> is the part in front of you. When you have read "
    "it, call next_with_summary with everything from memory and section that helps with the problem: you will not see "
    "this section again, nor anything else that you wrote."
)
NO_MEMORY = "(nothing yet)"
ALL_READ = "All sections have been read, and your memory is complete. Call finish with your answer now."

_DOCUMENT = re.compile(r"^(?=Document \d+:)", re.MULTILINE)
_BREAKS = ("\n\n", "\n", ". ", " ")


class NextWithSummary(BaseTool):
    """The text is the row's `context`: a text, or a list of documents. Each call starts the conversation over: the
    same system message, then the problem, the memory and the next section.

    Args:
        section_chars: of one section; 16,000 are about 4,000 tokens of English.
    """

    name = "next_with_summary"

    def __init__(self, *, section_chars: int = 16_000) -> None:
        if section_chars < 1:
            raise ConfigError(f"tool {self.name}: section_chars must be at least 1; got {section_chars}")
        self.section_chars = section_chars

    def get_system_prompt_prefix(self) -> str:
        return PREFIX

    async def open(self, context: ToolContext) -> None:
        """Raises TaskRowError if the row has no context."""
        context.memory["sections"] = split_sections(context.row.get("context"), self.section_chars)
        context.memory["next_section"] = 0

    async def run(self, context: ToolContext, summary: str) -> ToolOutput:
        """Replaces your memory by a summary and shows the next section of the text.

        Args:
            summary: All that you need to remember. Begin with what the memory holds that still matters, then add what
                is new. At the first call: what you will look for.
        """
        sections, index = context.memory["sections"], context.memory["next_section"]
        if index == len(sections):
            return ToolOutput(ALL_READ)
        system, problem = context.memory.setdefault("task", _extract_task(context.messages))
        context.memory.update(next_section=index + 1, summary=summary)
        shown = build_section_message(problem, summary, sections[index], index + 1, len(sections))
        return ToolOutput("", new_context=[*system, shown])


def _extract_task(messages: list[Message]) -> tuple[list[Message], str]:
    """Return the system messages and the first user message."""
    system = [message for message in messages if message["role"] == "system"]
    asked = next((str(message["content"]) for message in messages if message["role"] == "user"), "")
    return system, (last_tagged(asked, "problem") or asked).strip()


def build_section_message(problem: str, memory: str, section: str, number: int, total: int) -> Message:
    left = f"{total - number} more to come" if number < total else "this is the last one; finish when you are ready"
    return {
        "role": "user",
        "content": f"<problem>\n{problem}\n</problem>\n\n<memory>\n{memory.strip() or NO_MEMORY}\n</memory>\n\n"
        f"<section>\n{section}\n</section>\n\nSection {number} of {total}: {left}.",
    }


def split_sections(context: object, most: int) -> list[str]:
    """Split a text or documents into sections of at most `most` characters. Documents (in a text, they begin with
    `Document N:`) stay whole if they fit.

    Raises:
        TaskRowError: the text is missing.
    """
    if hasattr(context, "tolist"):  # an array from a parquet file
        context = context.tolist()  # pyright: ignore[reportAttributeAccessIssue]
    documents = _DOCUMENT.split(context) if isinstance(context, str) else context
    if not isinstance(documents, list) or not all(isinstance(document, str) for document in documents):
        raise TaskRowError(f"context must be a text or a list of texts; got {type(context).__name__}")
    sections: list[str] = []
    for part in (part for document in documents for part in _split_parts(document.strip(), most)):
        if sections and len(sections[-1]) + 2 + len(part) <= most:
            sections[-1] += f"\n\n{part}"
        else:
            sections.append(part)
    if not sections:
        raise TaskRowError("context is empty: nothing to read")
    return sections


def _split_parts(text: str, most: int) -> Iterator[str]:
    """Cut where a paragraph, a line, a sentence or a word ends, in the second half of a part if it can be."""
    while len(text) > most:
        ends = (text.rfind(mark, most // 2, most) + len(mark) for mark in _BREAKS if mark in text[most // 2 : most])
        end = next(ends, most)
        yield text[:end].strip()
        text = text[end:].strip()
    if text:
        yield text

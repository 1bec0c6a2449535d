"""Results as text within a budget of characters."""

from __future__ import annotations

from .entities import Entity
from .index import SourceFile
from .names import Place

FORMATS = ("complete", "preview", "fold")
"""Formats of an entity, longest first: the whole source; its first lines; signatures."""
PREVIEW_LINES = 10
MIN_BUDGET = 200


def format_numbered(lines, first: int = 1) -> str:
    return "\n".join(f"{number:6}\t{line}" for number, line in enumerate(lines, first))


def render_entity(file: SourceFile, name: str, style: str) -> str:
    """Render an entity or a whole file."""
    if not name:
        return _render_file(file, style)
    return "\n".join(_render_entity(file, entity, style) for entity in file.named(name))


def _render_entity(file: SourceFile, entity: Entity, style: str) -> str:
    head = f"{Place(file.path, entity.name).id}  ({entity.kind}, lines {entity.start}-{entity.end})"
    if style == "fold":
        inner = [other for other in file.entities if other.name.startswith(entity.name + ".")]
        inner = [other for other in inner if entity.start <= other.start <= entity.end]
        about = f"  # {entity.doc}" if entity.doc else ""
        rows = [f"{head}\n  {entity.signature}{about}"]
        return "\n".join(rows + ([_render_outline(inner, entity.name)] if entity.kind == "class" and inner else []))
    lines = file.lines[entity.start - 1 : entity.end]
    if style == "preview" and len(lines) > PREVIEW_LINES:
        rest = f"\n        ... {len(lines) - PREVIEW_LINES} more lines"
        return f"{head}\n{format_numbered(lines[:PREVIEW_LINES], entity.start)}{rest}"
    return f"{head}\n{format_numbered(lines, entity.start)}"


def _render_file(file: SourceFile, style: str) -> str:
    head = f"{file.path}  (file, {file.num_lines} lines)"
    if file.error:
        head += f"\n  not valid Python, searched as text alone: {file.error}"
    lines = file.lines[: file.num_lines]
    if style == "complete":
        return f"{head}\n{format_numbered(lines)}"
    if style == "preview" and len(lines) > PREVIEW_LINES:
        head += f"\n{format_numbered(lines[:PREVIEW_LINES])}\n        ..."
    return f"{head}\n{_render_outline(file.entities)}" if file.entities else head


def _render_outline(entities: list, inside: str = "") -> str:
    depth = inside.count(".") + 1 if inside else 0
    return "\n".join(
        f"{entity.line:6}\t{'    ' * (entity.name.count('.') - depth)}{entity.signature}" for entity in entities
    )


def render_fitting(render, style: str, budget: int) -> str:
    """Return `render(style)`, or the next shorter format that fits, with a note."""
    for shorter in FORMATS[FORMATS.index(style) :]:
        content = render(shorter)
        note = ""
        if shorter != style:
            note = (
                f"\n[too long for the format {style}; shown as {shorter}. To see more: one name, or a file and lines]"
            )
        if len(content) + len(note) <= budget:
            return content + note
    return clipped(content, budget)


def clipped(content: str, budget: int) -> str:
    """Return whole lines from the beginning, and a note with the number of omitted lines."""
    if len(content) <= budget:
        return content
    lines = content.split("\n")
    reserve = len(_format_omission(len(lines)))
    kept, size = 0, reserve
    while kept < len(lines) and size + len(lines[kept]) + 1 <= budget:
        size += len(lines[kept]) + 1
        kept += 1
    note = _format_omission(len(lines) - kept)
    return ("\n".join(lines[:kept]) if kept else content[: max(0, budget - reserve)]) + note


def _format_omission(lines: int) -> str:
    return f"\n[{lines} more lines left out: narrow the search by a name, a file pattern or lines]"

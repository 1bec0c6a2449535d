"""A comparison as text for a terminal and as a page. Values come from runs and are untrusted: both escape them."""

import html
from collections.abc import Iterator, Sequence

from skyrl_inspect.diff.causes import Cause, ChangedItem
from skyrl_inspect.diff.comparison import RunComparison, get_stage_name, is_relevant
from skyrl_train.utils.sample_card import readable

_MOST_CAUSES = 5
_MOST_CHANGES = 40
_TITLES = {
    "setting": "settings",
    "library": "libraries",
    "data": "data",
    "tokenizer": "tokenizer",
    "environment": "environments",
    "code": "code",
    "machine": "machine",
}


def iter_sections(comparison: RunComparison) -> Iterator[tuple[str, list[str]]]:
    """Yield the titles and lines below the verdict, the same for text and page."""
    if comparison.parting:
        yield (
            "likely causes",
            [_format_cause(n, cause) for n, cause in enumerate(_filter_causes(comparison.causes), start=1)],
        )
    if len(comparison.parting) > 1:
        title = f"what else differs in step {comparison.parting[0].step}"
        yield title, [f"{get_stage_name(each.stage)}: {each}" for each in comparison.parting[1:]]
    for group, title in _TITLES.items():
        own = [change for change in comparison.changes if change.group == group]
        if lines := _format_changes([change for change in own if is_relevant(change)]):
            yield f"{title} that differ" if title.endswith("s") else title, lines
        if names := [change.name for change in own if not is_relevant(change)]:
            yield "settings that differ without affecting numbers", [", ".join(names)]
    if comparison.unrecorded:
        yield "not compared", list(comparison.unrecorded)


def _filter_causes(causes: Sequence[Cause]) -> Sequence[Cause]:
    """Return the causes to show: the first, and all that are at least possible."""
    return [cause for n, cause in enumerate(causes) if n == 0 or cause.likelihood != "unlikely"][:_MOST_CAUSES]


def _format_cause(number: int, cause: Cause) -> str:
    return f"{number}. {cause.text} ({cause.likelihood}: {cause.why})"


def _format_changes(changes: Sequence[ChangedItem]) -> list[str]:
    more = len(changes) - _MOST_CHANGES
    return [str(change) for change in changes[:_MOST_CHANGES]] + (
        [f"and {more} more (--json has all)"] if more > 0 else []
    )


def format_text(comparison: RunComparison) -> str:
    """Return the comparison for a terminal, control characters escaped."""
    lines = [f"{letter}  {name}" for letter, name in zip("AB", comparison.names, strict=True)] + [comparison.verdict]
    for title, entries in iter_sections(comparison):
        lines += ["", title, *(f"  {entry}" for entry in entries)]
    return "\n".join(readable(line.replace("\n", "\\n"), 2000) for line in lines) + "\n"


_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1000px; margin: 0 auto; padding: 24px;
  overflow-wrap: anywhere; }
h1 { font-size: 22px; } h2 { font-size: 16px; margin: 28px 0 6px; }
ul { list-style: none; margin: 0; padding: 0; } li { padding: 4px 0; border-bottom: 1px solid #8884; }
.verdict { font-size: 17px; padding: 12px 16px; border-left: 4px solid #2f62d9; background: #2f62d918; }
"""


def format_page(comparison: RunComparison) -> str:
    """Return the comparison as one HTML page without scripts. It fetches nothing."""
    names = "".join(
        f"<li>{letter} {_to_printable(name)}</li>" for letter, name in zip("AB", comparison.names, strict=True)
    )
    parts = [f"<h1>Comparison of two runs</h1><ul>{names}</ul><p class=verdict>{_to_printable(comparison.verdict)}</p>"]
    for title, entries in iter_sections(comparison):
        items = "".join(f"<li>{_to_printable(entry)}</li>" for entry in entries)
        parts.append(f"<h2>{_to_printable(title)}</h2><ul>{items}</ul>")
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width"><title>Comparison of two runs</title>'
        f"<style>{_STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )


def _to_printable(text: str) -> str:
    return html.escape(readable(text, 2000))

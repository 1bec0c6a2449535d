"""/status: what a person wants to see at a glance, in one page without anything from elsewhere.

Shows whatever the desk says of itself: a name with a value becomes a line, a list of objects a table. So nothing here
needs to change when the desk has more to say.
"""

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --faint: #888; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.05rem; margin-top: 2rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .25rem 1rem .25rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th { font-weight: 600; } .lines th { width: 16rem; font-weight: 400; color: var(--faint); }
.none { color: var(--faint); } .scroll { overflow-x: auto; }
"""


def status_page(title: str, sections: Mapping[str, Any]) -> str:
    """
    Args:
        sections: scalars are shown first as lines; an object is a section of lines; a list of objects a table.
    """
    lines = {name: value for name, value in sections.items() if _is_scalar(value)}
    parts = [f"<h1>{html.escape(title)}</h1>", _lines(lines) if lines else ""]
    for name, value in sections.items():
        if _is_scalar(value):
            continue
        parts.append(f"<h2>{html.escape(_words(name))}</h2>")
        parts.append(_lines(value) if isinstance(value, Mapping) else _table(value))
    head = f'<meta charset="utf-8"><meta http-equiv="refresh" content="5"><title>{html.escape(title)}</title>'
    style = f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}{style}</head><body>{"".join(parts)}</body></html>'


def _lines(values: Mapping[str, Any]) -> str:
    if not values:
        return '<p class="none">none</p>'
    rows = (f"<tr><th>{html.escape(_words(name))}</th><td>{_cell(value)}</td></tr>" for name, value in values.items())
    return f'<table class="lines">{"".join(rows)}</table>'


def _table(rows: Sequence[Any]) -> str:
    if not rows:
        return '<p class="none">none</p>'
    if not all(isinstance(row, Mapping) for row in rows):
        rows = [{"": row} for row in rows]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    head = _row("th", (html.escape(_words(name)) for name in columns))
    body = (_row("td", (_cell(row.get(name)) for name in columns)) for row in rows)
    return f'<div class="scroll"><table>{head}{"".join(body)}</table></div>'


def _row(tag: str, cells: Iterable[str]) -> str:
    return f"<tr>{''.join(f'<{tag}>{cell}</{tag}>' for cell in cells)}</tr>"


def _cell(value: Any) -> str:
    if value is None or value == "":
        return '<span class="none">–</span>'
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    if isinstance(value, Mapping):
        return ", ".join(f"{html.escape(str(name))}: {_cell(part)}" for name, part in value.items()) or _cell(None)
    if isinstance(value, list | tuple):
        return ", ".join(_cell(part) for part in value) or _cell(None)
    return html.escape(str(value))


def _is_scalar(value: Any) -> bool:
    return not isinstance(value, Mapping | list | tuple)


def _words(name: str) -> str:
    return name.replace("_", " ")

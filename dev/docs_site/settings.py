"""Names of settings: anchors for them on the reference pages, links to them from all others."""

import os
import re
from pathlib import Path, PurePosixPath

REFERENCES = (PurePosixPath("docs/configuration.md"), PurePosixPath("docs/tinker-settings.md"))
PAGES_WITH_FILTER = (*REFERENCES, PurePosixPath("docs/agent-settings.md"))
_ROW = re.compile(r"^\| `([\w.<>-]+)` \|.*$", re.MULTILINE)
_CODE = re.compile(r"(?<![\[`])`([a-z_]+(?:\.\w+)+)(=[^`]*)?`(?![`\]])")
_FENCE = re.compile(r"^(\s*)```.*?^\1```\s*$", re.MULTILINE | re.DOTALL)


def read_names(root: Path) -> set[str]:
    """Return the names of all settings of a training run, read from the generated page."""
    text = (root / REFERENCES[0]).read_text()
    return set(_ROW.findall(text[: text.index("\n## Settings of other releases")]))


def sections(names: set[str]) -> set[str]:
    """Return the names of the sections that hold these settings."""
    return {str(name.rsplit(".", depth)[0]) for name in names for depth in range(1, name.count(".") + 1)}


def with_anchors(text: str) -> str:
    """Give the first cell of each row of settings its own name as an anchor."""
    seen: set[str] = set()

    def anchor(match: re.Match[str]) -> str:
        name = match[1]
        if name in seen:
            return match[0]
        seen.add(name)
        return match[0].replace(f"`{name}`", f"`{name}`{{#{name}}}", 1)

    return _ROW.sub(anchor, text)


def with_links(text: str, page: PurePosixPath, names: set[str]) -> str:
    """Link each setting in inline code, alone or with a value, to its row on the reference page."""
    target = os.path.relpath(REFERENCES[0], page.parent)

    def link(match: re.Match[str]) -> str:
        return f"[{match[0]}]({target}#{match[1]})" if match[1] in names else match[0]

    pieces, end = [], 0
    for fence in _FENCE.finditer(text):  # code blocks stay as they are
        pieces += [_CODE.sub(link, text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*pieces, _CODE.sub(link, text[end:])])

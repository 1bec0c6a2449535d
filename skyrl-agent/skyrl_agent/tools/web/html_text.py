"""HTML to text that a model reads: headings, lists, tables and links stay, scripts and styles go."""

import re
import time
from html.parser import HTMLParser
from urllib.parse import urljoin

MAX_SECONDS = 5.0
MAX_ELEMENT_CHARACTERS = 1 << 20
"""Of one tag, comment or script. At a longer one, and when the time is up, the page ends: the parser of the standard
library takes quadratic time on some pages that are broken on purpose."""

_CHUNK = 1 << 16
_SKIPPED = {"script", "style", "noscript", "template", "svg", "iframe", "head", "canvas", "object", "select", "button"}
_BLOCK_NAMES = (
    "address article aside blockquote body br dd details div dl dt fieldset figcaption figure footer form h1 h2 h3 h4 "
    "h5 h6 header hr html li main nav ol p pre section summary table tbody thead tr ul"
)
_BLOCKS = frozenset(_BLOCK_NAMES.split())
_HEADINGS = {f"h{level}": "#" * level + " " for level in range(1, 7)}


def html_to_text(html: str, base_url: str = "") -> str:
    """Text in the order of the page, with its title first. Links are written as `[text](address)`."""
    reader = _Reader(base_url)
    deadline = time.monotonic() + MAX_SECONDS
    for start in range(0, len(html), _CHUNK):
        reader.feed(html[start : start + _CHUNK])
        if len(reader.rawdata) > MAX_ELEMENT_CHARACTERS or time.monotonic() > deadline:
            break
    else:
        reader.close()
    text = re.sub(r"[ \t\r\f\v\xa0]+", " ", "".join(reader.parts))
    text = re.sub(r" ?\n ?", "\n", text)
    text = re.sub(r"\n{3,}", "\n\n", text).strip()
    title = " ".join("".join(reader.title).split())
    return f"{title}\n\n{text}".strip() if title and not text.startswith(f"# {title}\n") else text


class _Reader(HTMLParser):
    def __init__(self, base_url: str) -> None:
        super().__init__(convert_charrefs=True)
        self.base_url = base_url
        self.parts: list[str] = []
        self.title: list[str] = []
        self._skipped: str | None = None
        """The element that is not shown and that this is inside of; the outermost one."""
        self._depth = 0
        """Elements of that name that are open."""
        self._in_title = False
        self._link: str | None = None
        self._link_start = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "title":
            self._in_title = not self.title
        elif self._skipped is not None and not (
            self._skipped == "head" and tag in _BLOCKS
        ):  # a head is often left open
            self._depth += tag == self._skipped
        elif tag in _SKIPPED:
            self._skipped, self._depth = tag, 1
        elif tag == "a":
            self._end_link()
            self._link, self._link_start = dict(attrs).get("href"), len(self.parts)
        elif tag in ("td", "th"):
            self.parts.append(" | ")
        elif tag in _BLOCKS:
            self._skipped = None
            self.parts.append("\n" + _HEADINGS.get(tag, "- " if tag == "li" else ""))

    def handle_endtag(self, tag: str) -> None:
        if tag == "title":
            self._in_title = False
        elif self._skipped is not None:
            self._depth -= tag == self._skipped
            if self._depth == 0:
                self._skipped = None
        elif tag == "a":
            self._end_link()
        elif tag in _BLOCKS:
            self.parts.append("\n")

    def handle_data(self, data: str) -> None:
        if self._in_title:
            self.title.append(data)
        elif self._skipped is None:
            self.parts.append(data)

    def _end_link(self) -> None:
        if self._link is None:
            return
        text = " ".join("".join(self.parts[self._link_start :]).split())
        link, self._link = self._link.strip(), None
        try:
            address = urljoin(self.base_url, link)
        except ValueError:
            return
        if text and address.startswith(("http://", "https://")) and not link.startswith("#"):
            self.parts[self._link_start :] = [f"[{text}]({address})"]

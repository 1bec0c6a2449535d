"""HTML to text that a model reads: headings, lists, tables and links stay, scripts and styles go.

Linear time for any page: the parser of the standard library takes cubic time on pages that are broken on
purpose, in one call, with everything else of the process waiting.
"""

import html
import re
import time
from urllib.parse import urljoin

MAX_SECONDS = 5.0
"""Time limit of parsing a page; the text found so far is returned then."""

_TAG = re.compile(r"<(/?)([A-Za-z][A-Za-z0-9]{0,30})")
_TAG_END = re.compile(r"""[^>"']*+(?:"[^"]*+"[^>"']*+|'[^']*+'[^>"']*+)*+>""")
_TAG_CHARACTERS = 4096
"""Maximum length of a tag in which quotes are respected; a longer tag ends at its first `>`."""
_HREF = re.compile(r"""\bhref\s*=\s*(?:"([^"]*)"|'([^']*)'|([^\s"'>]+))""", re.IGNORECASE)
_RAW_END = {name: re.compile(f"</{name}", re.IGNORECASE) for name in ("script", "style", "title", "textarea")}

_SKIPPED = {"script", "style", "noscript", "template", "svg", "iframe", "head", "canvas", "object", "select", "button"}
_BLOCK_NAMES = (
    "address article aside blockquote body br dd details div dl dt fieldset figcaption figure footer form h1 h2 h3 h4 "
    "h5 h6 header hr html li main nav ol p pre section summary table tbody thead tr ul"
)
_BLOCKS = frozenset(_BLOCK_NAMES.split())
_STARTS = {"li": "- ", "td": " | ", "th": " | "} | {f"h{level}": "#" * level + " " for level in range(1, 7)}


def html_to_text(page: str, base_url: str = "") -> str:
    """Convert a page to text, title first. Links are written as `[text](address)`."""
    reader = _Reader(page, base_url)
    reader.read()
    text = re.sub(r"[ \t\r\f\v\xa0]+", " ", "".join(reader.parts))
    text = re.sub(r" ?\n ?", "\n", text)
    text = re.sub(r"\n{3,}", "\n\n", text).strip()
    title = " ".join(reader.title.split())
    return f"{title}\n\n{text}".strip() if title and not f"{text}\n".startswith(f"# {title}\n") else text


class _Reader:
    def __init__(self, page: str, base_url: str) -> None:
        self.page, self.base_url = page, base_url
        self.parts: list[str] = []
        self.title = ""
        self._skipped: str | None = None
        """The element that is not shown and that this is inside of; the outermost one."""
        self._depth = 0
        """Elements of that name that are open."""
        self._link: str | None = None
        self._link_start = 0

    def read(self) -> None:
        position, deadline = 0, time.monotonic() + MAX_SECONDS
        while position < len(self.page) and time.monotonic() < deadline:
            start = self.page.find("<", position)
            self._add_text(self.page[position : start if start >= 0 else len(self.page)])
            if start < 0:
                return
            position = self._parse_markup(start)
        self._close_link()

    def _parse_markup(self, start: int) -> int:
        """Parse markup that begins with `<`. Returns the position of its end."""
        tag = _TAG.match(self.page, start)
        if tag is None:
            if self.page.startswith("<!--", start):
                return self._find_after("-->", start + 4)
            if self.page.startswith(("<!", "<?", "</"), start):
                return self._find_after(">", start)
            self._add_text("<")
            return start + 1
        quoted = _TAG_END.match(self.page, tag.end(), tag.end() + _TAG_CHARACTERS)
        end = quoted.end() if quoted else self._find_after(">", tag.end())
        name = tag[2].lower()
        if tag[1]:
            self._close_element(name)
        elif name in _RAW_END:
            return self._parse_raw(name, end)
        else:
            self._start(name, self.page[tag.end() : min(end, tag.end() + _TAG_CHARACTERS)])
        return end

    def _find_after(self, mark: str, start: int) -> int:
        end = self.page.find(mark, start)
        return len(self.page) if end < 0 else end + len(mark)

    def _parse_raw(self, name: str, start: int) -> int:
        """Parse an element in which `<` has no meaning."""
        found = _RAW_END[name].search(self.page, start)
        end = found.start() if found else len(self.page)
        if name == "title" and not self.title:
            self.title = _decode_entity(self.page[start:end])
        return self._find_after(">", end)

    def _start(self, name: str, attributes: str) -> None:
        if self._skipped is not None and not (self._skipped == "head" and name in _BLOCKS):  # a head may be left open
            self._depth += name == self._skipped
            return
        self._skipped = None
        if name in _SKIPPED:
            self._skipped, self._depth = name, 1
        elif name == "a":
            self._close_link()
            href = _HREF.search(attributes)
            self._link = _decode_entity(next(filter(None, href.groups()), "")).strip() if href else None
            self._link_start = len(self.parts)
        else:
            self.parts.append("\n" * (name in _BLOCKS) + _STARTS.get(name, ""))

    def _close_element(self, name: str) -> None:
        if self._skipped is not None:
            self._depth -= name == self._skipped
            if self._depth == 0:
                self._skipped = None
        elif name == "a":
            self._close_link()
        elif name in _BLOCKS:
            self.parts.append("\n")

    def _add_text(self, text: str) -> None:
        if self._skipped is None and text:
            self.parts.append(_decode_entity(text))

    def _close_link(self) -> None:
        if self._link is None:
            return
        text = " ".join("".join(self.parts[self._link_start :]).split())
        link, self._link = self._link, None
        try:
            address = urljoin(self.base_url, link)
        except ValueError:
            return
        if text and address.startswith(("http://", "https://")) and not link.startswith("#"):
            self.parts[self._link_start :] = [f"[{text}]({address})"]


def _decode_entity(text: str) -> str:
    try:
        return html.unescape(text)
    except ValueError:  # a number of thousands of digits
        return text

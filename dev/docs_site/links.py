"""Check of a built site: each link and anchor leads somewhere, and no page loads anything from elsewhere."""

import re
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADING = {
    "script": "src",
    "img": "src",
    "iframe": "src",
    "source": "src",
    "video": "src",
    "audio": "src",
    "object": "data",
}
LOADING_LINKS = ("stylesheet", "preload", "preconnect", "dns-prefetch", "modulepreload", "icon", "manifest")
_STYLE_URL = re.compile(r"""(?:@import\s+|url\()\s*["']?((?:https?:)?//[^"')\s]+)""")


@dataclass
class Page(HTMLParser):
    """Anchors, links and loaded files of one HTML page."""

    anchors: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what a tag refers to."""
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values[name] for name in ("id", "name") if values.get(name)}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if LOADING.get(tag) in values:
            self.loaded.append(values[LOADING[tag]])
        if tag == "link" and any(kind in LOADING_LINKS for kind in values.get("rel", "").split()):
            self.loaded.append(values.get("href", ""))
        self.loaded += _STYLE_URL.findall(values.get("style", ""))


def problems(folder: Path) -> list[str]:
    """Return a line for each link that leads nowhere and each file that is loaded from another host."""
    pages = {}
    for path in sorted(folder.rglob("*.html")):
        pages[path] = page = Page()
        page.feed(path.read_text())
    found = [
        f"{style.relative_to(folder)}: loads {url}"
        for style in sorted(folder.rglob("*.css"))
        for url in _STYLE_URL.findall(style.read_text())
    ]
    for path, page in pages.items():
        where = path.relative_to(folder)
        for url in page.loaded:
            if _is_external(url):
                found.append(f"{where}: loads {url}")
            elif not url.startswith("data:") and _file(url, path, folder) is None:
                found.append(f"{where}: loads {url}, which does not exist")
        if where.name == "404.html":
            continue  # served at any address: its links begin at the root of the site
        for url in page.links:
            if _is_external(url) or urlsplit(url).scheme:
                continue
            target, anchor = _file(url, path, folder), unquote(urlsplit(url).fragment)
            if target is None:
                found.append(f"{where}: {url} does not exist")
            elif anchor and target in pages and anchor not in pages[target].anchors:
                found.append(f"{where}: {url} has no such anchor")
    return found


def _is_external(url: str) -> bool:
    return bool(urlsplit(url).netloc)


def _file(url: str, page: Path, folder: Path) -> Path | None:
    """Return the file of an address within the site; None if it does not exist."""
    path = unquote(urlsplit(url).path)
    target = page if not path else (folder / path.lstrip("/") if path.startswith("/") else page.parent / path).resolve()
    target = target / "index.html" if target.is_dir() else target
    return target if target.exists() else None

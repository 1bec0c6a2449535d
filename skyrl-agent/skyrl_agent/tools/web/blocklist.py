"""Pages hidden from agents, such as pages with a benchmark's answers."""

from collections.abc import Iterable
from urllib.parse import urlsplit


class Blocklist:
    """
    Args:
        domains: blocked with their subdomains: `example.org` covers `www.example.org`, not `notexample.org`.
        keywords: blocked in URLs and their accompanying text, case-insensitive.
    """

    def __init__(self, domains: Iterable[str] = (), keywords: Iterable[str] = ()) -> None:
        self.domains = tuple(domain.lower().strip(". ").removeprefix("*.") for domain in domains)
        self.keywords = tuple(keyword.lower() for keyword in keywords)

    def blocks(self, url: str, text: str = "") -> bool:
        try:
            host = (urlsplit(url).hostname or "").rstrip(".")
        except ValueError:
            return True
        if any(host == domain or host.endswith(f".{domain}") for domain in self.domains):
            return True
        seen = f"{url} {text}".lower()
        return any(keyword in seen for keyword in self.keywords)

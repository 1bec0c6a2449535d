"""Addresses as models write them: in quotes, as markdown links, in lists that are nearly JSON, inside a sentence."""

import re
from urllib.parse import quote, urlsplit, urlunsplit

from skyrl_gym.tools.signature import parse_text

_ADDRESS = re.compile(r"https?://[^\s\"'<>\[\]{}|\\^`]{1,4000}", re.IGNORECASE)
_BARE = re.compile(
    r"(?:[a-z0-9](?:[a-z0-9-]{0,62})\.)+[a-z]{2,24}(?::\d{1,5})?(?:[/?#][^\s\"'<>\[\]{}|\\^`]*)?", re.IGNORECASE
)
_TRAILING = ".,;:!?*'\""


def parse_urls(value: list[str] | str) -> list[str]:
    """Find the URLs in a text, in order, without duplicates. URLs without a scheme get https."""
    parsed = parse_text(value) if isinstance(value, str) else value
    texts = [str(item) for item in parsed] if isinstance(parsed, list) else [str(value)]
    found = [address for text in texts for address in _find_urls(text)]
    return list(dict.fromkeys(found))


def _find_urls(text: str) -> list[str]:
    if complete := _ADDRESS.findall(text):
        return [normalize_url(_strip_punctuation(address)) for address in complete]
    words = (word.strip("\"'`[]()<>,; ") for word in text[:10_000].split())
    return [normalize_url(f"https://{_strip_punctuation(word)}") for word in words if _BARE.fullmatch(word)]


def _strip_punctuation(address: str) -> str:
    """Remove the punctuation of the sentence around it, and a bracket that was opened before it."""
    while address and (address[-1] in _TRAILING or (address[-1] == ")" and address.count(")") > address.count("("))):
        address = address[:-1]
    return address


def normalize_url(url: str) -> str:
    """Normalize a URL: lower-case scheme and host, no fragment, invalid characters as %XX."""
    try:
        parts = urlsplit(url)
        host = parts.netloc.lower()
    except ValueError:
        return url
    safe = "/:@!$&'()*+,;=~-._%?"
    return urlunsplit((parts.scheme.lower(), host, quote(parts.path, safe) or "/", quote(parts.query, safe), ""))


def list_url_variants(url: str) -> list[str]:
    """Return the URL and likely alternatives: with or without www, then without encryption."""
    parts = urlsplit(url)
    host = parts.netloc
    other = host.removeprefix("www.") if host.startswith("www.") else f"www.{host}"
    has_name = "." in host and not host.replace(".", "").split(":")[0].isdigit() and "[" not in host
    forms = [(parts.scheme, host), *([(parts.scheme, other)] if has_name else [])]
    if parts.scheme == "https":
        forms.append(("http", host))
    return [urlunsplit((scheme, netloc, parts.path, parts.query, "")) for scheme, netloc in forms]

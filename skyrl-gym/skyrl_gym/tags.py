"""Extraction of text between tags, as in `<answer>42</answer>`. In linear time, however many tags stay open: a regular
expression takes quadratic time there, and a model may write thirty thousand tokens of nothing else."""


def has_tags(text: str, tag: str) -> bool:
    """Return whether both `<tag>` and `</tag>` occur, in whatever order."""
    return f"<{tag}>" in text and f"</{tag}>" in text


def first_tagged(text: str, tag: str) -> str | None:
    """Extract the first `<tag>...</tag>`, or return None."""
    start = text.find(f"<{tag}>")
    end = text.find(f"</{tag}>", start)
    return text[start + len(tag) + 2 : end] if 0 <= start < end else None


def last_tagged(text: str, tag: str) -> str | None:
    """Extract the last `<tag>...</tag>`, without an earlier tag of that name, or return None."""
    start = text.rfind(f"<{tag}>", 0, max(0, text.rfind(f"</{tag}>")))
    return first_tagged(text[start:], tag) if start >= 0 else None

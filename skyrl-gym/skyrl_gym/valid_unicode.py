"""Text that has a form in UTF-8: JSON can hold half of a surrogate pair (a cut emoji), which tokenizers refuse."""


def replace_lone_surrogates(text: str) -> str:
    """Return the text with each lone surrogate replaced by U+FFFD; two halves become their character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text

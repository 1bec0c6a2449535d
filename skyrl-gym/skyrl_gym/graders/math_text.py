r"""Mathematical answers as text: finding them in a response, and writing them in one way. Independent of equivalence
checks.
"""

import re
from decimal import Decimal

__all__ = ["extract_number", "first_boxed", "last_boxed_only_string", "normalize_answer", "remove_boxed"]

_BOX = "\\boxed{"
_FLAT_BOX = re.compile(r"\\boxed\{([^{}]*)\}")
_AFTER_HASHES = re.compile(r"#### (-?[0-9.,]+)")
_NUMBER = re.compile(r"-?[0-9.,]+")


def extract_number(text: str, *, strict: bool = True) -> str | None:
    """Extract a GSM8K solution's final answer (https://arxiv.org/abs/2110.14168) without thousands separators, or None.

    Strict: the number after the first `#### `. Otherwise: the last number anywhere. A full stop that follows the number
    belongs to it, so "#### 42." is not "42".
    """
    if strict:
        found = _AFTER_HASHES.search(text)
        return found.group(1).replace(",", "") if found else None
    numbers = [run for run in _NUMBER.findall(text) if run.strip("-,") not in ("", ".")]
    return numbers[-1].replace(",", "") if numbers else None


def last_boxed_only_string(text: str) -> str | None:
    r"""Return the last `\boxed{...}` of a text, box included; None without one or if its braces do not close."""
    start = text.rfind(_BOX)
    if start < 0:
        return None
    depth = 0
    for position in range(start, len(text)):
        if text[position] == "{":
            depth += 1
        elif text[position] == "}":
            depth -= 1
            if depth == 0:
                return text[start : position + 1]
    return None


def remove_boxed(boxed: str) -> str:
    r"""Return the content of `\boxed{...}`. Raises AssertionError if the text is not that."""
    assert boxed.startswith(_BOX) and boxed.endswith("}"), f"not a \\boxed{{...}}: {boxed!r:.200}"
    return boxed[len(_BOX) : -1]


def first_boxed(text: str) -> str | None:
    r"""Extract the first `\boxed{...}` without braces inside, or None without one or if it is empty."""
    found = _FLAT_BOX.search(text)
    return (found.group(1).strip() or None) if found else None


_DELIMITERS = re.compile(r"(?<!\\)\\[()\[\]$]|\$")
_SIZES = re.compile(r"\\(?:left|right|[bB]igg?[lrm]?|displaystyle|textstyle|limits)(?![A-Za-z])")
_NO_SPACE = re.compile(r"(?<!\\)\\[,!;:]")
_WIDE_SPACE = re.compile(r"(?:\\q?quad(?![A-Za-z])|(?<!\\)\\ |~|\s)+")
_DEGREES = re.compile(r"\^\s*(?:\\circ(?![A-Za-z])|\{\s*\\circ\s*\})|\\degree(?![A-Za-z])|°")
_FRACTION = re.compile(r"\\[dtc]frac(?![A-Za-z])")
_THOUSANDS_COMMA = re.compile(r"(?<=\d)\s*,\s*\\!\s*(?=\d{3}(?!\d))")
_PLUS_SIGN = re.compile(r"(?:^|(?<=[=(,\[]))\s*\+\s*(?=[\w.(\\])")
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])|(?<![\d.])(?<![\d.] )\d{1,3}(?: \d{3})+(?! ?\d)")
_MIXED = re.compile(r"(?<![\d./])(\d+) +(\d+)/(\d+)")
_SHORT_FRACTION = re.compile(r"\\frac\s*(?:\{([^{}]*)\}|(\d))\s*(?:\{([^{}]*)\}|(\d))")
_SHORT_ROOT = re.compile(r"\\sqrt\s*(\d)")
TEXT_COMMAND = r"\\(?:text(?:bf|it|rm|sf|tt|up|normal)?|mbox|hbox|mathrm)(?![A-Za-z])"
"""Commands whose argument is text, such as a unit."""
_FONT = re.compile(r"\\(?:boldsymbol|bm|pmb|mathbf|mathit|mathsf|mathtt|mathnormal|underline|emph)\s*\{")
_BOLD = re.compile(r"\s*(\*\*|__)(?!\s)([^*_]+)(?<!\s)\1\s*")
_EXPONENT = re.compile(r"(?<![\w.])([0-9]+(?:\.[0-9]+)?|\.[0-9]+)[eE]([+-]?[0-9]{1,3})(?![\w.^])")
"""1e3 and 1.5E-7, as programs print numbers; longer exponents are no answers."""
_TEXT = re.compile(rf"(?:{TEXT_COMMAND}|\\mathbf)\s*\{{([^{{}}]*)\}}")
_TEXT_ALONE = re.compile(rf"\s*{TEXT_COMMAND}\s*\{{([^{{}}]*[0-9][^{{}}]*)\}}\s*")


def clean(answer: str) -> str:
    """Strip pure formatting from an answer: delimiters, sizes, spaces, degree and percent signs, a plus
    sign before a number, a text command around all of it.

    "5 1/2" becomes a mixed number, lest it read as 51/2.
    """
    text = bold[2] if (bold := _BOLD.fullmatch(answer)) else answer
    text = _THOUSANDS_COMMA.sub(",", _strip_fonts(text).replace("−", "-").replace("{,}", ","))
    text = _NO_SPACE.sub("", _SIZES.sub("", _DELIMITERS.sub("", text)))
    text = _DEGREES.sub("", _FRACTION.sub(r"\\frac", text)).replace("\\%", "").replace("%", "")
    text = _MIXED.sub(r"\1\\frac{\2}{\3}", _WIDE_SPACE.sub(" ", text))
    text = _TEXT_ALONE.sub(r"\1", text) if _TEXT_ALONE.fullmatch(text) else text
    text = _EXPONENT.sub(_write_out, text)
    return _PLUS_SIGN.sub("", text.strip()).rstrip(".,;").strip()


def _strip_fonts(text: str) -> str:
    r"""Replace `\boldsymbol{...}` and other fonts by what they hold, nested braces included."""
    while found := _FONT.search(text):
        depth, end = 1, found.end()
        while end < len(text) and depth:
            depth += (text[end] == "{") - (text[end] == "}")
            end += 1
        if depth:  # it does not close: leave it to the parser
            return text
        text = text[: found.start()] + text[found.end() : end - 1] + text[end:]
    return text


def _write_out(found: re.Match[str]) -> str:
    """Return all digits: a product with a power of ten would be read apart in `1/2e3` and `2^1e3`."""
    return f"{Decimal(found[0]):f}"


def join_thousands(text: str) -> str:
    """1,234,567 and 1 234 567 as 1234567."""
    return _THOUSANDS.sub(lambda number: re.sub("[ ,]", "", number.group()), text)


def normalize_answer(answer: str) -> str:
    r"""Normalize the spelling of an answer, for comparison: "\dfrac12" and "\frac{1}{2}" are equal afterwards.

    Normalising what is normal changes nothing.
    """
    while (simpler := _simplify(answer)) != answer:  # removing one thing may uncover another
        answer = simpler
    return answer


def _simplify(text: str) -> str:
    text = _TEXT.sub(r"\1", clean(text))
    text = _SHORT_FRACTION.sub(lambda f: f"\\frac{{{f[1] or f[2] or ''}}}{{{f[3] or f[4] or ''}}}", text)
    return re.sub(r"\s", "", _SHORT_ROOT.sub(r"\\sqrt{\1}", text))

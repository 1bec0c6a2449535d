"""Text operations of cheaters: keep the form of a solution, lose what it says. Independent of environments."""

import re
import string
from collections.abc import Callable, Iterator, Mapping

_FORMS = [
    re.compile(r"(?P<open><(?P<tag>[\w-]+)>)(?P<inside>(?:(?!<[\w-]+>).)*?)(?P<close></(?P=tag)>)", re.DOTALL),
    re.compile(r"(?P<open>```\w*\n)(?P<inside>.*?)(?P<close>\n?```)", re.DOTALL),
    re.compile(r"(?P<open>\\boxed\{)(?P<inside>(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)(?P<close>\})"),
    re.compile(r"(?P<open>####[ \t]*)(?P<inside>[^\n]*)(?P<close>)"),
    re.compile(r"(?P<open>\banswer(?: is)?:[ \t]*)(?P<inside>[^\n<]*)(?P<close>)", re.IGNORECASE),
]
"""Ways of marking a solution. Tags are the innermost ones."""

_SHIFTED = str.maketrans(
    string.ascii_lowercase + string.ascii_uppercase + string.digits,
    "bcdefghijklmnopqrstuvwxyza" + "BCDEFGHIJKLMNOPQRSTUVWXYZA" + "4567890123",
)


def garbled(text: str) -> str:
    """Other letters and digits in the same places: "42 apples" becomes "86 bqqmft". Of text without any, x for each."""
    if not any(char.isalnum() for char in text):
        return re.sub(r"\S", "x", text)
    return "".join("x" if char.isalnum() and not char.isascii() else char.translate(_SHIFTED) for char in text)


def change_marked(text: str, change: Callable[[str], str]) -> str | None:
    """Return the text with the inside of each marked place changed; None if nothing is marked."""
    for form in _FORMS:
        if form.search(text):
            return form.sub(lambda found: found["open"] + change(found["inside"]) + found["close"], text)
    return None


def change_answers(text: str, answers: list[str], change: Callable[[str], str]) -> str | None:
    """Return the text with each occurrence of an answer changed; None if it has none."""
    present = sorted((answer for answer in answers if answer in text), key=len, reverse=True)
    if not present:
        return None
    return re.sub("|".join(map(re.escape, present)), lambda found: change(found[0]), text)


def extract_last_marked(text: str) -> str:
    """Return the inside of the last marked place, or the text if nothing is marked."""
    for form in _FORMS:
        found = list(form.finditer(text))
        if found:
            return found[-1]["inside"].strip()
    return text.strip()


def replace_last_marked(text: str, inside: str) -> str:
    """Return the text with the last marked place saying something else; all of it if nothing is marked."""
    for form in _FORMS:
        found = list(form.finditer(text))
        if found:
            last = found[-1]
            return text[: last.start("inside")] + inside + text[last.end("inside") :]
    return inside


def collect_answers(extras: Mapping[str, object]) -> list[str]:
    """Return the texts and numbers of a row's ground truth."""
    specs = (extras.get("reward_spec"), extras.get("reward_model"))
    return [text for spec in specs if isinstance(spec, Mapping) for text in _iter_leaves(spec.get("ground_truth"))]


def _iter_leaves(value: object) -> Iterator[str]:
    if isinstance(value, Mapping):
        for each in value.values():
            yield from _iter_leaves(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _iter_leaves(each)
    elif isinstance(value, str | int | float) and str(value).strip():
        yield str(value).strip()

r"""Answers compared as text after normalisation, as for AIME problems: no equivalence, 0.5 is not \frac{1}{2}.

The substitutions are published with Minerva (https://arxiv.org/abs/2206.14858, appendix D.1). Their order matters:
datasets were filtered and results reported with it.
"""

import re

from skyrl_gym.graders.math_text import last_boxed_only_string, remove_boxed
from skyrl_gym.graders.results import Score

__all__ = ["grade_minerva", "grade_strict_box", "normalize_final_answer"]

NO_ANSWER = "[INVALID]"
"""The prediction of a response that has none."""

ANSWER_PATTERN = r"(?i)Answer\s*:\s*([^\n<]+)"
"""Pattern of an answer: the text after "Answer:" up to the line's end or to `<`, where an end-of-text token may
begin.
"""

STRICT_BOX_CHARACTERS = 100
"""A strict box is looked for in the last so many characters."""

_SUBSTITUTIONS = (
    ("an ", ""),
    ("a ", ""),
    (".$", "$"),
    ("\\$", ""),
    ("\\ ", ""),
    (" ", ""),
    ("mbox", "text"),
    (",\\text{and}", ","),
    ("\\text{and}", ","),
    ("\\text{m}", "\\text{}"),
)
_WORDS = (
    "square ways integers dollars mph inches hours km units \\ldots sue points feet minutes digits cents degrees cm gm"
)
_MORE_WORDS = "pounds meters meals edges students childrentickets multiples"
_REMOVED = (
    *_WORDS.split(),
    *_MORE_WORDS.split(),
    "\\text{s}",
    "\\text{.}",
    "\\text{\ns}",
    "\\text{}^2",
    "\\text{}^3",
    "\\text{\n}",
    "\\text{}",
    "\\mathrm{th}",
    "^\\circ",
    "^{\\circ}",
    "\\;",
    ",\\!",
    "{,}",
    '"',
    "\\dots",
)
_UNWRAPPED = (
    re.compile(r"\\text\{(.*?)\}"),
    re.compile(r"\\textbf\{(.*?)\}"),
    re.compile(r"\\overline\{(.*?)\}"),
    re.compile(r"\\boxed\{(.*)\}"),
)
_MATH = re.compile(r"\$(.*?)\$")
_SHORT_FRACTION = re.compile(r"(frac)([^{])(.)")
_SHORT_ROOT = re.compile(r"(sqrt)([^{])")


def normalize_final_answer(final_answer: str) -> str:
    r"""Return an answer without units, filler words, text commands, short LaTeX forms and thousands separators.

    "x = 5" is "5", "\frac12" is "\frac{1}{2}", "$3$ apples" is "3", "1,000" is "1000".
    """
    text = final_answer.rpartition("=")[2]
    for old, new in _SUBSTITUTIONS:
        text = text.replace(old, new)
    for removed in _REMOVED:
        text = text.replace(removed, "")
    if math := _MATH.search(text):
        text = math.group(1)
    for wrapper in _UNWRAPPED:
        text = wrapper.sub(r"\1", text)
    text = _SHORT_FRACTION.sub(r"\1{\2}{\3}", text)
    text = _SHORT_ROOT.sub(r"\1{\2}", text).replace("$", "")
    if text.replace(",", "").isdigit():
        text = text.replace(",", "")
    return text.strip()


def grade_minerva(
    response: str, gold: str, *, gold_is_boxed: bool = False, answer_pattern: str = ANSWER_PATTERN
) -> Score:
    """Return whether the response's last `Answer: ...` equals the gold after normalisation of both.

    `gold_is_boxed` takes the gold from the last box of a whole solution. A response without an answer has the
    prediction "[INVALID]".
    """
    answers = re.findall(answer_pattern, response)
    prediction = normalize_final_answer(answers[-1] if answers else NO_ANSWER)
    if gold_is_boxed:
        gold = remove_boxed(last_boxed_only_string(gold) or "\\boxed{}")
    return Score(float(bool(answers) and prediction == normalize_final_answer(gold)), prediction)


def grade_strict_box(response: str, gold: str, *, end: int | None = None) -> Score:
    r"""Return whether the last box among the last 100 characters (before `end`, if given) is literally the gold."""
    start = max(0, (len(response) if end is None else end) - STRICT_BOX_CHARACTERS)
    boxed = last_boxed_only_string(response[start:])
    prediction = remove_boxed(boxed) if boxed else None
    return Score(float(prediction == gold), prediction)

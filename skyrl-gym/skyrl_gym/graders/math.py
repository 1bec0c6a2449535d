r"""Graders of mathematical answers: GSM8K's number, a boxed answer compared as text, by value, or as for AIME.

Only one answer of a response counts, the same one always, so that listing guesses does not help.
"""

import re
from fractions import Fraction

from skyrl_gym.graders.math_minerva import grade_minerva, grade_strict_box, normalize_final_answer
from skyrl_gym.graders.math_pool import EquivalencePool, default_pool
from skyrl_gym.graders.math_text import (
    TEXT_COMMAND,
    clean,
    extract_number,
    first_boxed,
    join_thousands,
    last_boxed_only_string,
    normalize_answer,
    remove_boxed,
)
from skyrl_gym.graders.results import Grade, Invalid, Score

__all__ = [
    "EquivalencePool",
    "extract_number",
    "first_boxed",
    "grade_equivalence",
    "grade_first_box",
    "grade_last_box",
    "grade_minerva",
    "grade_number",
    "grade_strict_box",
    "last_boxed_only_string",
    "normalize_answer",
    "normalize_final_answer",
    "remove_boxed",
]

MAX_ANSWER_CHARACTERS = 1000
"""Maximum length of an answer; the longest in MATH has about 150 characters."""


def grade_number(response: str, gold: str, *, strict: bool = True) -> Score | Invalid:
    """GSM8K: 1 if the number that `extract_number` finds reads as the gold, digit by digit ("42.0" is not "42")."""
    answer = extract_number(response, strict=strict)
    if answer is None:
        return Invalid("there is no number after '#### '" if strict else "there is no number")
    return Score(float(answer == gold.strip().replace(",", "")), answer)


def grade_first_box(response: str, gold: str) -> Score | Invalid:
    r"""1 if the first `\boxed{}` holds the gold to the letter, but for space around it."""
    answer = first_boxed(response)
    if answer is None:
        return Invalid("there is no answer in \\boxed{}")
    return Score(float(answer == gold.strip()), answer)


def grade_last_box(response: str, gold: str, *, question: str = "", pool: EquivalencePool | None = None) -> Grade:
    r"""1 if what the last `\boxed{}` holds means the same as the gold, by `grade_equivalence`."""
    boxed = last_boxed_only_string(response)
    if boxed is None:
        return Invalid("there is no closed \\boxed{...}")
    return grade_equivalence(remove_boxed(boxed), gold, question=question, pool=pool)


def grade_equivalence(answer: str, gold: str, *, question: str = "", pool: EquivalencePool | None = None) -> Grade:
    r"""Score 1 if an answer is equivalent to the gold: `0.5` is `\frac{1}{2}`, `3+2x` is `2x+3`, `2,1` is `1,2`.

    Equal texts after `normalize_answer`, words and whole numbers are decided here; the rest by the math-verify library
    in a process of `pool` (default: `default_pool()`), within bounds of time and memory. A percent sign in only one
    of the two may be omitted or evaluated: `25\%` is `25` and `0.25`.

    An answer must be fully evaluated, else a policy learns to put the question into the box. Invalid, unless equal to
    the gold as text:
    - if the gold is a plain number, anything but one number: `6\cdot 7`, `2^{10}`;
    - an operation that is absent from the gold: `\int`, `\max`, `\binom`; a function, if the gold has none at all;
    - if the gold is solved for its unknowns (`x=5`, `-7<x<7`), an unsolved equation: `x+1=6`;
    - a number in a base that is absent from the gold, since the library does not support bases: `40_8` for `40_9`;
    - an expression that is contained in `question`: `x^2-1`, if it was to be factored.

    Returns:
        Score; Invalid, also for an answer that is empty, too long, or consists of several numbers; Timeout if the
        comparison exceeds its time; InfraError if no process can be started.
    """
    if len(answer) > max(MAX_ANSWER_CHARACTERS, 2 * len(gold)):
        return Invalid(f"the answer is too long: {len(answer)} characters")
    readable = normalize_answer(answer)
    if not readable:
        return Invalid("the answer is empty")
    if _SIDE_BY_SIDE.search(join_thousands(clean(answer))) and not _SIDE_BY_SIDE.search(join_thousands(clean(gold))):
        return Invalid("the answer has numbers side by side")
    if _read_the_same(answer, gold):
        return Score(1.0, readable)
    if (bare := _strip_parentheses(answer, gold)) is not None:
        return grade_equivalence(bare, gold, question=question, pool=pool)
    if _is_text(gold):
        return Score(float(_normalize_letters(answer) == _normalize_letters(gold)), readable)
    grade = _compare(answer, gold, question, pool)
    if not _is_correct(grade) and (other_reading := _convert_percent(answer, gold)):
        by_value = _compare(*other_reading, question, pool)
        grade = by_value if _is_correct(by_value) else grade
    return Score(grade.value, readable) if isinstance(grade, Score) else grade


def _compare(answer: str, gold: str, question: str, pool: EquivalencePool | None) -> Grade:
    expected = _remove_approximation(_strip_unit(join_thousands(clean(gold))))
    candidate = _remove_names(_strip_unit(join_thousands(clean(answer))), expected)
    if _read_the_same(candidate, expected):
        return Score(1.0)
    if flaw := _find_flaw(candidate, expected, question):
        return Invalid(flaw)
    if _WHOLE.fullmatch(candidate) and _WHOLE.fullmatch(expected):
        return Score(float(int(candidate) == int(expected)))
    return (pool or default_pool()).compare(candidate, expected)


def _is_correct(grade: Grade) -> bool:
    return isinstance(grade, Score) and grade.value == 1.0


_WHOLE = re.compile(r"[+-]?[0-9]{1,1000}")
_PLAIN_NUMBER = re.compile(r"[+-]?(?:[0-9]*\.?[0-9]+|[0-9]*\\frac\{-?[0-9]+\}\{[0-9]+\}|[0-9]+/[0-9]+)")
_WORD_GOLD = re.compile(rf"{TEXT_COMMAND}\s*\{{[^{{}}0-9]*\}}|(?:[A-Z][a-z]{{2}}|[A-Za-z]{{4}})[A-Za-z ]*")
_SIDE_BY_SIDE = re.compile(r"(?<!_)[0-9] +[0-9]+(?![0-9]*/)")
_SEVERAL = re.compile(r"[,;<>]|\b(?:or|and)\b|\\(?:lor|vee|wedge|land)(?![A-Za-z])")
_TRAILING_WORDS = re.compile(r"(?<=[0-9])(?: +[A-Za-z]{2,})+$")
_UNITS = re.compile(rf"(?:{TEXT_COMMAND}|\\operatorname)\s*\{{[^{{}}0-9]*\}}(?:\^(?:\{{[0-9]\}}|[0-9]))?")
_TRAILING_UNITS = re.compile(rf"(?<=[0-9}}])\s*{_UNITS.pattern}$")
_SCIENTIFIC = re.compile(r"(?:\\times|\\cdot|\*) *10 *\^ *(?:\{ *-?[0-9]+ *\}|[0-9])")
_OPERATION = re.compile(r"[+*^!|]|(?<=[\w})]) *[-(]|\\(?!frac(?![A-Za-z]))[A-Za-z]+")
_CALCULATION = re.compile(
    r"\\(?:i*int|oint|sum|prod|lim(?:sup|inf)?|max|min|sup|inf|[dt]?binom|choose|gcd|lcm|det|operatorname|mod|bmod|pmod)"
    r"(?![A-Za-z])|!"
)
_FUNCTION = re.compile(r"\\(?:arc)?(?:sin|cos|tan|cot|sec|csc|log|ln|lg)")
_RELATION = re.compile(r"[=<>]|\\(?:leq?|geq?|lt|gt)(?:slant)?(?![A-Za-z])")
_RELATION_OR_COMMA = re.compile(rf"[,;]|\b(?:or|and)\b|{_RELATION.pattern}")
_BASE = re.compile(r"(?<=[0-9])_(\{[^{}]*\}|.)")
_COMMAND = re.compile(r"\\[A-Za-z]+")
_SYMBOL = re.compile(r"(?:[A-Za-z]|\\[a-z]+)(?:_(?:\w|\{\w+\}))?")
_APPROXIMATION = re.compile(r"(?:[A-Za-z](?:_(?:\w|\{\w+\}))?)?\s*(?:\\(?:approx|simeq)(?![A-Za-z])|≈)\s*")
_PERCENT = re.compile(rf"\\?%|(?:{TEXT_COMMAND}\s*\{{\s*)?\bpercent\b(?:\s*\}})?")
_MIXED_NUMBER = re.compile(r"([+-]?)([0-9]*)\\frac\{([0-9]+)\}\{([0-9]+)\}")


def _read_the_same(answer: str, gold: str) -> bool:
    """Also without thousands separators, which in "100,200" may separate two numbers as well."""
    return any(normalize_answer(form(answer)) == normalize_answer(form(gold)) for form in (str, join_thousands))


def _strip_parentheses(answer: str, gold: str) -> str | None:
    """Return `1,2` of `(1,2)` where the gold is a bare list such as `1,2`; None for anything else."""
    text, expected = clean(answer), clean(gold)
    is_list = "," in join_thousands(expected) and not re.search(r"[(\[{]|\\", expected)
    if is_list and text.startswith("(") and text.endswith(")") and not re.search(r"[()]", text[1:-1]):
        return text[1:-1]
    return None


def _is_text(gold: str) -> bool:
    """Not for algebra, which would take "east" for a product of e, a, s and t."""
    return _WORD_GOLD.fullmatch(clean(gold)) is not None


def _normalize_letters(answer: str) -> str:
    """(C) is C, and Ellipse is ellipse."""
    return normalize_answer(answer).casefold().removeprefix("(").removesuffix(")")


def _strip_unit(text: str) -> str:
    return _TRAILING_UNITS.sub("", text)


def _remove_approximation(text: str) -> str:
    r"""11 of "\approx 11" and of "x \approx 11". The value before the sign counts where there is one."""
    found = _APPROXIMATION.match(text)
    return text[found.end() :] if found else text


def _convert_percent(answer: str, gold: str) -> tuple[str, str] | None:
    r"""Answer and gold where only one of them has a percent sign, read as its value: 25\% is 1/4 as well as 25."""
    fraction, gold_fraction = _parse_percentage(answer), _parse_percentage(gold)
    if (fraction is None) == (gold_fraction is None):
        return None
    return (fraction or answer, gold_fraction or gold)


def _parse_percentage(text: str) -> str | None:
    """Return the value of a lone percentage as a fraction, in LaTeX; None for all else."""
    text = join_thousands(clean(_PERCENT.sub(" percent", text)))
    text = _remove_approximation(text[_find_end_of_last_equality(text) :].strip())
    number = normalize_answer(text.removesuffix("percent"))
    if not text.endswith("percent") or not _PLAIN_NUMBER.fullmatch(number):
        return None
    try:
        value = _parse_fraction(number) / 100
    except (ValueError, ZeroDivisionError):
        return None
    return f"\\frac{{{value.numerator}}}{{{value.denominator}}}"


def _parse_fraction(number: str) -> Fraction:
    """Raises ValueError, ZeroDivisionError."""
    if mixed := _MIXED_NUMBER.fullmatch(number):
        size = int(mixed[2] or 0) + Fraction(int(mixed[3]), int(mixed[4]))
        return -size if mixed[1] == "-" else size
    return Fraction(number)


def _remove_names(answer: str, gold: str) -> str:
    """5 of "area = 5 cm": what follows the last sign of equality, without words after a number. One value only."""
    if "=" not in gold and not _SEVERAL.search(answer):
        answer = _remove_approximation(answer[_find_end_of_last_equality(answer) :].strip())
    return _TRAILING_WORDS.sub("", answer) if _PLAIN_NUMBER.fullmatch(normalize_answer(gold)) else answer


def _find_end_of_last_equality(answer: str) -> int:
    r"""Find the start of the part after the last `=`, ignoring those inside braces and brackets, as in `\sum_{i=1}`."""
    depth = end = 0
    for position, character in enumerate(answer):
        depth += (character in "{([") - (character in "})]")
        if character == "=" and depth == 0:
            end = position + 1
    return end


def _find_flaw(answer: str, gold: str, question: str) -> str | None:
    """Return the reason why an answer cannot count, whatever its value is."""
    if not _find_bases(answer) <= _find_bases(gold):
        return "the answer is in another base"
    if _PLAIN_NUMBER.fullmatch(normalize_answer(gold)):
        found = _OPERATION.search(_SCIENTIFIC.sub("", _UNITS.sub("", answer)))
        return f"the answer is not a plain number, it has {found.group().strip()}" if found else None
    found = next((c for c in _CALCULATION.finditer(answer) if c.group() not in gold), None)
    if found is None and not _FUNCTION.search(gold):
        found = _FUNCTION.search(answer)
    if found is not None:
        return f"the answer is not worked out, it has {found.group()}"
    if _RELATION.search(gold) and _is_solved(gold) and not _is_solved(answer):
        return "the answer is not solved for the unknown"
    readable = normalize_answer(answer)
    if not _PLAIN_NUMBER.fullmatch(readable) and readable in normalize_answer(question):
        return "the answer repeats the question"
    return None


def _find_bases(answer: str) -> set[str]:
    """Return the bases (subscripts of numbers) in an answer."""
    return {base.strip("{}") for base in _BASE.findall(normalize_answer(answer))}


def _is_solved(answer: str) -> bool:
    """Return whether each side of each relation is a lone symbol or has no symbols."""
    sides = (side.strip() for side in _RELATION_OR_COMMA.split(_UNITS.sub("", answer)))
    return all(_SYMBOL.fullmatch(side) or not re.search("[A-Za-z]", _COMMAND.sub("", side)) for side in sides)

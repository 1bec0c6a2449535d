"""Grading of answers to reasoning-gym entries by their generators' `score_answer`, guarded against hostile answers.

Some of those functions evaluate the answer as code, give full marks to answers that are not right, or raise on an
answer of an unexpected form. What a model wrote is only handed to them where that is safe.
"""

import math
import re
from collections.abc import Callable, Mapping

from skyrl_gym.deadline import outcome_of
from skyrl_gym.envs.reasoning_gym.expressions import find_fault, is_literal, names_in
from skyrl_gym.envs.reasoning_gym.integrals import is_antiderivative
from skyrl_gym.envs.reasoning_gym.library import Entry, generator, get_oracle_answer
from skyrl_gym.error import TaskError
from skyrl_gym.graders.results import Grade, Invalid, Score
from skyrl_gym.tags import last_tagged

FULL_SCORE = 1 - 1e-6
"""A score of at least this is a solved task. Answers that are only near get up to 0.99999 from some generators."""

MAX_ANSWER_CHARS = 5000
"""Maximum length of an answer; if larger, four times the length of a correct answer."""

MAX_CHARS_WITHOUT_ORACLE = 20_000

MAX_FORMULA_CHARS = {"propositional_logic": 1000}
"""Maximum length of a formula, by generator: the parser takes time proportional to the cube of the length, half a
minute for 20,000 characters."""

EVALUATED_AS_LITERAL = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
"""Their `score_answer` gives the answer to `eval`."""

FORMULAS = {
    # (parts of the syntax tree, size of exponents)
    "simple_integration": (2000, 100),
    "intermediate_integration": (2000, 100),
    "polynomial_multiplication": (20_000, 100),
    "countdown": (200, 16),
    "puzzle24": (60, 16),
}
"""Their `score_answer` gives the answer to sympy's `parse_expr`, which is `eval`."""

INTEGRALS = frozenset({"simple_integration", "intermediate_integration"})
"""Their `score_answer` has sympy simplify a formula made of the answer, which may take for ever."""

_NOT_FINITE = re.compile(r"\b(nan|inf|infinity)\b", re.IGNORECASE)
_HUGE_NUMBER = re.compile(r"[\s+-]*[\d.,_]*e[+-]?[\d_]{4,}\s*", re.IGNORECASE)


def last_answer(text: str) -> str | None:
    """Extract the last closed `<answer>...</answer>`, or None."""
    answer = last_tagged(text, "answer")
    return None if answer is None else answer.strip()


def grade(name: str, config: Mapping[str, object], entry: Entry, text: str) -> Grade:
    """Return the generator's score, in [0, 1], for the last `<answer>` in the text.

    Raises:
        TaskError: the entry is not one that this generator can judge answers to.
    """
    answer = last_answer(text)
    if answer is None:
        return Invalid("no <answer>...</answer>")
    if not answer and entry["answer"]:
        return Invalid("the answer is empty")
    reason = _find_refusal(name, entry, answer)
    if reason is not None:
        return Invalid(reason)
    rule = OWN_RULES.get(name)
    if rule is not None and not rule(answer, entry):
        return Score(0.0, answer)
    if name in EVALUATED_AS_LITERAL and not is_literal(answer):
        accepted = entry["metadata"].get("valid_answers") or [entry["answer"]]
        return Score(float(answer in [text.strip() for text in accepted]), answer)
    if name in INTEGRALS:
        metadata = entry["metadata"]
        return Score(float(is_antiderivative(answer, metadata["integrand"], metadata["variable"])), answer)
    return _score(name, config, entry, answer)


def _find_refusal(name: str, entry: Entry, answer: str) -> str | None:
    oracle = get_oracle_answer(entry)
    longest = MAX_CHARS_WITHOUT_ORACLE if oracle is None else max(MAX_ANSWER_CHARS, 4 * len(oracle))
    oracle = oracle or ""
    if len(answer) > MAX_FORMULA_CHARS.get(name, longest):
        return f"the answer has {len(answer)} characters"
    if _NOT_FINITE.search(answer) and not _NOT_FINITE.search(oracle):
        return "the answer is not a finite number"  # nan is within any tolerance, to min() and max()
    if _HUGE_NUMBER.fullmatch(answer):
        return "the exponent is too large"
    if name in FORMULAS:
        max_nodes, max_power = FORMULAS[name]
        names = names_in(oracle) | names_in(str(entry["metadata"].get("integrand", "")))
        return find_fault(answer, names, max_nodes, max_power)
    return None


def _score(name: str, config: Mapping[str, object], entry: Entry, answer: str) -> Grade:
    judge = generator(name, config)
    score = outcome_of(lambda: float(judge.score_answer(answer, entry)))
    if isinstance(score, Exception):  # an answer of a form that its author did not think of, or a wrong entry
        failure = outcome_of(judge.score_answer, get_oracle_answer(entry), entry)
        if isinstance(failure, Exception):
            raise TaskError(f"entry cannot be graded by {name}: {failure!r}; keys {', '.join(entry)}") from failure
        return Invalid(f"the answer cannot be read: {score!r:.200}")
    if not 0 <= score <= 1:  # where the relative error to a negative number is rewarded; a right answer has 1
        return Score(0.0, answer, {"raw_score": score if math.isfinite(score) else None})
    return Score(score, answer)


def _is_same_word(answer: str, entry: Entry) -> bool:
    return answer.casefold() == str(entry["answer"]).casefold()


def _has_given_numbers(answer: str, entry: Entry) -> bool:
    return sorted(map(int, re.findall(r"\d+", answer))) == sorted(entry["metadata"]["numbers"])


OWN_RULES: dict[str, Callable[[str, Entry], bool]] = {
    "game_of_life_halting": _is_same_word,  # its own gives 1 to any text
    "puzzle24": _has_given_numbers,  # its own takes any four numbers that make 24
}
"""Additional conditions on an answer, for generators whose `score_answer` accepts too much."""

"""Kinds of questions (instructions and grader) and the kind of each data source."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from skyrl_agent.errors import ConfigError, TaskRowError
from skyrl_agent.tasks.grading import grade_code, grade_em, grade_f1, grade_math, parse_tests_of
from skyrl_agent.tasks.rows import field, golds_of
from skyrl_agent.types import Row
from skyrl_gym.graders import Grade
from skyrl_gym.graders.judge import Judge
from skyrl_gym.suggestions import did_you_mean

GROUND_TRUTHS = ("reward_model.ground_truth", "reward_spec.ground_truth")
ANSWERS = (*GROUND_TRUTHS, "golden_answers")


@dataclass(frozen=True)
class Kind:
    """
    Args:
        gold: what a row expects; raises TaskRowError.
        grade: (answer, gold, question, judge) -> reward.
    """

    system_prompt: str
    gold: Callable[[Row], Any]
    grade: Callable[[str, Any, str, Judge | None], Grade]
    needs_judge: bool = False


def _parse_answers(row: Row) -> list[str]:
    return golds_of(row, *ANSWERS)


def _parse_tests(row: Row) -> Any:
    found = field(row, *GROUND_TRUTHS)
    if found is None:
        raise TaskRowError(f"{' or '.join(GROUND_TRUTHS)} must contain tests; it is missing")
    return parse_tests_of(found)


def _grade_by_judge(text: str, golds: list[str], question: str, judge: Judge | None) -> Grade:
    assert judge is not None
    return judge.grade(question, " or ".join(golds), text)


QA_PROMPT = (
    "You answer questions. Look up what you do not know for certain, one fact at a time, before you answer. When you "
    "are sure, call finish with the answer alone: a name, a date, a number, a few words, no sentence."
)

KINDS = {
    "math": Kind(
        "You solve mathematical problems. Think step by step; compute with a tool where you have one that can. When "
        "you are done, call finish with the result in \\boxed{}.",
        _parse_answers,
        lambda text, golds, question, _: grade_math(text, golds[0], question),
    ),
    "code": Kind(
        "You write Python programs. Try out what you can before you answer. When you are done, call finish with the "
        "whole program in one ```python block; it is run on tests that you do not see.",
        _parse_tests,
        lambda text, tests, *_: grade_code(text, tests),
    ),
    "qa": Kind(QA_PROMPT, _parse_answers, lambda text, golds, *_: grade_em(text, golds)),
    "qa_f1": Kind(QA_PROMPT, _parse_answers, lambda text, golds, *_: grade_f1(text, golds)),
    "browse": Kind(
        "You find things that are hard to find, in a collection of documents. Work in rounds: list what the question "
        "says of the thing it asks for; search for the most telling of these; read what you find and note what it "
        "settles; then search for what is still open. When everything fits, or when you have looked everywhere, call "
        "finish with your answer, how sure you are, and one sentence on what it rests on.",
        _parse_answers,
        _grade_by_judge,
        needs_judge=True,
    ),
    "reading": Kind(
        "You answer a question about a text that is too long to see at once. Use your tools to go through it, keep "
        "what matters for the question, and call finish with the answer alone when the text is at its end.",
        _parse_answers,
        _grade_by_judge,
        needs_judge=True,
    ),
    "judged": Kind(
        "You solve problems with the tools that you have. When you are done, call finish with a complete answer.",
        _parse_answers,
        _grade_by_judge,
        needs_judge=True,
    ),
}

_QA_SETS = ("2wikimultihopqa", "bamboogle", "hotpotqa", "musique", "nq", "popqa", "searchr1", "triviaqa")

SOURCES = {
    "aime": "math",
    "gsm8k": "math",
    "math": "math",
    "torl": "math",
    "codegen": "code",
    **dict.fromkeys(_QA_SETS, "qa"),
    "browsecomp": "browse",
    "ruler": "reading",
}
"""Beginning of a data source, in lower case -> kind. The longest one that fits decides."""


def merge_sources(more: Mapping[str, str] | None) -> dict[str, str]:
    """Return `SOURCES` extended by a task file's sources.

    Raises:
        ConfigError: the kind is unknown.
    """
    for name, kind in (more or {}).items():
        if kind not in KINDS:
            raise ConfigError(f"task_config.sources.{name} must be one of {', '.join(KINDS)}; got {kind!r}")
    return {**SOURCES, **{name.lower(): kind for name, kind in (more or {}).items()}}


def get_kind(data_source: str, sources: Mapping[str, str]) -> Kind:
    """
    Raises:
        TaskRowError: no grader is known for that source.
    """
    name = data_source.lower()
    fitting = [prefix for prefix in sources if name.startswith(prefix)]
    if fitting:
        return KINDS[sources[max(fitting, key=len)]]
    hint = did_you_mean(name, sources, otherwise=f"known prefixes: {', '.join(sorted(sources))}")
    raise TaskRowError(
        f"data source {data_source!r} is unknown; {hint} (data.data_source_key sets the field of rows, "
        f"task_config.sources: {{{data_source}: KIND}} makes it one of {', '.join(KINDS)})"
    )

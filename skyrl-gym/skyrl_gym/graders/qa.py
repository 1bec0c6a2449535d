"""Short answers to questions, compared as question-answering benchmarks compare them.

Normalization, exact match and F1 as in SQuAD (https://arxiv.org/abs/1606.05250); the answer is in `<answer>` tags,
as in Search-R1 (https://arxiv.org/abs/2503.09516).
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from skyrl_gym.graders.results import Grade, Invalid, Score, reward_of
from skyrl_gym.tags import last_tagged

Golds = str | Iterable[str]
"""One accepted answer, or several."""

NO_ANSWER = "there is no <answer>...</answer>"

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_DROP_PUNCTUATION = str.maketrans("", "", string.punctuation)


def extract_solution(solution_str: str) -> str | None:
    """Extract the last `<answer>...</answer>`, stripped, or return None."""
    answer = last_tagged(solution_str, "answer")
    return answer.strip() if answer is not None else None


def normalize_answer(s: str) -> str:
    """Lower case, without ASCII punctuation, without the words a, an and the, with single spaces."""
    return " ".join(_ARTICLES.sub(" ", s.lower().translate(_DROP_PUNCTUATION)).split())


def em_check(prediction: str, golden_answers: Golds) -> int:
    """Return 1 if the prediction equals an accepted answer after normalization, else 0."""
    return int(any(_is_same(prediction, gold) for gold in as_list(golden_answers)))


def subem_check(prediction: str, golden_answers: Golds) -> int:
    """Return 1 if the prediction contains an accepted answer after normalization, else 0.

    It pays for long predictions that hold many guesses: a measure for evaluation, not a reward.
    """
    return int(any(_has_phrase(prediction, gold) for gold in as_list(golden_answers)))


def token_f1(prediction: str, golden_answers: Golds) -> float:
    """Return the best F1, over the accepted answers, of the words that prediction and answer share:

    precision = shared / words of the prediction,  recall = shared / words of the answer,  F1 = 2 P R / (P + R)
    """
    return max(_f1(prediction, gold) for gold in as_list(golden_answers))


def exact_match(prediction: str | None, golden_answers: Golds) -> Grade:
    """Grade with `em_check`: Score 1 or 0, or Invalid without a prediction."""
    return _grade(em_check, prediction, golden_answers)


def substring_match(prediction: str | None, golden_answers: Golds) -> Grade:
    """Grade with `subem_check`: Score 1 or 0, or Invalid without a prediction."""
    return _grade(subem_check, prediction, golden_answers)


def f1(prediction: str | None, golden_answers: Golds) -> Grade:
    """Grade with `token_f1`: a Score from 0 to 1, or Invalid without a prediction."""
    return _grade(token_f1, prediction, golden_answers)


def compute_score(
    solution_str: str,
    ground_truth: Mapping[str, Golds] | Golds,
    method: str = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
) -> float:
    """Score a text by exact match of its last answer: `score` if right, `format_score` if wrong, 0 without one.

    `ground_truth` holds the accepted answers, bare or under `target`. `method` is not read; datasets pass it.
    """
    return _convert_to_score(exact_match(extract_solution(solution_str), _targets(ground_truth)), format_score, score)


def compute_score_subem(
    solution_str: str,
    ground_truth: Mapping[str, Golds] | Golds,
    method: str = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
) -> float:
    """Score as `compute_score` does, but an accepted answer anywhere in the last answer is enough."""
    return _convert_to_score(
        substring_match(extract_solution(solution_str), _targets(ground_truth)), format_score, score
    )


def as_list(golden_answers: Golds) -> list[str]:
    """Convert accepted answers (a text, a list or an array) to a list."""
    answers = [golden_answers] if isinstance(golden_answers, str) else [str(gold) for gold in golden_answers]
    if not answers:
        raise ValueError("golden_answers must contain at least one answer; it is empty")
    return answers


def _is_same(prediction: str, gold: str) -> bool:
    normalized = normalize_answer(gold)
    if not normalized:  # an answer such as "A" or "%": normalization leaves nothing, which any empty answer would match
        return _plain(prediction) == _plain(gold)
    return normalize_answer(prediction) == normalized


def _has_phrase(prediction: str, gold: str) -> bool:
    normalized = normalize_answer(gold)
    return normalized in normalize_answer(prediction) if normalized else _plain(prediction) == _plain(gold)


def _plain(text: str) -> str:
    return " ".join(text.lower().split())


def _f1(prediction: str, gold: str) -> float:
    predicted, expected = normalize_answer(prediction).split(), normalize_answer(gold).split()
    if not predicted or not expected:
        return float(_is_same(prediction, gold))
    shared = (Counter(predicted) & Counter(expected)).total()
    # 2 P R / (P + R) with both fractions multiplied out: no division by zero, and equal answers give 1.0 exactly
    return 2 * shared / (len(predicted) + len(expected))


def _grade(measure: Callable[[str, Golds], float], prediction: str | None, golden_answers: Golds) -> Grade:
    if prediction is None:
        return Invalid(NO_ANSWER)
    golds = as_list(golden_answers)
    details: dict[str, object] = {"golden_answers": golds}
    return Score(float(measure(prediction, golds)), prediction=normalize_answer(prediction), details=details)


def _targets(ground_truth: Mapping[str, Golds] | Golds) -> Golds:
    return ground_truth["target"] if isinstance(ground_truth, Mapping) else ground_truth


def _convert_to_score(grade: Grade, format_score: float, score: float) -> float:
    if isinstance(grade, Invalid):
        return 0.0
    return score if reward_of(grade) == 1.0 else format_score

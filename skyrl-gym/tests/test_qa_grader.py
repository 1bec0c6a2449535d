"""Short answers, compared as question-answering benchmarks do."""

import gzip
import json

import pytest

from skyrl_gym.envs.search import utils
from skyrl_gym.graders import Invalid, Score, reward_of
from skyrl_gym.graders.qa import (
    compute_score,
    compute_score_subem,
    em_check,
    exact_match,
    extract_solution,
    f1,
    normalize_answer,
    subem_check,
    substring_match,
    token_f1,
)


@pytest.mark.parametrize(
    "text, expected",
    [
        ("The  Quick-Brown\nFox!", "quickbrown fox"),
        ("An apple a day", "apple day"),
        ("theatre", "theatre"),  # begins with an article, is none
        ("Zürich", "zürich"),
        ("the", ""),
    ],
)
def test_normalization_drops_case_punctuation_articles_and_spare_space(text, expected):
    assert normalize_answer(text) == expected


@pytest.mark.parametrize(
    "text, expected",
    [
        ("<answer> Paris </answer>", "Paris"),
        ("<answer>Lyon</answer> no: <answer>Paris</answer>", "Paris"),
        ("<answer>two\nlines</answer>", "two\nlines"),
        ("<answer></answer>", ""),
        ("<answer>never closed", None),
        ("Paris", None),
    ],
)
def test_last_answer_is_graded(text, expected):
    assert extract_solution(text) == expected


@pytest.mark.parametrize(
    "prediction, golds, exact, contained",
    [
        ("the Eiffel Tower.", "Eiffel Tower", 1, 1),
        ("Eiffel", "Eiffel Tower", 0, 0),
        ("It is the Eiffel Tower", "Eiffel Tower", 0, 1),
        ("41", ["forty-one", "41"], 1, 1),
        ("", "Paris", 0, 0),
        # What normalization leaves nothing of is compared as it stands, and not with every empty answer.
        ("", "A+", 0, 0),
        ("the", "A+", 0, 0),
        ("a+", "A+", 1, 1),
        ("Paris", "---", 0, 0),
    ],
)
def test_exact_and_contained_matches(prediction, golds, exact, contained):
    assert em_check(prediction, golds) == exact
    assert subem_check(prediction, golds) == contained


@pytest.mark.parametrize(
    "prediction, golds, expected",
    [
        ("Eiffel Tower", "the Eiffel tower", 1.0),
        ("Eiffel Tower Paris", "Eiffel Tower", 0.8),  # P 2/3, R 1
        ("tower tower", "tower", 2 / 3),  # a word counts once: P 1/2, R 1
        ("Rome", "Paris", 0.0),
        ("Rome", ["Paris", "Rome Italy"], 2 / 3),  # the best of several
        ("", "Paris", 0.0),
    ],
)
def test_f1_of_shared_words(prediction, golds, expected):
    assert token_f1(prediction, golds) == pytest.approx(expected)


def test_grades_are_typed():
    assert exact_match("The Hague", "hague") == Score(1.0, "hague", {"golden_answers": ["hague"]})
    assert substring_match("it is hague", ["hague"]).value == 1.0
    assert f1("hague city", "hague").value == pytest.approx(2 / 3)
    missing = exact_match(None, "hague")
    assert isinstance(missing, Invalid) and "<answer>" in missing.reason and reward_of(missing) == 0.0


def test_empty_answer_list_raises():
    with pytest.raises(ValueError, match="at least one answer"):
        exact_match("x", [])


def test_scores_of_texts():
    truth = {"target": ["Paris"]}
    assert compute_score("<answer>paris</answer>", truth) == 1.0
    assert compute_score("<answer>Rome</answer>", truth, format_score=0.1) == 0.1
    assert compute_score("Paris", truth, format_score=0.1) == 0.0
    assert compute_score("<answer>paris</answer>", truth, score=5.0) == 5.0
    assert compute_score("<answer>in Paris</answer>", truth) == 0.0
    assert compute_score_subem("<answer>in Paris</answer>", truth) == 1.0
    assert utils.compute_score is compute_score


def test_every_gold_answer_of_nq_and_xquad_matches_itself(test_data):
    answers = []
    for name in ("nq_open_dev", "xquad_en"):
        with gzip.open(test_data / "search_qa" / f"{name}.jsonl.gz", "rt") as lines:
            answers += [answer for line in lines for answer in json.loads(line)["answers"]]
    assert len(answers) > 7000
    assert all(em_check(answer, answer) and subem_check(answer, answer) for answer in answers)
    assert {token_f1(answer, answer) for answer in answers} == {1.0}
    assert sum(em_check("", answer) for answer in answers) == 0

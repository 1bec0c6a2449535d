import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

import skyrl_gym
from skyrl_gym.envs.gsm8k.utils import compute_score, extract_solution

DEFAULT_DATA = Path(__file__).parents[3] / "shared" / "data"
GSM8K = Path(os.environ.get("SKYRL_TEST_DATA", DEFAULT_DATA)) / "gsm8k"
needs_data = pytest.mark.skipif(
    not GSM8K.is_dir(), reason="GSM8K is not there; set SKYRL_TEST_DATA to its parent folder"
)


def read_rows(name):
    with gzip.open(GSM8K / name, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


@pytest.mark.parametrize(
    "text, strict, flexible",
    [
        ("so it is\n#### 42", "42", "42"),
        ("#### -7", "-7", "-7"),
        ("#### 1,234", "1234", "1234"),
        ("#### 42.", "42.", "42."),  # the full stop belongs to the number
        ("#### $42", None, "42"),
        ("####42", None, "42"),
        ("#### 1 and then #### 2", "1", "2"),  # the first one counts
        ("first 3, then 5 .", None, "5"),
        ("no number", None, None),
    ],
)
def test_the_answer_is_what_follows_four_hashes(text, strict, flexible):
    assert extract_solution(text) == strict
    assert extract_solution(text, "flexible") == flexible


def test_scores_of_right_wrong_and_unformatted_answers():
    assert compute_score("#### 42", "42") == 1.0
    assert compute_score("#### 41", "42") == 0.0
    assert compute_score("#### 41", "42", format_score=0.1) == 0.1
    assert compute_score("42", "42", format_score=0.1) == 0.0
    assert compute_score("#### 42.0", "42") == 0.0  # compared as text
    with pytest.raises(ValueError, match="strict or flexible"):
        extract_solution("#### 1", "loose")  # type: ignore[arg-type]


@pytest.mark.parametrize("answer, reward", [("#### 42", 1.0), ("#### 41", 0.0), ("it is 42", 0.0)])
def test_the_environment_grades_one_turn(answer, reward):
    env = skyrl_gym.make("gsm8k", env_config={}, extras={"reward_spec": {"method": "rule", "ground_truth": "42"}})
    assert env.step(answer) == {"observations": [], "reward": reward, "done": True, "metadata": {}}


def test_a_row_without_an_answer_is_refused():
    with pytest.raises(AssertionError, match="reward_spec field is required"):
        skyrl_gym.make("gsm8k", env_config={}, extras={})
    with pytest.raises(AssertionError, match="ground_truth is required in reward_spec field"):
        skyrl_gym.make("gsm8k", env_config={}, extras={"reward_spec": {}})


@needs_data
@pytest.mark.parametrize("name, rows", [("train", 7473), ("test", 1319)])
def test_every_published_solution_scores_one(name, rows):
    solutions = read_rows(f"{name}.jsonl.gz")
    assert len(solutions) == rows
    assert sum(compute_score(row["answer"], row["final"]) for row in solutions) == rows


@needs_data
def test_scores_of_real_model_solutions_agree_with_their_published_labels():
    """Their last line reads "A: 18" instead of "#### 18"; 2,001 of 5,276 are labelled right."""
    solutions = read_rows("model_solutions.jsonl.gz")
    expected = [row["ground_truth"].rpartition("A: ")[2].replace(",", "") for row in solutions]
    answers = [row["response"].replace("A: ", "#### ") for row in solutions]
    scores = [compute_score(answer, truth) for answer, truth in zip(answers, expected, strict=True)]
    assert scores == [float(row["is_correct"]) for row in solutions]
    assert sum(scores) == 2001


def multi_turn(**extras) -> Any:
    extras = {"reward_spec": {"ground_truth": "42"}} | extras
    return skyrl_gym.make("gsm8k_multi_turn", env_config={}, extras=extras)


def test_a_turn_with_a_wrong_answer_earns_its_share_of_the_format_score():
    env = multi_turn(max_turns=4)
    first, second = env.step("#### 41"), env.step("no idea")
    assert (first["reward"], first["done"]) == (0.05, False)  # 0.2 / 4
    assert (second["reward"], second["done"]) == (0.0, False)
    third = env.step("#### 40")
    assert "last turn" in third["observations"][0]["content"] and "last turn" not in first["observations"][0]["content"]
    last = env.step("#### 42")
    assert (last["reward"], last["done"], last["observations"]) == (1.0, True, [])
    assert env.get_metrics() == {"steps": 4}


def test_the_right_answer_ends_the_episode_early_and_the_last_turn_ends_it_anyway():
    assert multi_turn(max_turns=3).step("#### 42")["done"] is True
    env = multi_turn(max_turns=1)
    assert env.step("#### 41") == {"observations": [], "reward": 0.2, "done": True, "metadata": {}}


def test_where_the_number_of_turns_comes_from():
    assert multi_turn().max_turns == 5
    assert multi_turn(extra_info={"max_turns": 3}).max_turns == 3
    assert multi_turn(extra_info={"max_turns": 3}, max_turns=2).max_turns == 2
    assert multi_turn(extra_info=None).max_turns == 5

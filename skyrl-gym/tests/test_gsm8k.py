import gzip
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import skyrl_gym
from skyrl_gym.envs.gsm8k.utils import compute_score, extract_solution
from skyrl_gym.graders import Invalid, Score
from skyrl_gym.graders.math import grade_number


def read_rows(folder, name):
    with gzip.open(folder / "gsm8k" / name, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def step(ground_truth, action) -> Any:
    extras = {"reward_spec": {"method": "rule", "ground_truth": ground_truth}}
    return skyrl_gym.make("gsm8k", env_config={}, extras=extras).step(action)


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
def test_answer_follows_four_hashes(text, strict, flexible):
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
def test_environment_grades_single_turn(answer, reward):
    env = skyrl_gym.make("gsm8k", env_config={}, extras={"reward_spec": {"method": "rule", "ground_truth": "42"}})
    assert env.step(answer) == {"observations": [], "reward": reward, "done": True, "metadata": {}}


@pytest.mark.parametrize("ground_truth", ["1,234", 1234, " 1234 "])
def test_ground_truth_accepts_usual_number_formats(ground_truth):
    assert step(ground_truth, "#### 1,234")["reward"] == 1.0


@given(st.text(st.sampled_from("#0159.,-$ \n") | st.characters()))
def test_any_text_is_graded(text):
    for strict in (True, False):
        grade = grade_number(text, "42", strict=strict)
        assert isinstance(grade, Invalid) or (isinstance(grade, Score) and grade.value in (0.0, 1.0))


@pytest.mark.parametrize(
    "name, rows, every",
    [
        pytest.param("train", 7473, 10, id="a tenth of train"),
        pytest.param("test", 1319, 10, id="a tenth of test"),
        pytest.param("train", 7473, 1, id="train", marks=pytest.mark.full),
        pytest.param("test", 1319, 1, id="test", marks=pytest.mark.full),
    ],
)
def test_published_solutions_earn_reward(test_data, name, rows, every):
    solutions = read_rows(test_data, f"{name}.jsonl.gz")
    assert len(solutions) == rows
    assert [row["id"] for row in solutions[::every] if step(row["final"], row["answer"])["reward"] != 1.0] == []


def test_scores_of_real_model_solutions_agree_with_their_published_labels(test_data):
    """Their last line reads "A: 18" instead of "#### 18"; 2,001 of 5,276 are labelled right."""
    solutions = read_rows(test_data, "model_solutions.jsonl.gz")
    labels = [float(row["is_correct"]) for row in solutions]
    truths = [row["ground_truth"].rpartition("A: ")[2].replace(",", "") for row in solutions]
    last_numbers = [
        compute_score(row["response"], truth, method="flexible") for row, truth in zip(solutions, truths, strict=True)
    ]
    after_hashes = [
        compute_score(row["response"].replace("A: ", "#### "), truth)
        for row, truth in zip(solutions, truths, strict=True)
    ]
    assert last_numbers == after_hashes == labels
    assert sum(labels) == 2001


def multi_turn(**extras) -> Any:
    extras = {"reward_spec": {"ground_truth": "42"}} | extras
    return skyrl_gym.make("gsm8k_multi_turn", env_config={}, extras=extras)


def test_wrong_turn_earns_fraction_of_format_score():
    env = multi_turn(max_turns=4)
    first, second = env.step("#### 41"), env.step("no idea")
    assert (first["reward"], first["done"]) == (0.05, False)  # 0.2 / 4
    assert (second["reward"], second["done"]) == (0.0, False)
    third = env.step("#### 40")
    assert "last turn" in third["observations"][0]["content"] and "last turn" not in first["observations"][0]["content"]
    last = env.step("#### 42")
    assert (last["reward"], last["done"], last["observations"]) == (1.0, True, [])
    assert env.get_metrics() == {"steps": 4, "outcome_reward": 1.0}  # without the first turn's 0.05


def test_metrics_of_several_episodes():
    solved, failed = multi_turn(max_turns=2), multi_turn(max_turns=2)
    for env, answer in ((solved, "#### 42"), (failed, "#### 1"), (failed, "#### 2")):
        env.step(answer)
    aggregate = type(solved).aggregate_metrics
    assert aggregate([solved.get_metrics(), failed.get_metrics()]) == {"avg_steps": 1.5, "outcome_reward": 0.5}
    assert aggregate([]) == {}


def test_correct_answer_or_last_turn_ends_episode():
    env = multi_turn(max_turns=3)
    assert env.step("#### 42")["done"] is True
    assert env.step("#### 41")["done"] is True
    assert env.get_metrics()["outcome_reward"] == 1.0  # it stays solved
    env = multi_turn(max_turns=1)
    assert env.step("#### 41") == {"observations": [], "reward": 0.2, "done": True, "truncated": True, "metadata": {}}


def test_max_turns_is_read_from_row_then_extra_info_then_default():
    assert multi_turn().max_turns == 5
    assert multi_turn(extra_info={"max_turns": 3}).max_turns == 3
    assert multi_turn(extra_info={"max_turns": 3}, max_turns=2).max_turns == 2
    assert multi_turn(extra_info=None).max_turns == 5

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import skyrl_gym
from skyrl_gym.envs.aime.utils import compute_score, is_correct_minerva, is_correct_strict_box, verify
from skyrl_gym.graders.math import last_boxed_only_string, normalize_final_answer, remove_boxed


def step(ground_truth, action) -> Any:
    extras = {"reward_model": {"method": "rule", "ground_truth": ground_truth}}
    return skyrl_gym.make("aime", env_config={}, extras=extras).step(action)


@pytest.mark.parametrize(
    "action, ground_truth, reward",
    [
        ("Answer: 42", "42", 1.0),
        (r"Answer: \boxed{42}", "42", 1.0),
        ("answer :  42", "42", 1.0),
        ("Answer: 41\nAnswer: 42", "42", 1.0),  # the last one counts
        ("Answer: 42\nAnswer: 41", "42", -1.0),
        ("Answer: 42<|im_end|>", "42", 1.0),
        ("Answer: 42im_end|>", "42", -1.0),
        (r"Answer: \boxed{\frac{1}{2}}", r"\frac{1}{2}", 1.0),
        (r"Answer: \boxed{0.5}", r"\frac{1}{2}", -1.0),  # compared as text
        ("It is 42.", "42", -1.0),
        (r"\boxed{42}", "42", -1.0),
        ("Answer: 1, 2, 3, 42", "42", -1.0),
        ("Answer: 42" + " and so on" * 30, "42", -1.0),  # more than 300 characters from the end
    ],
)
def test_last_answer_line_is_rewarded_plus_or_minus_one(action, ground_truth, reward):
    output = step(ground_truth, action)
    assert (output["reward"], output["done"], output["observations"]) == (reward, True, [])
    assert output["metadata"]["acc"] is (reward == 1.0)


def test_metadata_has_prediction_and_missing_column_is_named():
    assert step("42", "Answer: $41$ apples")["metadata"] == {"acc": False, "pred": "41"}
    assert step("42", "no idea")["metadata"] == {"acc": False, "pred": "[INVALID]"}
    assert step("[INVALID]", "no idea")["reward"] == -1.0
    with pytest.raises(AssertionError, match="reward_model"):
        skyrl_gym.make("aime", env_config={}, extras={"reward_spec": {"ground_truth": "42"}})
    with pytest.raises(AssertionError, match="ground_truth"):
        skyrl_gym.make("aime", env_config={}, extras={"reward_model": {}})


@pytest.mark.parametrize(
    "answer, normal",
    [
        ("1,000", "1000"),
        ("x = 5", "5"),
        (r"\frac12", r"\frac{1}{2}"),
        (r"\sqrt2", r"\sqrt{2}"),
        ("$3$ apples", "3"),
        ("an apple", "apple"),
        (r"12 \text{ cm}^2", "12"),
        (r"90^\circ", "90"),
        (r"\textbf{(B)}", "(B)"),
        (r"\boxed{\frac{3}{4}}", r"\frac{3}{4}"),
        (r"\$5.50", "5.50"),
        ("3 hours", "3"),
        (r"21\mathrm{th}", "21"),
        ("1{,}234", "1234"),
    ],
)
def test_normalised_answers(answer, normal):
    assert normalize_final_answer(answer) == normal
    assert normalize_final_answer(normal) == normal


def test_strict_box_is_compared_exactly_near_end_of_text():
    assert is_correct_strict_box(r"so \boxed{41} or \boxed{42}", "42") == (1, "42")
    assert is_correct_strict_box(r"\boxed{42.0}", "42") == (-1, "42.0")
    assert is_correct_strict_box(r"\boxed{42}" + " " * 100, "42") == (-1, None)
    assert is_correct_strict_box(r"\boxed{42}" + " " * 100, "42", pause_tokens_index=[3, 5, 8, 12]) == (1, "42")
    assert verify(r"\boxed{42}", "42", strict_box_verify=True) == (True, "42")
    assert compute_score(r"\boxed{7}", "42", strict_box_verify=True) == {"score": -1.0, "acc": False, "pred": "7"}
    # A gold may be the box of a whole solution.
    assert is_correct_minerva("Answer: 42", r"6 times 7 is \boxed{42}", gt_need_extract=True) == (True, "42")
    assert is_correct_minerva("Answer: 42", "no box", gt_need_extract=True) == (False, "42")


def test_boxes_are_found_by_their_braces():
    assert last_boxed_only_string(r"\boxed{1} and \boxed{\frac{1}{2}}.") == r"\boxed{\frac{1}{2}}"
    assert last_boxed_only_string(r"\boxed{1} and \boxed{2") is None
    assert last_boxed_only_string("no box") is None
    assert remove_boxed(r"\boxed{\frac{1}{2}}") == r"\frac{1}{2}"
    with pytest.raises(AssertionError, match="not a"):
        remove_boxed("42")


@given(st.text(st.sampled_from("Answer: \\boxed{}$=frac,text123") | st.characters()), st.text())
def test_any_text_is_right_or_wrong(text, gold):
    assert compute_score(text, gold)["score"] in (1.0, -1.0)
    assert compute_score(text, gold, strict_box_verify=True)["score"] in (1.0, -1.0)

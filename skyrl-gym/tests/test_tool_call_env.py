import json

import pytest

import skyrl_gym
from skyrl_gym.datasets.function_calls import bfcl_row, load_accepted_calls
from skyrl_gym.episode import run_episode
from skyrl_gym.error import TaskError
from skyrl_gym.graders.function_calls import grade_calls

AREA = {"area": {"base": [10], "height": [5], "unit": ["cm", ""]}}


def called(*calls):
    texts = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls]
    return "".join(f"<tool_call>\n{text}\n</tool_call>\n" for text in texts)


def play(row, text):
    extras = {name: value for name, value in row.items() if name not in ("prompt", "env_class")}
    return run_episode(skyrl_gym.make("tool_call", extras=extras), row["prompt"], lambda _: text)


@pytest.mark.parametrize(
    "arguments, score",
    [
        ({"base": 10, "height": 5}, 1.0),  # `unit` may be left out: one of its values is ""
        ({"base": 10.0, "height": 5, "unit": "CM"}, 1.0),
        ({"base": 10}, 0.0),
        ({"base": 10, "height": 6}, 0.0),
        ({"base": "10", "height": 5}, 0.0),  # a text is no number
        ({"base": True, "height": 5}, 0.0),
        ({"base": 10, "height": 5, "unit": "mm"}, 0.0),
        ({"base": 10, "height": 5, "units": "cm"}, 0.0),  # no such argument
    ],
)
def test_arguments_must_have_accepted_values(arguments, score):
    assert grade_calls([("area", arguments)], [AREA]).value == score


@pytest.mark.parametrize(
    "accepted, given, score",
    [
        ("San Francisco, CA", "san francisco CA", 1.0),
        ("a 'b'", 'A "b"', 1.0),
        ("-", "", 0.0),
        (1, True, 0.0),
        (True, 1, 0.0),
        (None, None, 1.0),
        ([1, "Two"], [1, "two"], 1.0),
        ([1, 2], [2, 1], 0.0),
        ([1, 2], [1], 0.0),
        ({"x": [1, 2], "y": [3, ""]}, {"x": 2}, 1.0),
        ({"x": [1, 2]}, {"x": 2, "z": 0}, 0.0),
        ([{"x": [1]}], [{"x": 1}], 1.0),
        ({"x": [1]}, "x", 0.0),
    ],
)
def test_values_are_compared_by_kind(accepted, given, score):
    assert grade_calls([("f", {"v": given})], [{"f": {"v": [accepted]}}]).value == score


def test_calls_match_in_any_order_and_each_once():
    """The first call fits both expected ones, the second only the first: a greedy matching would fail."""
    expected = [{"f": {"v": [1, 2]}}, {"f": {"v": [1]}}]
    one, two = ("f", {"v": 1}), ("f", {"v": 2})
    assert grade_calls([one, two], expected).value == grade_calls([two, one], expected).value == 1.0
    assert grade_calls([two, two], expected).value == 0.0
    assert grade_calls([one], expected).value == grade_calls([one, two, two], expected).value == 0.0
    assert grade_calls([("g", {"v": 1}), two], expected).value == 0.0


def problem(name, **columns):
    function = {
        "name": "area",
        "description": "Area of a triangle.",
        "parameters": {
            "type": "dict",
            "properties": {
                "base": {"type": "float"},
                "height": {"type": "float"},
                "type": {"type": "any"},
                "points": {"type": "tuple", "items": {"type": "integer"}},
            },
            "required": ["base"],
        },
    }
    question = [[{"role": "user", "content": "How large is a triangle of base 10 and height 5?"}]]
    return {"id": name, "question": question, "function": [function]} | columns


def test_published_problem_becomes_solvable_row():
    row = bfcl_row(problem("simple_0"), "test", 0, {"simple_0": [AREA]})
    assert (row["data_source"], row["env_class"]) == ("bfcl_simple", "tool_call")
    system, user = row["prompt"]
    assert user["content"].startswith("How large")
    (line,) = [line for line in system["content"].splitlines() if line.startswith('{"name": "area"')]
    schema = json.loads(line)["parameters"]
    assert schema["type"] == "object" and schema["properties"]["base"] == {"type": "number"}
    assert schema["properties"]["points"] == {"type": "array", "items": {"type": "integer"}}
    assert schema["properties"]["type"] == {}  # an argument of this name, of any type
    right = called(("area", {"base": 10, "height": 5}))
    assert play(row, f"<think>easy</think>{right}").outcome_reward == 1.0
    assert play(row, f"<think>{right}").outcome_reward == 0.0
    assert play(row, "It is 25.").outcome_reward == 0.0
    malformed = play(row, right + "<tool_call>{</tool_call>")
    assert (malformed.outcome_reward, malformed.metrics["well_formed"]) == (0.0, False)


@pytest.mark.parametrize(
    "text, reward",
    [("None of my functions can do it.", 1.0), (called(("area", {"base": 10})), 0.0), ("<tool_call>", 0.0)],
)
def test_irrelevance_row_expects_no_call(text, reward):
    assert play(bfcl_row(problem("live_irrelevance_3"), "test", 0), text).outcome_reward == reward


def test_problem_system_message_precedes_functions():
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "?"}]
    row = bfcl_row(problem("irrelevance_0", question=[messages]), "test", 0)
    assert [message["role"] for message in row["prompt"]] == ["system", "user"]
    assert row["prompt"][0]["content"].startswith("Be brief.\n\nYou can call")


def test_answers_are_read_from_sibling_folder(tmp_path):
    (tmp_path / "possible_answer").mkdir()
    line = json.dumps({"id": "simple_0", "ground_truth": [AREA]})
    (tmp_path / "possible_answer" / "BFCL_v3_simple.json").write_text(line + "\n")
    assert load_accepted_calls(tmp_path / "BFCL_v3_simple.json") == {"simple_0": [AREA]}
    assert load_accepted_calls(tmp_path / "BFCL_v3_parallel.json") == {}


@pytest.mark.parametrize(
    "columns, text",
    [
        ({}, "simple_0"),
        ({"question": [[], []]}, "simple_0"),
        ({"function": None}, "no column function"),
    ],
)
def test_unplayable_problem_is_named(columns, text):
    with pytest.raises(TaskError, match=text):
        bfcl_row(problem("simple_0", **columns), "test", 0)


@pytest.mark.parametrize("ground_truth", ["{", "7", [{}], [{"f": {"v": 1}}], [{"f": {}, "g": {}}], None])
def test_invalid_ground_truth_error_names_rule(ground_truth):
    with pytest.raises(TaskError, match=r"must be a list of calls"):
        skyrl_gym.make("tool_call", extras={"reward_spec": {"ground_truth": ground_truth}})

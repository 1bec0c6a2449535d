import time
from typing import Any

import pytest

import skyrl_gym
from skyrl_gym.envs.arithmetic.problems import make_problems
from skyrl_gym.envs.calculator.problems import make_problems as make_calculator_problems


def make(env_id, ground_truth, **extras) -> Any:
    extras = {"reward_spec": {"method": "rule", "ground_truth": ground_truth}} | extras
    return skyrl_gym.make(env_id, env_config={}, extras=extras)


@pytest.mark.parametrize(
    "action, reward",
    [
        ("7+8=15, 3+4+1=8 <answer>85</answer>", 1.0),
        ("<answer> 85 </answer>", 1.0),
        ("<answer>58</answer> no: <answer>85</answer>", 1.0),  # the last one counts
        ("<answer>85</answer> no: <answer>58</answer>", 0.0),
        ("<answer>085</answer>", 0.0),
        ("<answer></answer>", 0.0),
        ("85", 0.0),
        ("<answer>8,5</answer>", 1.0),  # as a separator of thousands
    ],
)
def test_arithmetic_grades_last_answer_tag(action, reward):
    env = make("arithmetic", "85")
    output = env.step(action)
    assert (output["reward"], output["done"], output["observations"]) == (reward, True, [])
    assert env.get_metrics() == {"answered": "<answer>" in action}


def test_problems_follow_dataset_contract_and_gold_earns_reward():
    rows = make_problems(100, num_digits=2, operators="+-*", seed=1)
    assert set(rows[0]) == {"prompt", "env_class", "data_source", "reward_spec", "extra_info"}
    for row in rows:
        problem, truth = row["extra_info"]["problem"], row["reward_spec"]["ground_truth"]
        assert row["prompt"][0]["content"].startswith(problem + " ")
        assert eval(problem) == int(truth)  # a test may
        extras = {key: value for key, value in row.items() if key not in ("prompt", "env_class")}
        env = skyrl_gym.make(row["env_class"], env_config={}, extras=extras)
        assert env.step(f"<answer>{truth}</answer>")["reward"] == 1.0


def test_problems_are_deterministic_and_impossible_args_rejected():
    assert make_problems(5, 2, "+", seed=3) == make_problems(5, 2, "+", seed=3)
    assert make_problems(5, 2, "+", seed=3) != make_problems(5, 2, "+", seed=4)
    bare = make_problems(1, 3, "-", seed=0, instruction="")[0]
    assert bare["prompt"] == [{"role": "user", "content": bare["extra_info"]["problem"]}]
    assert {len(part) for part in bare["extra_info"]["problem"].split("-")} == {3}
    for arguments in ({"operators": "/"}, {"operators": ""}, {"num_digits": 0}):
        with pytest.raises(ValueError, match="operators among"):
            make_problems(1, **arguments)
    row = make_calculator_problems(1, seed=0)[0]
    assert row["env_class"] == "calculator" and "<calculator>" in row["prompt"][0]["content"]
    assert "*" in row["extra_info"]["problem"]


def test_calculator_returns_result_then_grades_answer():
    env = make("calculator", "1776", max_turns=2)
    call = env.step("<calculator>37*48</calculator>")
    assert call["observations"] == [{"role": "user", "content": "<result>1776</result>"}]
    assert (call["reward"], call["done"]) == (0.0, False)
    answer = env.step("<answer>1776</answer>")
    assert (answer["reward"], answer["done"], answer["observations"]) == (1.0, True, [])
    assert env.get_metrics() == {"turns": 2, "calculator_calls": 1}


def test_last_turn_ends_episode_without_answer():
    env = make("calculator", "1776", max_turns=1)
    output = env.step("<calculator>37*48</calculator>")
    assert (output["reward"], output["done"], output["observations"]) == (0.0, True, [])
    assert output["truncated"]
    assert env.get_metrics() == {"turns": 1, "calculator_calls": 0}


@pytest.mark.parametrize(
    "action, reply",
    [
        ("<calculator>1/0</calculator>", "<result>error: division by zero</result>"),
        ("<calculator>open('x')</calculator>", "<result>error: only numbers"),
        ("let me think", "inside <calculator> tags"),
    ],
)
def test_invalid_call_returns_error_and_episode_continues(action, reply):
    output = make("calculator", "1", max_turns=3).step(action)
    assert not output["done"]
    assert reply in output["observations"][0]["content"]


def test_multiply_rewards_over_two_turns():
    env = make("multiply", "144", max_turns=2)
    first = env.step(r"\boxed{143}")
    assert (first["reward"], first["done"], first["metadata"]) == (0.0, False, {"parsed_answer": "143"})
    assert "143 is not right" in first["observations"][0]["content"]
    last = env.step(r"so \boxed{144}")
    assert (last["reward"], last["done"], last["truncated"]) == (1.0, True, False)
    assert env.get_metrics() == {"turns": 2, "outcome_reward": 1.0}


@pytest.mark.parametrize(
    "action, reward, answer",
    [
        (r"\boxed{144}", 1.0, "144"),
        (r"\boxed{143}", 0.5, "143"),
        (" ".join(rf"\boxed{{{number}}}" for number in range(100, 200)), 0.5, "100"),  # listing products does not help
        *[(action, 0.0, None) for action in ("144", r"\boxed{}", r"\boxed{ }", r"\boxed{{144}}", r"\boxed{144")],
    ],
)
def test_multiply_rewards_half_for_wrong_box_in_last_turn(action, reward, answer):
    env = make("multiply", "144", max_turns=1)
    output = env.step(action)
    assert (output["reward"], output["done"], output["observations"]) == (reward, True, [])
    assert (output["truncated"], output["metadata"]) == (reward != 1.0, {"parsed_answer": answer})
    assert env.get_metrics()["outcome_reward"] == float(reward == 1.0)


def test_multiply_asks_for_box_truncates_quotes_and_has_five_turns():
    env = make("multiply", 144)
    assert env.max_turns == 5
    assert "no answer" in env.step("hm")["observations"][0]["content"]
    assert len(env.step(rf"\boxed{{{'1' * 100_000}}}")["observations"][0]["content"]) < 300


def test_unclosed_tags_are_parsed_fast():
    """A regular expression would try each of them to the end of the text: hours."""
    for env_id, tag in (("arithmetic", "<answer>"), ("calculator", "<calculator>")):
        started = time.process_time()
        make(env_id, "1").step(tag * 200_000)
        assert time.process_time() - started < 2.0

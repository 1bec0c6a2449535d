"""A wrong row names the field and the rule; a wrong action is answered, never an exception."""

import pytest

import skyrl_gym
from skyrl_gym.error import TaskError

ANSWER = {"reward_spec": {"method": "rule", "ground_truth": "4"}}


@pytest.mark.parametrize(
    "env_id, row, text",
    [
        ("aime", ANSWER, "reward_model"),
        ("lcb", {"reward_spec": {"ground_truth": "[]"}}, "at least one test"),
        ("multiply", ANSWER | {"max_turns": 0}, "max_turns"),
        ("rlm", ANSWER | {"extra_info": "none"}, "extra_info"),
    ],
)
def test_invalid_row_error_names_field_and_rule(env_id, row, text):
    with pytest.raises(TaskError, match=text):
        env = skyrl_gym.make(env_id, extras=row)
        env.init([{"role": "user", "content": "?"}])  # some read the rest of the row here


@pytest.mark.parametrize(
    "env_id, action, told",
    [
        ("text2sql", "I do not know.", "Your previous action is invalid"),
        ("text2sql", "<sql>DROP TABLE shop</sql>", "Error executing SQL"),
        ("text2sql", "<sql>SELEC</sql>", "Error executing SQL"),
        ("calculator", "6*7", "Write an expression inside <calculator> tags"),
        ("calculator", "<calculator>import os</calculator>", "error"),
        ("gymnasium", "left", "there is no <action>"),
        ("gymnasium", "<action>17</action>", "0"),
        ("textworld", "open the pod bay doors", "There is no <action>"),
        ("textworld", "<action>open the pod bay doors</action>", ""),
        ("multiply", "no box", ""),
    ],
)
def test_invalid_action_is_observed_and_episode_continues(env_id, action, told):
    if env_id == "gymnasium":
        pytest.importorskip("gymnasium")
    example = skyrl_gym.envs.registration.env_class_of(skyrl_gym.spec(env_id)).examples()[0]
    with skyrl_gym.make(env_id, env_config=example.env_config, extras=example.extras | {"max_turns": 5}) as env:
        env.init(list(example.prompt))
        output = env.step(action)
        assert output["done"] is False and output["reward"] == 0.0
        (observation,) = output["observations"]
        assert observation["role"] == "user" and told in observation["content"]

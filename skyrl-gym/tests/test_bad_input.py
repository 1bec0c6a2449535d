"""A wrong row names the field and the rule; a wrong action is answered, never an exception."""

import pytest

import skyrl_gym
from skyrl_gym.envs.base_text_env import BaseTextEnv
from skyrl_gym.error import TaskError
from skyrl_gym.tools.core import ToolGroup, tool

ANSWER = {"reward_spec": {"method": "rule", "ground_truth": "4"}}
QUERY = {"reward_spec": {"method": "rule", "ground_truth": "SELECT 1"}, "db_id": "shop", "data": "spider"}


@pytest.mark.parametrize(
    "env_id, row, error, text",
    [
        ("gsm8k", {}, TaskError, "reward_spec field is required"),
        ("gsm8k", {"reward_spec": {}}, TaskError, "ground_truth is required in reward_spec"),
        ("aime", ANSWER, TaskError, "reward_model field is required; the row has reward_spec"),
        ("search", ANSWER, TaskError, r"reward_spec.ground_truth must be \{'target'"),
        ("search", ANSWER | {"max_turns": "two"}, TaskError, "reward_spec.ground_truth must be|max_turns must be"),
        ("text2sql", {**QUERY, "db_id": None}, TaskError, "db_id field is required"),
        ("text2sql", QUERY | {"data": "oracle"}, TaskError, "data must be one of .*spider.*; got 'oracle'"),
        ("text2sql", QUERY | {"data": ["spider"]}, TaskError, "data must be one of"),
        ("text2sql", QUERY, FileNotFoundError, "shop.sqlite"),
        ("lcb", {"reward_spec": {"ground_truth": "[{'input'"}}, TaskError, "JSON"),
        ("lcb", {"reward_spec": {"ground_truth": "[]"}}, TaskError, "test"),
        (
            "lcb",
            {"reward_spec": {"ground_truth": '[{"input": "1", "output": "1", "testtype": "functional"}]'}},
            TaskError,
            "func_name",
        ),
        ("code", {"reward_spec": {"ground_truth": {"tests": ["assert ("]}}}, TaskError, "test 0 must be Python code"),
        ("multiply", ANSWER | {"max_turns": 0}, TaskError, "max_turns must be a whole number from 1 on; got 0"),
        ("textworld", {"game": "{"}, TaskError, "game"),
        ("rlm", ANSWER | {"extra_info": "none"}, TaskError, "extra_info must be a mapping"),
    ],
)
def test_a_wrong_row_is_told_its_field_and_the_rule(env_id, row, error, text):
    with pytest.raises(error, match=text):
        env = skyrl_gym.make(env_id, extras=row)
        env.init([{"role": "user", "content": "?"}])  # some read the rest of the row here


def test_a_missing_database_names_the_setting_that_says_where_databases_are(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"(?s)shop\.sqlite.*db_path"):
        skyrl_gym.make("text2sql", env_config={"db_path": str(tmp_path)}, extras=QUERY)


class Left(ToolGroup):
    def __init__(self):
        super().__init__("Left")

    @tool
    def look(self) -> str:
        """Looks."""
        return "left"


class Right(ToolGroup):
    def __init__(self):
        super().__init__("Right")

    @tool
    def look(self) -> str:
        """Looks."""
        return "right"


def test_two_tools_of_one_name_are_refused():
    with pytest.raises(ValueError, match="tool 'look' is in two groups, Left and Right; tool names must be unique"):
        BaseTextEnv().init_tool_groups([Left(), Right()])


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
def test_a_wrong_action_is_answered_and_the_episode_goes_on(env_id, action, told):
    if env_id == "gymnasium":
        pytest.importorskip("gymnasium")
    example = skyrl_gym.envs.registration.env_class_of(skyrl_gym.spec(env_id)).examples()[0]
    with skyrl_gym.make(env_id, env_config=example.env_config, extras=example.extras | {"max_turns": 5}) as env:
        env.init(list(example.prompt))
        output = env.step(action)
        assert output["done"] is False and output["reward"] == 0.0
        (observation,) = output["observations"]
        assert observation["role"] == "user" and told in observation["content"]

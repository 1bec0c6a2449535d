import time

import pytest

import skyrl_gym
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput
from skyrl_gym.episode import Episode, run_episode
from skyrl_gym.wrappers import ObservationCut, RewardTransform, TimeLimit, ToolBudget, Wrapper

PROMPT = [{"role": "user", "content": "count"}]


class Counting(BaseTextEnv):
    """Answers with the number of turns; never ends by itself."""

    def __init__(self, env_config=None, extras=None):
        super().__init__()
        self.max_turns = 1000

    def step(self, action):
        self.turns += 1
        return BaseTextEnvStepOutput(
            observations=[{"role": "user", "content": f"{self.turns} " + action}],
            reward=1.0,
            done=action == "end",
            metadata={"turn": self.turns},
        )

    def get_metrics(self):
        return {"turns": self.turns}

    @staticmethod
    def aggregate_metrics(metrics):
        return {"most_turns": max(each["turns"] for each in metrics)}


class AsyncCounting(Counting):
    async def init(self, prompt, seed=None):
        self.seed = seed
        return prompt, {}

    async def step(self, action):
        return Counting.step(self, action)

    async def close(self):
        self.is_closed = True


@pytest.mark.parametrize("env_class", [Counting, AsyncCounting])
def test_turn_limit_truncates_unfinished_episode(env_class):
    result = run_episode(TimeLimit(env_class(), turns=3), PROMPT, lambda messages: "go on")
    assert (len(result.rewards), result.done, result.truncated) == (3, True, True)
    assert result.messages[-1] == {"role": "assistant", "content": "go on"}  # no observation that nobody reads
    result = run_episode(TimeLimit(env_class(), turns=1, seconds=1000), PROMPT, lambda messages: "end")
    assert (result.done, result.truncated) == (True, False)


def test_limits_restart_with_each_episode():
    env = TimeLimit(Counting(), seconds=0.05)
    time.sleep(0.06)
    env.init(PROMPT)
    assert not env.step("go on")["done"]
    time.sleep(0.06)
    output = env.step("go on")
    assert output["done"] and output["truncated"] and output["reward"] == 1.0  # what was written is still judged
    env = TimeLimit(Counting(), turns=1)
    for _ in range(2):
        env.init(PROMPT)
        assert env.step("go on")["done"]


def test_wrapper_forwards_everything_else():
    env = TimeLimit(RewardTransform(Counting(), lambda reward: reward), turns=9)
    assert env.aggregate_metrics([{"turns": 1}, {"turns": 4}]) == {"most_turns": 4}
    env.step("go on")
    assert env.turns == 1
    env.turns = 7  # reaches the environment inside, as tests that set it expect
    assert env.unwrapped.turns == 7
    assert str(env) == "TimeLimit(RewardTransform(Env(Counting)))"
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = env.no_such_thing


def test_factory_of_wrapped_environments_can_be_registered():
    def short_counting(**kwargs):
        return TimeLimit(Counting(**kwargs), turns=2)

    skyrl_gym.register("short_counting", short_counting)
    try:
        env = skyrl_gym.make("short_counting", env_config=None, extras={})
        assert env.spec is not None and env.spec.id == "short_counting"
        assert env.unwrapped.spec is env.spec
    finally:
        skyrl_gym.envs.deregister("short_counting")


def test_seeds_reach_environments_accepting_seed():
    env = Wrapper(AsyncCounting())
    with Episode(env) as episode:
        episode.init(PROMPT, seed=5)
    assert env.seed == 5 and env.is_closed
    assert Wrapper(Counting()).init(PROMPT, 5) == (PROMPT, {})


CALL = "<calculator>6*7</calculator>"


def test_tools_beyond_budget_return_text():
    extras = {"reward_spec": {"ground_truth": "42"}, "max_turns": 5}
    env = ToolBudget(skyrl_gym.make("calculator", extras=extras), max_calls=1)
    env.init(PROMPT)
    assert env.step(CALL)["observations"][0]["content"] == "<result>42</result>"
    assert "No tool calls are left: all 1 are used" in env.step(CALL)["observations"][0]["content"]
    assert env.get_metrics() | {"tool_calls": 1, "refused_tool_calls": 1} == env.get_metrics()
    assert env.step("<answer>42</answer>")["reward"] == 1.0


PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 100}}
CUT = "xxx\n[3 characters left out]\nxxx"


@pytest.mark.parametrize(
    "text, expected",
    [
        ("abcdef", "abcdef"),
        ("abcdefghij", "abc\n[4 characters left out]\nhij"),
        ("ä" * 7, "äää\n[1 characters left out]\näää"),
        ([{"type": "text", "text": "x" * 9}, PICTURE], [{"type": "text", "text": CUT}, PICTURE]),  # no part of it goes
    ],
)
def test_long_observations_keep_head_and_tail(text, expected):
    class Saying(Counting):
        def step(self, action):
            output = Counting.step(self, action)
            return output | {"observations": [{"role": "user", "content": text}]}

    assert ObservationCut(Saying(), 6).step("")["observations"] == [{"role": "user", "content": expected}]


def test_transformed_reward_keeps_original_and_outcome():
    env = RewardTransform(Counting(), lambda reward: reward / 10)
    env.init(PROMPT)
    output = env.step("go on")
    assert output["reward"] == 0.1
    assert output["metadata"] == {"turn": 1, "original_reward": 1.0}
    env.step("end")
    assert env.get_metrics() == {"turns": 2, "outcome_reward": 2.0}


@pytest.mark.parametrize(
    "make, text",
    [
        (lambda env: TimeLimit(env), "needs turns, seconds or both"),
        (lambda env: TimeLimit(env, turns=0), r"TimeLimit\(turns=...\) must be positive; got 0"),
        (lambda env: ObservationCut(env, 0), "must be positive; got 0"),
        (lambda env: ToolBudget(env, 3), "needs an environment with tools"),
    ],
)
def test_invalid_settings_are_rejected(make, text):
    with pytest.raises(ValueError, match=text):
        make(Counting())

import json
import math
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import skyrl_gym
from skyrl_gym.episode import run_episode
from skyrl_gym.error import Error, TaskError

pytest.importorskip("gymnasium", reason="needs skyrl-gym[gymnasium]")

import gymnasium
import numpy as np
from gymnasium import spaces
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from skyrl_gym.envs.gymnasium.env import GymnasiumEnv
from skyrl_gym.envs.gymnasium.spaces import IllegalAction, describe, read, to_json


def make(env_id="CartPole-v1", config: Any = None, **extras: Any) -> Any:
    return skyrl_gym.make("gymnasium", env_config=config, extras={"env_id": env_id, "seed": 1} | extras)


def act(value: Any) -> str:
    return f"I think so. <action>{value if isinstance(value, str) else json.dumps(value)}</action>"


CORRIDOR = {"desc": ["SFFG"], "is_slippery": False}


def test_frozen_lake_episode():
    env = make("FrozenLake-v1", env_kwargs=CORRIDOR, ansi=True)
    [message], _ = env.init([])
    text = message["content"]
    assert "a whole number from 0 to 3 (0 = Move left, 1 = Move down, 2 = Move right, 3 = Move up)" in text
    assert text.endswith("Observation:\n0\n[S]FFG\n[S] is red")
    outputs = [
        env.step(act(2)),
        env.step("<action>Move left</action> no, <action>Move right</action>"),
        env.step(act(2)),
    ]
    assert outputs[1]["observations"][0]["content"].endswith(
        "Observation:\n2\n  (Right)\nSF[F]G\n[F] is red\n98 turns left."
    )
    assert [(o["reward"], o["done"]) for o in outputs] == [(0.0, False), (0.0, False), (1.0, True)]
    assert "truncated" not in outputs[2]
    assert env.get_metrics() == {
        "outcome_reward": 1.0,
        "return": 1.0,
        "steps": 3,
        "turns": 3,
        "illegal_actions": 0,
        "terminated": True,
        "success": True,
    }
    env.close()
    env.close()


@pytest.mark.parametrize(
    "text, rule",
    [
        ("go right", "there is no <action>...</action>"),
        (act(4), "4 is not a whole number from 0 to 3"),
        (act(1.5), "1.5 is not a whole number"),
        (act("true"), "True is not a whole number"),
        (act([1]), "[1] is not a whole number"),
        (act("NaN"), "nan is not a whole number"),
        (act("sideways"), "'sideways' is not a whole number"),
        (act("9" * 5000), "is not a whole number"),
        (act("[" * 50_000), "is not a whole number"),
    ],
)
def test_illegal_action_returns_rule_and_changes_nothing(text, rule):
    env = make("FrozenLake-v1", env_kwargs=CORRIDOR, max_turns=4)
    env.init([])
    output = env.step(text)
    assert rule in output["observations"][0]["content"]
    assert "3 turns left" in output["observations"][0]["content"]
    assert (output["reward"], output["done"]) == (0.0, False)
    assert env.get_metrics()["steps"] == 0
    assert [env.step(act(2))["reward"] for _ in range(3)] == [0.0, 0.0, 1.0]
    env.close()


def test_last_turn_truncates_episode():
    env = make("FrozenLake-v1", env_kwargs=CORRIDOR, max_turns=2)
    env.init([])
    assert not env.step(act(2))["done"]
    last = env.step(act("what"))
    assert (last["done"], last["truncated"], last["observations"]) == (True, True, [])
    env.close()


def test_environment_time_limit_truncates_episode():
    env = make("MountainCar-v0", env_kwargs={"max_episode_steps": 5}, actions_per_turn=10)
    assert env.max_turns == 1
    env.init([])
    output = env.step(act([1] * 10))
    assert (output["reward"], output["done"], output["truncated"], output["metadata"]) == (
        -5.0,
        True,
        True,
        {"steps": 5},
    )
    assert env.get_metrics()["outcome_reward"] == 0.0  # -5 is above its threshold of -110, but it was cut short
    assert env.get_metrics()["success"] is False
    env.close()


def test_several_actions_per_turn_and_frame_skip():
    env = make("FrozenLake-v1", env_kwargs=CORRIDOR, actions_per_turn=2)
    env.init([])
    assert "at most 2 actions in one turn; got 3" in env.step(act([2, 2, 2]))["observations"][0]["content"]
    assert "action 2: 7 is not" in env.step(act([2, 7]))["observations"][0]["content"]
    assert "Reward after 2 actions: 0\nObservation:\n2\n" in env.step(act([2, 2]))["observations"][0]["content"]
    assert env.step(act(["Move right", 0]))["reward"] == 1.0  # the rest is not played
    skipping = make("FrozenLake-v1", env_kwargs=CORRIDOR, frame_skip=3)
    skipping.init([])
    assert skipping.step(act(2))["done"]
    for each in (env, skipping):
        each.close()


@pytest.mark.parametrize("action, count", [("0.5", 1), ("[0.5]", 1), ("[[0.5], [1]]", 2), ("[1, 2]", 2)])
def test_lists_of_actions_of_list_spaces(action, count):
    env = make("Pendulum-v1", actions_per_turn=3)
    env.init([])
    assert env.step(act(action))["metadata"] == {"steps": count}
    env.close()


def test_first_observation_is_appended_to_user_message():
    env = make(config={"describe": False})
    prompt = [{"role": "system", "content": "Play."}, {"role": "user", "content": "Go."}]
    messages, _ = env.init(prompt)
    assert [m["role"] for m in messages] == ["system", "user"]
    assert re.fullmatch(r"Go\.\n\nObservation:\n\[.+\]", messages[1]["content"])
    assert prompt[1]["content"] == "Go."
    env.close()


def test_seed_determines_episode_and_row_seed_wins():
    def first(seed_of_row, seed):
        env = make(seed=seed_of_row)
        messages, _ = env.init([], seed)
        output = env.step(act(0))
        env.close()
        return messages, output

    assert first(1, None) == first(1, 2) == first(None, 1)
    assert first(1, None) != first(2, None)


def test_rewards_are_scaled_and_returns_mapped():
    env = make(config={"reward_scale": 0.5, "reward_range": [2, 6], "actions_per_turn": 4})
    env.init([])
    assert env.step(act([0, 1, 0, 1]))["reward"] == 2.0
    assert env.get_metrics()["return"] == 4.0
    assert env.get_metrics()["outcome_reward"] == 0.5
    env.close()


def test_large_observations_are_truncated_with_note():
    env = make(config={"max_numbers": 2, "digits": 2})
    messages, _ = env.init([])
    assert re.search(r"Observation:\n\[-?[\d.e-]+, -?[\d.e-]+, \.\.\.\] \(the first 2 of 4\)$", messages[0]["content"])
    env.close()


@pytest.mark.parametrize(
    "extras, text",
    [
        ({"env_id": None}, "env_id"),
        ({"env_id": "CartPol-v1"}, "env_id"),
        ({"env_kwargs": {"gravity_of_mars": 1}}, "env_kwargs"),
        ({"env_kwargs": "{"}, "env_kwargs"),
        ({"ansi": True}, "CartPole-v1 does not render as text"),
        ({"seed": -1}, "seed must be"),
        ({"frame_skip": 0}, "frame_skip"),
        ({"reward_range": [1, 1]}, "reward_range"),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning:gymnasium")
def test_invalid_row_error_names_field_and_rule(extras, text):
    with pytest.raises(TaskError, match=text):
        make(**extras)


def test_unknown_setting_error_names_nearest_setting():
    with pytest.raises(ValueError, match="frame_skip"):
        make(config={"frame_skp": 2})


def test_missing_package_error_names_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    for attempt in (make, GymnasiumEnv.examples):
        with pytest.raises(Error, match=r"pip install 'skyrl-gym\[gymnasium\]'"):
            attempt()


def test_parallel_episodes_match_sequential_episode():
    examples = GymnasiumEnv.examples()

    def play(example):
        moves = iter(example.oracle)
        env = make(config=example.env_config, **example.extras)
        return run_episode(env, example.prompt, lambda _: next(moves)).messages

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(play, examples * 2)) == [play(example) for example in examples * 2]


# Every registered environment


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning:gymnasium")
@pytest.mark.parametrize("env_id", sorted(gymnasium.registry))
def test_every_registered_environment_plays_random_legal_actions(env_id):
    try:
        env = make(env_id, max_turns=20)
    except Error as missing:
        assert not isinstance(missing, TaskError)
        pytest.skip(str(missing)[:200])
    messages, _ = env.init([{"role": "user", "content": "Play."}])
    space = env.player.env.action_space
    space.seed(3)
    assert "An action is a" in messages[0]["content"]
    output: Any = {"done": False}
    for _ in range(20):
        action = space.sample()
        text = json.dumps(to_json(space, action))
        np.testing.assert_array_equal(read(space, json.loads(text)), action)
        output = env.step(act(text))
        assert "illegal" not in output["metadata"]
        assert math.isfinite(output["reward"])
        for message in output["observations"]:
            assert len(message["content"]) < 3000
            assert "nan" not in message["content"]
        if output["done"]:
            break
    assert output["done"]
    assert env.get_metrics()["illegal_actions"] == 0
    env.close()


def test_mujoco_moves_as_it_does_without_us():
    pytest.importorskip("mujoco")
    pytest.importorskip("imageio", reason="Gymnasium's MuJoCo environments need imageio")
    for env_id in ("Hopper-v5", "InvertedPendulum-v5"):
        env, plain = make(env_id, seed=5), gymnasium.make(env_id)
        env.init([])
        plain.reset(seed=5)
        size = plain.action_space.shape[0]
        for step in range(5):
            action = [0.1 * step] * size
            _, reward, terminated, _, _ = plain.step(np.array(action, dtype=np.float32))
            output = env.step(act(action))
            assert (output["reward"], output["done"]) == (pytest.approx(reward), terminated)
        env.close()
        plain.close()


# Spaces

BOUNDS = st.one_of(
    st.just((-np.inf, np.inf)),
    st.just((0.0, np.inf)),
    st.tuples(st.floats(-100, 0, width=16), st.floats(0.0625, 100, width=16)),
)
SHAPES = st.sampled_from([(), (1,), (3,), (2, 2)])


@st.composite
def boxes(draw):
    dtype = draw(st.sampled_from([np.float32, np.float64, np.int32, np.uint8]))
    shape = draw(SHAPES)
    if np.issubdtype(dtype, np.integer):
        return spaces.Box(draw(st.integers(0, 3)), draw(st.integers(4, 200)), shape=shape, dtype=dtype)
    low, high = draw(BOUNDS)
    return spaces.Box(low, high, shape=shape, dtype=dtype)


SIMPLE = st.one_of(
    boxes(),
    st.builds(lambda n, start: spaces.Discrete(n, start=start), st.integers(1, 9), st.integers(-3, 3)),
    st.lists(st.integers(1, 5), min_size=1, max_size=3).map(spaces.MultiDiscrete),
    st.one_of(st.integers(1, 4), st.just([2, 2])).map(spaces.MultiBinary),
    st.builds(
        lambda n, charset: spaces.Text(n, charset=charset), st.integers(1, 5), st.sampled_from(["ab", '"\\<x é'])
    ),
)
ALL_SPACES = st.recursive(
    SIMPLE,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map(spaces.Tuple),
        st.dictionaries(st.sampled_from(["a", "b", "key"]), inner, min_size=1, max_size=3).map(spaces.Dict),
    ),
    max_leaves=5,
)


@pytest.mark.filterwarnings("ignore:.*Casting input x to numpy array:UserWarning")  # by the library, of its own values
@given(space=ALL_SPACES, seed=st.integers(0, 1000))
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
def test_space_values_round_trip_through_text(space, seed):
    space.seed(seed)
    value = space.sample()
    text = json.dumps(to_json(space, value))
    returned = read(space, json.loads(text))
    assert space.contains(returned)
    assert json.dumps(to_json(space, returned)) == text
    assert describe(space).startswith("a")


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=3), inner, max_size=3)),
    max_leaves=8,
)


@pytest.mark.filterwarnings("ignore:.*Casting input x to numpy array:UserWarning")  # by the library, of its own values
@given(space=ALL_SPACES, value=JSON)
@example(space=spaces.Box(-np.inf, np.inf, ()), value=3.4028235677973366e38)  # just over what float32 can hold
@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow])
def test_any_json_is_parsed_or_rejected(space, value):
    try:
        returned = read(space, value)
    except IllegalAction as fault:
        assert str(fault)
    else:
        assert space.contains(returned)


@pytest.mark.parametrize(
    "space, words",
    [
        (spaces.Discrete(3, start=2), "a whole number from 2 to 4"),
        (spaces.Box(-1, 1, (2,)), "a list of 2 numbers, each from -1 to 1"),
        (spaces.Box(0, np.inf, ()), "a number of at least 0"),
        (spaces.Box(0, 255, (2, 3), np.uint8), "a nested list of shape 2 x 3 of whole numbers, each from 0 to 255"),
        (
            spaces.Box(np.array([0, -1], np.float32), np.array([1, 1], np.float32)),
            "a list of 2 numbers: (1) from 0 to 1; (2) from -1 to 1",
        ),
        (spaces.MultiDiscrete([2, 3]), "a list of 2 whole numbers: (1) from 0 to 1; (2) from 0 to 2"),
        (spaces.MultiBinary(3), "a list of 3 numbers, each 0 or 1"),
        (spaces.Text(4, charset="ab"), "a string of 1 to 4 of the characters ab"),
        (spaces.Tuple([spaces.Discrete(2)]), "a list of 1 parts: (1) a whole number from 0 to 1"),
        (spaces.Dict(x=spaces.Discrete(2)), 'an object with "x": a whole number from 0 to 1'),
        (spaces.Sequence(spaces.Discrete(2)), "a value of Sequence(Discrete(2), stack=False)"),
    ],
)
def test_spaces_in_words(space, words):
    assert describe(space) == words


class Jumps(gymnasium.Env):
    """Observes and takes lists of any length."""

    observation_space = spaces.Sequence(spaces.Discrete(3))

    def __init__(self, action_space):
        self.action_space = action_space

    def reset(self, *, seed=None, options=None):
        return (1, 2), {}


def test_other_spaces_show_observations_and_reject_actions(monkeypatch):
    monkeypatch.setitem(gymnasium.registry, "Jumps-v0", gymnasium.envs.registration.EnvSpec("Jumps-v0", Jumps))
    [message], _ = make("Jumps-v0", env_kwargs={"action_space": spaces.Discrete(2)}).init([])
    assert message["content"].endswith("Observation:\n[1, 2]")
    for space in (spaces.Sequence(spaces.Discrete(2)), spaces.Tuple([spaces.OneOf([spaces.Discrete(2)])])):
        with pytest.raises(TaskError, match="Jumps-v0"):
            make("Jumps-v0", env_kwargs={"action_space": space})


@pytest.mark.parametrize(
    "space, value, rule",
    [
        (spaces.Box(-1, 1, (2,)), [0, 3], "number 2, 3.0, must be from -1 to 1"),
        (spaces.Box(-1, 1, (2,)), [0], "[0] is not a list of 2 numbers"),
        (spaces.Box(-1, 1, (2,)), [0, math.nan], "nan is not a finite number"),
        (spaces.Box(0, 9, (1,), np.int32), [0.5], "0.5 is not a whole number"),
        (spaces.MultiDiscrete([2, 3]), [0, 3], "number 2, 3, must be from 0 to 2"),
        (spaces.Tuple([spaces.Discrete(2), spaces.Discrete(2)]), [0, 5], "part 2: 5 is not a whole number from 0 to 1"),
        (spaces.Dict(x=spaces.Discrete(2)), {"y": 0}, "is not an object with exactly the keys x"),
    ],
)
def test_values_outside_space_are_rejected_with_rule(space, value, rule):
    with pytest.raises(IllegalAction, match=re.escape(rule)):
        read(space, value)

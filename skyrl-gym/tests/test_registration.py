import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import skyrl_gym
from skyrl_gym import error
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput
from skyrl_gym.envs.registration import EnvSpec, load_env_creator
from skyrl_gym.metrics import aggregate_for_environment, default_aggregate_metrics

ROW = {"reward_spec": {"method": "rule", "ground_truth": "42"}}


class EchoEnv(BaseTextEnv):
    """Repeats what it hears, `max_turns` times, and likes the word it was told to like."""

    def __init__(self, env_config=None, extras=None, likes="yes"):
        super().__init__()
        assert likes, "likes must be a word"
        self.likes = likes
        self.max_turns = (extras or {}).get("max_turns", 2)

    def step(self, action):
        self.turns += 1
        done = self.turns >= self.max_turns
        echo = [] if done else [{"role": "user", "content": action}]
        return BaseTextEnvStepOutput(observations=echo, reward=float(action == self.likes), done=done, metadata={})


def make(*args, **kwargs) -> Any:
    return skyrl_gym.make(*args, **kwargs)


def make_echo(**kwargs):
    return EchoEnv(**kwargs)


@pytest.fixture
def echo():
    """The id of an environment that is registered for one test."""
    skyrl_gym.register(id="echo", entry_point=EchoEnv, kwargs={"likes": "hello"})
    yield "echo"
    skyrl_gym.deregister("echo")


def test_an_episode_of_two_turns(echo):
    with make(echo, extras={"max_turns": 2}) as env:
        prompt = [{"role": "user", "content": "say something"}]
        assert env.init(prompt) == (prompt, {})
        assert env.step("hi") == {
            "observations": [{"role": "user", "content": "hi"}],
            "reward": 0.0,
            "done": False,
            "metadata": {},
        }
        last = env.step("hello")
        assert (last["reward"], last["done"], last["observations"]) == (1.0, True, [])
    env.close()  # closing twice is fine
    assert str(env) == "Env(EchoEnv)"


def test_arguments_of_make_win_and_stay_on_the_spec(echo):
    env = make(echo, likes="bye")
    assert env.likes == "bye"
    assert env.spec.kwargs == {"likes": "bye"}
    assert skyrl_gym.spec(echo).kwargs == {"likes": "hello"}
    assert make(skyrl_gym.spec(echo)).likes == "hello"
    assert isinstance(skyrl_gym.spec(echo).make(), EchoEnv)


def test_kwargs_of_the_registration_are_not_shared_between_instances():
    skyrl_gym.register(id="shared", entry_point=EchoEnv, kwargs={"extras": {"max_turns": 3}})
    try:
        first = make("shared")
        first.spec.kwargs["extras"]["max_turns"] = 99
        assert make("shared").max_turns == 3
    finally:
        skyrl_gym.deregister("shared")


def test_an_unknown_id_names_the_nearest_one():
    with pytest.raises(error.Error, match=r"No registered env with id: gsm8; did you mean gsm8k"):
        make("gsm8")
    with pytest.raises(error.Error, match=r"No registered env with id: zzzz; registered: .*arithmetic"):
        skyrl_gym.spec("zzzz")
    with pytest.raises(error.Error, match="No registered env with id"):
        skyrl_gym.deregister("zzzz")


def test_an_id_is_registered_once(echo):
    with pytest.raises(error.RegistrationError, match="'echo' is already registered"):
        skyrl_gym.register(id=echo, entry_point=EchoEnv)
    with pytest.raises(AssertionError, match="entry_point"):
        skyrl_gym.register(id="nothing")


def test_a_factory_function_is_as_good_as_a_class():
    skyrl_gym.register(id="made", entry_point=make_echo)
    try:
        assert make("made", likes="a").likes == "a"
        assert aggregate_for_environment("made", [{"score": 1}, {"score": 0}]) == {"score": 0.5}
    finally:
        skyrl_gym.deregister("made")


def test_what_the_constructor_raises_reaches_the_caller(echo):
    with pytest.raises(AssertionError, match="likes must be a word"):
        make(echo, likes="")
    with pytest.raises(TypeError, match=r"colour.*while making env 'echo'"):
        make(echo, colour="red")


def test_an_entry_point_that_makes_no_env_is_refused():
    skyrl_gym.register(id="a dict", entry_point="builtins:dict")
    try:
        with pytest.raises(TypeError, match="it made a dict"):
            make("a dict")
    finally:
        skyrl_gym.deregister("a dict")
    with pytest.raises(error.Error, match="no entry point"):
        make(EnvSpec(id="empty"))


@pytest.mark.parametrize("text", ["module_only", "a:b:c", ":name", "module:"])
def test_an_entry_point_reads_module_colon_attribute(text):
    with pytest.raises(ValueError, match="must read"):
        load_env_creator(text)


def test_a_spec_goes_to_json_and_back(echo):
    built_in = skyrl_gym.spec("gsm8k")
    assert json.loads(built_in.to_json()) == {
        "id": "gsm8k",
        "entry_point": "skyrl_gym.envs.gsm8k.env:GSM8kEnv",
        "kwargs": {},
    }
    assert EnvSpec.from_json(built_in.to_json()) == built_in
    with pytest.raises(ValueError, match="entry_point is a callable"):
        skyrl_gym.spec(echo).to_json()
    with pytest.raises(ValueError, match="not an environment spec"):
        EnvSpec.from_json('{"colour": "red"}')


def test_the_registry_prints_in_columns():
    some = {env_id: EnvSpec(id=env_id) for env_id in ("bb", "a", "ccc", "d")}
    assert skyrl_gym.pprint_registry(some, num_cols=3, disable_print=True) == "a    bb   ccc\nd"
    assert skyrl_gym.pprint_registry({}, disable_print=True) == "No environments registered."
    assert skyrl_gym.spec("gsm8k").pprint(disable_print=True, include_entry_points=True) == (
        "id=gsm8k\nentry_point=skyrl_gym.envs.gsm8k.env:GSM8kEnv"
    )


def test_metrics_average_over_the_episodes_that_have_them():
    assert default_aggregate_metrics([]) == {}
    episodes = [{"solved": True, "steps": 2, "note": "text"}, {"solved": False}]
    assert default_aggregate_metrics(episodes) == {"solved": 0.5, "steps": 2.0}
    assert aggregate_for_environment("gsm8k_multi_turn", [{"steps": 1}, {"steps": 4}]) == {"avg_steps": 2.5}
    with pytest.raises(ValueError, match="No registered env with id: nowhere"):
        aggregate_for_environment("nowhere", [])


def test_environments_of_different_threads_do_not_disturb_each_other():
    def episode(number):
        extras = {"reward_spec": {"ground_truth": str(number * number)}, "max_turns": 2}
        env = make("calculator", env_config={}, extras=extras)
        told = env.step(f"<calculator>{number}*{number}</calculator>")["observations"][0]["content"]
        value = told.removeprefix("<result>").removesuffix("</result>")
        return env.step(f"<answer>{value}</answer>")["reward"]

    with ThreadPoolExecutor(max_workers=16) as pool:
        assert list(pool.map(episode, range(200))) == [1.0] * 200


def test_importing_the_package_imports_nothing_heavy():
    code = (
        "import skyrl_gym, sys; print([m for m in ('torch', 'numpy', 'pandas', 'requests', 'ray') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"

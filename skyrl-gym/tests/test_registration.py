import functools
import json
import math
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import skyrl_gym
from skyrl_gym import error
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput, ground_truth_of, max_turns_of, typed_config
from skyrl_gym.envs.registration import EnvSpec, load_env_creator, register_installed, spec
from skyrl_gym.metrics import aggregate_for_environment, default_aggregate_metrics

ROW = {"reward_spec": {"method": "rule", "ground_truth": "42"}}


class EchoEnv(BaseTextEnv):
    """Environment that repeats the action, `max_turns` times, and rewards a given word."""

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
def register():
    """Register environments for one test. Returns: the id."""
    made = []

    def add(id, entry_point, **options):
        skyrl_gym.register(id, entry_point, **options)
        made.append(id)
        return id

    yield add
    for id in made:
        skyrl_gym.deregister(id)


@pytest.fixture
def echo(register):
    return register("echo", EchoEnv, kwargs={"likes": "hello"})


def test_two_turn_episode(echo):
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


def test_make_arguments_override_and_are_kept_on_spec(echo):
    env = make(echo, likes="bye")
    assert env.likes == "bye"
    assert env.spec.kwargs == {"likes": "bye"}
    assert skyrl_gym.spec(echo).kwargs == {"likes": "hello"}
    assert make(skyrl_gym.spec(echo)).likes == "hello"
    assert isinstance(skyrl_gym.spec(echo).make(), EchoEnv)


def test_registration_kwargs_are_not_shared_between_instances(register):
    register("shared", EchoEnv, kwargs={"extras": {"max_turns": 3}})
    first = make("shared")
    first.spec.kwargs["extras"]["max_turns"] = 99
    assert make("shared").max_turns == 3


def test_unknown_id_error_names_nearest_id():
    with pytest.raises(error.Error, match="gsm8k"):
        make("gsm8")
    with pytest.raises(error.Error, match=r"zzzz.*arithmetic"):
        skyrl_gym.spec("zzzz")
    with pytest.raises(error.Error, match="No registered env with id"):
        skyrl_gym.deregister("zzzz")


def test_duplicate_registration_is_rejected(echo):
    with pytest.raises(error.RegistrationError, match="'echo'"):
        skyrl_gym.register(id=echo, entry_point=EchoEnv)
    with pytest.raises(AssertionError, match="entry_point"):
        skyrl_gym.register(id="nothing")


def test_constructor_errors_propagate(echo):
    with pytest.raises(AssertionError, match="likes must be a word"):
        make(echo, likes="")
    with pytest.raises(TypeError, match=r"colour.*'echo'"):
        make(echo, colour="red")


def test_entry_point_without_env_is_rejected(register):
    with pytest.raises(TypeError, match="it created a dict"):
        make(register("a dict", "builtins:dict"))
    with pytest.raises(error.Error, match="no entry point"):
        make(EnvSpec(id="empty"))


@pytest.mark.parametrize("text", ["module_only", "a:b:c", ":name", "module:"])
def test_entry_point_format_is_module_colon_attribute(text):
    with pytest.raises(ValueError, match="must have the form"):
        load_env_creator(text)


def test_spec_round_trips_through_json(echo):
    built_in = skyrl_gym.spec("gsm8k")
    assert json.loads(built_in.to_json()) == {
        "id": "gsm8k",
        "entry_point": "skyrl_gym.envs.gsm8k.env:GSM8kEnv",
        "kwargs": {},
    }
    assert EnvSpec.from_json(built_in.to_json()) == built_in
    with pytest.raises(ValueError, match="entry_point"):
        skyrl_gym.spec(echo).to_json()
    with pytest.raises(ValueError, match="not an environment spec"):
        EnvSpec.from_json('{"colour": "red"}')


def test_registry_prints_in_columns():
    some = {env_id: EnvSpec(id=env_id) for env_id in ("bb", "a", "ccc", "d")}
    assert skyrl_gym.pprint_registry(some, num_cols=3, disable_print=True) == "a    bb   ccc\nd"
    assert skyrl_gym.pprint_registry({}, disable_print=True) == "No environments registered."
    assert skyrl_gym.spec("gsm8k").pprint(disable_print=True, include_entry_points=True) == (
        "id=gsm8k\nentry_point=skyrl_gym.envs.gsm8k.env:GSM8kEnv"
    )


def test_metrics_average_over_episodes_reporting_them():
    assert default_aggregate_metrics([]) == {}
    episodes = [{"solved": True, "steps": 2, "note": "text"}, {"solved": False}]
    assert default_aggregate_metrics(episodes) == {"solved": 0.5, "steps": 2.0}
    assert default_aggregate_metrics([{"a": 1.0}, {"a": math.nan}, {"a": 10**400}, {"a": 0.5}]) == {"a": 0.75}
    assert aggregate_for_environment("gsm8k_multi_turn", [{"steps": 1}, {"steps": 4}]) == {"avg_steps": 2.5}
    with pytest.raises(ValueError, match="nowhere"):
        aggregate_for_environment("nowhere", [])


def test_metrics_of_numpy_are_numbers():
    numpy = pytest.importorskip("numpy")
    scalars = [numpy.float32(0.5), numpy.int64(2), numpy.bool_(True), numpy.array(0.5), 0.25, True]
    assert default_aggregate_metrics([{"a": scalar} for scalar in scalars]) == {"a": 5.25 / 6}
    assert default_aggregate_metrics([{"a": numpy.ones(2), "b": numpy.str_("x"), "c": None}]) == {}


def test_environments_of_different_threads_do_not_disturb_each_other():
    def episode(number):
        extras = {"reward_spec": {"ground_truth": str(number * number)}, "max_turns": 2}
        env = make("calculator", env_config={}, extras=extras)
        told = env.step(f"<calculator>{number}*{number}</calculator>")["observations"][0]["content"]
        value = told.removeprefix("<result>").removesuffix("</result>")
        return env.step(f"<answer>{value}</answer>")["reward"]

    with ThreadPoolExecutor(max_workers=16) as pool:
        assert list(pool.map(episode, range(200))) == [1.0] * 200


def test_package_import_is_fast_and_light():
    """Less than half a second of CPU time, which a loaded machine does not change; the best of three."""
    heavy = ("torch", "numpy", "pandas", "requests", "httpx", "sympy", "ray", "pydantic")
    code = "import time; t = time.process_time(); import skyrl_gym, sys; print(time.process_time() - t, "
    command = [sys.executable, "-c", code + f"[m for m in {heavy} if m in sys.modules])"]
    printed = [subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in range(3)]
    assert min(float(line.split()[0]) for line in printed) < 0.5
    assert all(line.endswith(" []\n") for line in printed), printed


@dataclass
class WeatherConfig:
    station_url: str = "http://127.0.0.1:9"
    days: int = 3


@pytest.mark.parametrize("given", [{"days": 5}, WeatherConfig(days=5)])
def test_environment_settings_become_dataclass(given):
    assert typed_config(WeatherConfig, given) == WeatherConfig(days=5)
    assert typed_config(WeatherConfig, None) == typed_config(WeatherConfig, {}) == WeatherConfig()
    with pytest.raises(ValueError, match="station_url"):
        typed_config(WeatherConfig, {"station_ulr": "http://127.0.0.1:1"})


def test_turn_limit_must_be_whole_number():
    assert max_turns_of({}, 3) == max_turns_of({"max_turns": None}, 3) == max_turns_of({"max_turns": 3.0}, 9) == 3
    for value in (0, "four", 2.5, True, float("nan"), float("inf")):
        with pytest.raises(error.TaskError, match="max_turns"):
            max_turns_of({"max_turns": value}, 3)


@pytest.mark.parametrize(
    "row, said",
    [
        ({}, "reward_spec"),
        ({"data_source": "x"}, "reward_spec"),
        ({"reward_spec": {"method": "rule"}}, "ground_truth"),
        ({"reward_spec": "42"}, "ground_truth"),
    ],
)
def test_row_without_answer_error_names_missing_field(row, said):
    with pytest.raises(error.TaskError, match=said):
        ground_truth_of(row)


class Counted(EchoEnv):
    """Environment that counts its episodes instead of averaging them."""

    @staticmethod
    def aggregate_metrics(metrics):
        return {"episodes": len(metrics)}


def counted_factory(env_config=None, extras=None) -> Counted:
    return Counted(env_config, extras)


def test_factory_metrics_are_aggregated_by_annotated_class(register):
    assert make(register("made", make_echo), likes="a").likes == "a"
    assert aggregate_for_environment("made", [{"score": 1}, {"score": 0}]) == {"score": 0.5}
    register("counted", counted_factory)
    register("partial", functools.partial(counted_factory, env_config={}))
    assert aggregate_for_environment("counted", [{"x": 1}, {"x": 3}]) == {"episodes": 2}
    assert aggregate_for_environment("partial", [{"x": 1}]) == {"episodes": 1}


def installed_package(folder: Path, declares: str) -> None:
    """A package as pip leaves it: a module, and metadata with its entry points."""
    (folder / "chess_envs.py").write_text(
        "from skyrl_gym.envs.base_text_env import BaseTextEnv\n"
        "class ChessEnv(BaseTextEnv):\n"
        "    def __init__(self, env_config=None, extras=None):\n"
        "        super().__init__()\n"
    )
    information = folder / "chess_envs-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: chess-envs\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(f"[skyrl_gym.envs]\n{declares} = chess_envs:ChessEnv\n")


def test_installed_environments_are_found_without_registering(tmp_path):
    installed_package(tmp_path, declares="chess")
    script = "import sys, skyrl_gym; print('chess_envs' in sys.modules); print(skyrl_gym.make('chess'))"
    found = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert found.stdout.split() == ["False", "Env(ChessEnv)"]  # known by name, imported only when made


def test_installed_package_cannot_override_id(tmp_path, monkeypatch):
    installed_package(tmp_path, declares="gsm8k")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.warns(UserWarning, match="'chess_envs:ChessEnv'.*gsm8k"):
        register_installed()
    assert spec("gsm8k").entry_point == "skyrl_gym.envs.gsm8k.env:GSM8kEnv"

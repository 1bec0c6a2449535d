import sys

import pytest

pytest.importorskip("gymnasium", reason="Gymnasium is not installed")

import gymnasium
from gymnasium.utils.env_checker import check_env

import skyrl_gym
from skyrl_gym import gymnasium_envs
from skyrl_gym.error import Error

ROWS = [
    {"prompt": [{"role": "user", "content": f"What is {n} + {n}?"}], "reward_spec": {"ground_truth": str(2 * n)}}
    for n in range(10)
]
# These need a key, a sandbox or a server for their examples
NOT_HERE = {"llm_as_a_judge", "code", "lcb", "rlm", "search"}


@pytest.mark.parametrize("env_id", sorted(set(skyrl_gym.registry) - NOT_HERE))
def test_gymnasium_s_checker_accepts_every_environment(env_id):
    env = gymnasium.make(f"skyrl_gym/{env_id}")
    check_env(env.unwrapped)
    env.close()


def test_gymnasium_id_imports_module_seed_selects_row_render_works():
    env = gymnasium.make("skyrl_gym.gymnasium_envs:skyrl_gym/gsm8k", rows=ROWS)
    observation, info = env.reset(options={"row": 3})
    assert observation == "What is 3 + 3?"
    assert info == {"row": 3, "messages": ROWS[3]["prompt"]}
    assert env.step("It is #### 6")[:4] == ("", 1.0, True, False)
    first = env.reset(seed=5)  # which chooses the row
    assert env.reset(seed=5) == first
    assert len({env.reset(seed=seed)[1]["row"] for seed in range(30)}) > 5
    env = gymnasium.make("skyrl_gym/gsm8k", rows=ROWS, render_mode="ansi")
    env.reset(options={"row": 1})
    env.step("#### 2")
    assert env.render() == "user: What is 1 + 1?\nassistant: #### 2"


def test_settings_reach_environment_with_examples():
    env = gymnasium.make("skyrl_gym/text2sql", env_config={"rule": "spider"})
    env.reset()
    assert env.get_wrapper_attr("_episode").env.rule == "spider"
    with pytest.raises(ValueError, match="no setting 'ruel'"):
        gymnasium.make("skyrl_gym/text2sql", env_config={"ruel": "spider"}).reset()


def test_turn_limit_truncates_and_solution_terminates():
    rows = [ROWS[1] | {"max_turns": 2}]
    env = gymnasium.make("skyrl_gym/searchcode", rows=rows)
    env.reset()
    text, reward, terminated, truncated, info = env.step("no call")
    assert (reward, terminated, truncated) == (0.0, False, False)
    assert text == info["messages"][0]["content"]
    *_, terminated, truncated, info = env.step("no call")
    assert (terminated, truncated) == (False, True)
    assert info["metrics"]["turns"] == 2
    env.reset()
    assert env.step("<solution>#### 2</solution>")[1:4] == (1.0, True, False)


def test_own_environment_is_found_after_registration():
    class NoExamples(skyrl_gym.envs.base_text_env.BaseTextEnv):
        pass

    skyrl_gym.register(id="no_examples", entry_point=NoExamples)
    try:
        gymnasium_envs.register_all()
        with pytest.raises(Error, match="no_examples"):
            gymnasium.make("skyrl_gym/no_examples")
    finally:
        skyrl_gym.deregister("no_examples")
        gymnasium.registry.pop("skyrl_gym/no_examples", None)


def test_gymnasium_id_may_name_registering_package(tmp_path, monkeypatch):
    (tmp_path / "my_worlds.py").write_text(
        "import gymnasium\n"
        "gymnasium.register('MyWorld-v0', entry_point='gymnasium.envs.toy_text.frozen_lake:FrozenLakeEnv')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    try:
        env = skyrl_gym.make("gymnasium", extras={"env_id": "my_worlds:MyWorld-v0"})
        prompt, _ = env.init([{"role": "user", "content": "Play."}], 0)
        assert "MyWorld-v0" in prompt[0]["content"]
        env.close()
        with pytest.raises(Error, match="no_such_package"):
            skyrl_gym.make("gymnasium", extras={"env_id": "no_such_package:MyWorld-v0"})
    finally:
        sys.modules.pop("my_worlds", None)
        gymnasium.registry.pop("MyWorld-v0", None)

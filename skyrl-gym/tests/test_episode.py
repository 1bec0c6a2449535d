import asyncio

import pytest

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput
from skyrl_gym.episode import ContractError, Episode, check_step_output, run_episode

PROMPT = [{"role": "user", "content": "count to three"}]


class Counting(BaseTextEnv):
    """Three turns, worth 1, 2 and 3."""

    is_closed = False

    def step(self, action):
        self.turns += 1
        done = self.turns == 3
        observations = [] if done else [{"role": "user", "content": f"after {action}?"}]
        return BaseTextEnvStepOutput(observations=observations, reward=float(self.turns), done=done, metadata={})

    def close(self):
        self.is_closed = True

    def get_metrics(self):
        return {"turns": self.turns}


def next_number(messages):
    return str(sum(message["role"] == "assistant" for message in messages) + 1)


def test_episode_runs_from_prompt_to_done():
    env = Counting()
    result = run_episode(env, PROMPT, next_number)
    assert [message["content"] for message in result.messages] == [
        "count to three",
        "1",
        "after 1?",
        "2",
        "after 2?",
        "3",
    ]
    assert (result.rewards, result.total_reward, result.outcome_reward) == ([1.0, 2.0, 3.0], 6.0, 6.0)
    assert (result.done, result.truncated, result.metrics, env.is_closed) == (True, False, {"turns": 3}, True)
    assert PROMPT == [{"role": "user", "content": "count to three"}]


def test_reported_outcome_is_used():
    class Shaped(Counting):
        def get_metrics(self):
            return {"outcome_reward": 3}

    assert run_episode(Shaped(), PROMPT, next_number).outcome_reward == 3.0


def test_endless_episode_stops_after_max_steps():
    result = run_episode(Counting(), PROMPT, next_number, max_steps=2)
    assert (len(result.rewards), result.done) == (2, False)


def test_async_methods_of_episode_share_event_loop():
    """Clients are bound to the loop on which they were made."""
    loops = []

    class Async(Counting):
        async def init(self, prompt, seed=None):
            loops.append(asyncio.get_running_loop())
            self.seed = seed
            return prompt, {}

        async def step(self, action):
            loops.append(asyncio.get_running_loop())
            return Counting.step(self, action)

        async def close(self):
            loops.append(asyncio.get_running_loop())
            Counting.close(self)

    env = Async()
    result = run_episode(env, PROMPT, next_number, seed=4)
    assert (result.total_reward, env.seed, env.is_closed) == (6.0, 4, True)
    assert len(loops) == 5 and len(set(loops)) == 1 and loops[0].is_closed()


@pytest.mark.parametrize("who", ["the environment", "the policy"])
def test_environment_is_closed_after_any_exception(who):
    class Raising(Counting):
        def step(self, action):
            raise KeyError("the environment")

    def raising(messages):
        raise KeyError("the policy")

    env = Raising() if who == "the environment" else Counting()
    with pytest.raises(KeyError, match=who):
        run_episode(env, PROMPT, next_number if who == "the environment" else raising)
    assert env.is_closed


GOOD = {"observations": [], "reward": 1.0, "done": True}


@pytest.mark.parametrize(
    "output, text",
    [
        (None, "must return a dict"),
        ({"reward": 1.0}, "must return observations, done; it returned reward"),
        (GOOD | {"reward": None}, "finite number as reward"),
        (GOOD | {"reward": True}, "finite number as reward"),
        (GOOD | {"reward": float("inf")}, "finite number as reward"),
        (GOOD | {"done": 1}, "done as a bool"),
        (GOOD | {"done": False, "truncated": True}, "truncated"),
        (GOOD | {"truncated": "turns"}, "truncated as a bool"),
        (GOOD | {"observations": "hello"}, "list of chat messages"),
        (GOOD | {"observations": [{"content": "hello"}]}, "each with a role"),
    ],
)
def test_invalid_step_outputs_are_named(output, text):
    assert check_step_output(GOOD) is GOOD
    with pytest.raises(ContractError, match=text):
        check_step_output(output)


def test_invalid_init_outputs_are_named():
    class Forgetful(Counting):
        def init(self, prompt):
            return prompt

    with pytest.raises(ContractError, match="init"):
        Episode(Forgetful()).init(PROMPT)

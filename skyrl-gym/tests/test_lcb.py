import json

import pytest

import skyrl_gym
from skyrl_gym.envs.lcb.livecodebench import lcb_check_correctness

from .sandboxed import sandboxed

DOUBLE = [
    {"input": "3\n", "output": "6\n", "testtype": "stdin"},
    {"input": "10\n", "output": "20\n", "testtype": "stdin"},
]
PAIR = [
    {"input": '[2, 7]\n"x"', "output": '["x", 9]', "testtype": "functional", "metadata": {"func_name": "pair"}},
    {"input": '[]\n"y"', "output": '["y", 0]', "testtype": "functional", "metadata": {"func_name": "pair"}},
]
RIGHT = "def main():\n    print(int(input()) * 2)\n\nif __name__ == '__main__':\n    main()"
WRONG = RIGHT.replace("* 2", "+ 3")
NOT_CALLED = RIGHT.partition("\n\nif")[0]
PAIR_RIGHT = "class Solution:\n    def pair(self, xs: List[int], name: str):\n        return name, sum(xs)"


def make(tests):
    ground_truth = tests if isinstance(tests, str) else json.dumps(tests)
    return skyrl_gym.make("lcb", env_config={}, extras={"reward_spec": {"ground_truth": ground_truth}})


@sandboxed
@pytest.mark.parametrize("code, reward", [(RIGHT, 1.0), (WRONG, 0.0), (NOT_CALLED, 0.0)])
def test_program_earns_one_when_every_test_passes(code, reward):
    env = make(DOUBLE)
    output = env.step(f"```python\n{code}\n```")
    assert (output["reward"], output["done"], output["observations"]) == (reward, True, [])
    assert output["metadata"] == {"parsed_code": code}
    assert env.get_metrics()["outcome_reward"] == reward


@sandboxed
def test_method_gets_json_arguments_and_tuple_equals_list():
    assert make(PAIR).step(f"```python\n{PAIR_RIGHT}\n```")["reward"] == 1.0
    assert make(PAIR).step(f"```python\n{PAIR_RIGHT.replace('sum', 'len')}\n```")["reward"] == 0.0


def test_response_without_code_earns_zero():
    assert make(DOUBLE).step("It is doubled.") == {
        "observations": [],
        "reward": 0.0,
        "done": True,
        "metadata": {"parsed_code": None},
    }


@sandboxed
def test_lcb_check_correctness_returns_bool(capsys):
    assert lcb_check_correctness(DOUBLE, RIGHT) is True
    assert lcb_check_correctness(DOUBLE, WRONG, timeout=3, debug=True) is False
    assert "'expected': '20" in capsys.readouterr().out  # 3 + 3 is right by luck, 10 + 3 is not
    assert lcb_check_correctness(PAIR, PAIR_RIGHT) is True
    assert lcb_check_correctness(DOUBLE, "while True: pass", timeout=1) is False
    with pytest.raises(AssertionError, match="at least one test"):
        lcb_check_correctness([], RIGHT)

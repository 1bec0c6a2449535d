import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from skyrl_gym.envs.registration import EnvSpec
from skyrl_gym.error import Error, InfraError, TaskError
from skyrl_gym.vector import Failed, make_vec

sys.path.insert(0, str(Path(__file__).parent))  # spawned processes take the path along
TROUBLED = EnvSpec(id="troubled", entry_point="troubled_env:TroubledEnv")
ALL_MODES = pytest.mark.parametrize("mode", ["thread", "process"])


def rows(*names):
    return [{"prompt": [{"role": "user", "content": "hello"}], "name": name} for name in names]


def make_troubled(*names, **settings):
    return make_vec(TROUBLED, rows(*names), **{"timeout_seconds": 30, **settings})


@pytest.fixture(autouse=True)
def nothing_is_left_behind():
    """No process, and no thread but those that hang on purpose."""
    others = set(multiprocessing.active_children())
    yield
    assert set(multiprocessing.active_children()) <= others
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("skyrl-gym-vec")]


@ALL_MODES
def test_results_stand_in_the_order_of_the_rows(mode):
    with make_troubled("a", "b", "c", mode=mode, num_workers=2) as envs:
        assert [messages[0]["content"] for messages in envs.init(seeds=[1, 2, None])] == [
            "hello a 1",
            "hello b 2",
            "hello c None",
        ]
        outputs = envs.step(["x", "y", "z"])
        assert [output["observations"][0]["content"] for output in outputs] == ["a: x", "b: y", "c: z"]
        assert [output["reward"] for output in envs.step(["x", "y", "z"])] == [2.0, 2.0, 2.0]
        assert envs.metrics() == [{"turns": 2}] * 3


@ALL_MODES
def test_what_one_raises_stands_in_its_place_and_the_others_go_on(mode):
    with make_troubled("a", "bad row", "c", "d", mode=mode) as envs:
        first = envs.init()
        assert isinstance(first[1], Failed) and isinstance(first[1].error, TaskError)
        assert "bad row" in first[1].traceback
        outputs = envs.step(["raise", "x", "answer wrongly", "raise oddly"])
        assert isinstance(outputs[0].error, InfraError) and str(outputs[0].error) == "the server is down"
        assert outputs[1] is first[1]  # a failure stays until the next init
        assert "step must return a dict" in str(outputs[2].error)
        assert "one and two" in str(outputs[3].error)  # also where the exception itself cannot travel
        assert envs.done == [True] * 4


@ALL_MODES
def test_a_slot_that_is_done_is_skipped_until_the_next_init(mode):
    with make_troubled("a", "b", mode=mode) as envs:
        assert envs.done == [True, True]
        envs.init()
        outputs = envs.step(["end", "x"])
        assert (outputs[0]["done"], outputs[1]["done"], envs.done) == (True, False, [True, False])
        assert envs.step(["ignored", None]) == [None, None]
        assert envs.metrics() == [{"turns": 1}, {"turns": 1}]
        envs.init()
        assert envs.done == [False, False]
        assert envs.step(["x", "x"])[0]["reward"] == 1.0


def test_a_thread_that_hangs_costs_its_slot_and_its_neighbours_on_the_same_worker():
    with make_troubled("a", "b", "c", num_workers=2, timeout_seconds=0.2) as envs:
        envs.init()
        started = time.monotonic()
        outputs = envs.step(["hang", "x", "x"])  # a and c share a worker
        assert isinstance(outputs[0].error, TimeoutError) and "did not return within 0.2 s" in str(outputs[0].error)
        assert outputs[1]["reward"] == 1.0
        assert "its worker was lost in a call of slot 0" in str(outputs[2].error)
        assert time.monotonic() - started < 2
        assert [isinstance(each, Failed) for each in envs.init()] == [False] * 3  # a new episode is a new chance


def test_a_constructor_or_init_that_hangs_is_a_failure_too():
    with make_troubled("hangs in init", "b", timeout_seconds=0.2) as envs:
        first = envs.init()
        assert isinstance(first[0].error, TimeoutError)
        assert envs.step(["x", "x"])[1]["reward"] == 1.0


def test_a_process_that_hangs_is_killed():
    with make_troubled("a", "b", mode="process") as envs:
        envs.init()
        pids = [output["metadata"]["pid"] for output in envs.step(["x", "x"])]
        assert len({*pids, os.getpid()}) == 3
        envs.timeout_seconds = 0.5
        outputs = envs.step(["hang", "x"])
        assert isinstance(outputs[0].error, TimeoutError) and "its process was killed" in str(outputs[0].error)
        assert outputs[1]["reward"] == 2.0
        with pytest.raises(ProcessLookupError):
            os.kill(pids[0], 0)
        os.kill(pids[1], 0)


def test_a_process_that_dies_is_named_with_its_exit_code():
    with make_troubled("a", "b", mode="process") as envs:
        envs.init()
        assert str(envs.step(["die", "x"])[0].error) == "the environment's process ended with exit code 3"
        victim = envs.step([None, "x"])[1]["metadata"]["pid"]
        os.kill(victim, signal.SIGKILL)
        assert str(envs.step([None, "x"])[1].error) == "the environment's process ended with signal SIGKILL"
        assert [isinstance(each, Failed) for each in envs.init()] == [False, False]


def test_rows_that_cannot_travel_fail_alone():
    unsent = {"prompt": [{"role": "user", "content": "hello"}], "name": "b", "callback": lambda: None}
    with make_vec(TROUBLED, [*rows("a"), unsent], mode="process") as envs:
        first = envs.init()
        assert first[0][0]["content"] == "hello a None"
        assert "pickle" in str(first[1].error)


def test_prompts_may_come_apart_from_rows():
    with make_vec(TROUBLED, [{"name": "a"}]) as envs:
        with pytest.raises(ValueError, match="row 0 has no column `prompt`"):
            envs.init()
        assert envs.init([[{"role": "user", "content": "hi"}]])[0][0]["content"] == "hi a None"


def test_environments_that_await_work_too():
    async_env = importlib.import_module("troubled_env").TroubledEnv

    class AsyncEnv(async_env):
        async def step(self, action):
            return async_env.step(self, action)

    with make_vec(EnvSpec(id="async", entry_point=AsyncEnv), rows("a", "b")) as envs:
        envs.init()
        assert [output["reward"] for output in envs.step(["x", "x"])] == [1.0, 1.0]


def test_mistakes_are_named():
    with pytest.raises(Error, match="No registered env with id: gsm8x; did you mean gsm8k"):
        make_vec("gsm8x", rows("a"))
    with pytest.raises(ValueError, match="at least one row"):
        make_vec(TROUBLED, [])
    with pytest.raises(ValueError, match="mode must be thread or process; got 'fork'"):
        make_vec(TROUBLED, rows("a"), mode="fork")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="register it as 'package"):
        make_vec(EnvSpec(id="local", entry_point=lambda **kwargs: None), rows("a"), mode="process")  # type: ignore[arg-type, return-value]
    with make_troubled("a", "b") as envs:
        envs.init()
        with pytest.raises(ValueError, match="actions must be one for each of the 2 environments; got 1"):
            envs.step(["x"])
    envs.close()  # a second time
    with pytest.raises(RuntimeError, match="closed"):
        envs.step(["x", "x"])


SCRIPT = """
from skyrl_gym import make_vec
rows = [{"prompt": [{"role": "user", "content": "2 + 2?"}], "reward_spec": {"ground_truth": "4"}}]
"""
USE = """
with make_vec("gsm8k", rows, mode="process") as envs:
    envs.init()
    print(envs.step(["#### 4"]))
"""


def test_script_without_a_main_guard_is_told_of_it(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT + USE)
    without = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert 'under `if __name__ == "__main__":`' in without.stdout  # as the slot's failure
    assert "AttributeError" not in without.stderr
    indented = USE.replace("\n", "\n    ")
    script.write_text(f'{SCRIPT}if __name__ == "__main__":\n    {indented}')
    guarded = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert (guarded.stderr, "'reward': 1.0" in guarded.stdout) == ("", True)

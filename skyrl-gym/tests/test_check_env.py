import random
import sqlite3
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

import skyrl_gym
from skyrl_gym.check import CheckError, check_env, examples_of, spec_of
from skyrl_gym.check.__main__ import main
from skyrl_gym.check.services import services_for
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput, Example, ground_truth_of
from skyrl_gym.error import InfraError
from skyrl_gym.sandbox.testing import require_sandbox

from .sandboxed import RUNS_CODE
from .shipped import EVERY_ENVIRONMENT


class GoodEnv(BaseTextEnv):
    """Conforming environment: asks for a number; two turns, observations, a seed."""

    def __init__(self, env_config=None, extras=None):
        super().__init__()
        extras = extras or {}
        self.ground_truth = str(ground_truth_of(extras))
        self.max_turns = extras.get("max_turns", 3)

    def init(self, prompt, seed=None):
        self.luck = random.Random(seed).random()
        return prompt, {}

    def step(self, action):
        self.turns += 1
        is_right = action.strip() == self.ground_truth
        done = is_right or self.turns >= self.max_turns
        observations = [] if done else [self.reply()]
        return self.output(observations, float(is_right), done)

    def reply(self):
        return {"role": "user", "content": f"No. Your luck is {self.luck}."}

    def output(self, observations, reward, done):
        return BaseTextEnvStepOutput(observations=observations, reward=reward, done=done, metadata={})

    def get_metrics(self):
        return {"turns": self.turns}

    @classmethod
    def examples(cls):
        prompts = [[{"role": "user", "content": f"Say {number}."}] for number in (1, 2)]
        return [
            Example(prompt=prompt, extras={"reward_spec": {"ground_truth": str(number)}}, oracle=["hm", str(number)])
            for number, prompt in enumerate(prompts, start=1)
        ]


def test_valid_environment_has_no_findings():
    report = check_env(GoodEnv)
    assert (report.ok, report.findings, report.num_tasks) == (True, [], 2)
    assert "0 errors in 2 tasks" in str(report)


def broken(**methods):
    """The good environment with other methods."""
    return type("BrokenEnv", (GoodEnv,), methods)


def with_reply(reply):
    return broken(reply=lambda self: reply)


def without_row(self, env_config=None, extras=None):
    BaseTextEnv.__init__(self)
    self.ground_truth = extras["reward_spec"]["ground_truth"]
    self.max_turns = extras.get("max_turns", 3)


def with_needed_config(self, env_config=None, extras=None):
    GoodEnv.__init__(self, env_config, extras)
    self.server = env_config.server


def changing_its_row(self, env_config=None, extras=None):
    GoodEnv.__init__(self, env_config, extras)
    extras["reward_spec"]["method"] = "rule"


def raising_on(text, error):
    def step(self, action):
        if text(action):
            raise error
        return GoodEnv.step(self, action)

    return step


def ignoring_the_row(self, env_config=None, extras=None):
    GoodEnv.__init__(self, env_config, extras)
    self.max_turns = 5


def not_counting(self, action):
    output = GoodEnv.step(self, action)
    self.turns_taken = self.turns
    self.turns = 0 if output["done"] else self.turns
    return output


shared: list[str] = []


def sharing(self, action):
    shared.append(action)
    return GoodEnv.step(self, action)


def close_once(self):
    if getattr(self, "is_closed", False):
        raise ValueError("closed already")
    self.is_closed = True


def closing_what_init_made(self):
    del self.luck
    self.luck = None


BROKEN = {
    "reward None": (broken(output=lambda s, o, r, d: {"observations": o, "reward": None, "done": d}), "finite number"),
    "reward nan": (broken(output=lambda s, o, r, d: {"observations": o, "reward": float("nan"), "done": d}), "finite"),
    "done 1": (broken(output=lambda s, o, r, d: {"observations": o, "reward": r, "done": int(d)}), "done as a bool"),
    "no observations": (broken(output=lambda s, o, r, d: {"reward": r, "done": d}), "step must return observations"),
    "metadata": (
        broken(output=lambda s, o, r, d: {"observations": o, "reward": r, "done": d, "metadata": []}),
        "metadata must be a dict",
    ),
    "truncated, not done": (
        broken(output=lambda s, o, r, d: {"observations": o, "reward": r, "done": d, "truncated": True}),
        "truncated",
    ),
    "observation is text": (
        broken(output=lambda s, o, r, d: {"observations": "x", "reward": r, "done": d}),
        "a list of",
    ),
    "content is a number": (with_reply({"role": "user", "content": 3}), "content is neither text"),
    "odd role": (with_reply({"role": "environment", "content": ""}), "role 'environment'"),
    "not JSON": (with_reply({"role": "user", "content": "", "extra": {1, 2}}), "not JSON"),
    "not Unicode": (with_reply({"role": "user", "content": "\ud83d"}), "cannot be tokenized"),
    "row without ground truth": (broken(__init__=without_row), "without reward_spec must raise TaskError"),
    "settings required": (broken(__init__=with_needed_config), "env_config=None raised AttributeError"),
    "row changed": (broken(__init__=changing_its_row), "modifies its row"),
    "raises on nothing": (broken(step=raising_on(lambda a: a == "", KeyError("x"))), "empty: raised KeyError"),
    "raises on a surrogate": (
        broken(step=lambda s, a: (a.encode(), GoodEnv.step(s, a))[1]),
        "lone surrogate: raised UnicodeEncodeError",
    ),
    "echoes a surrogate": (
        broken(step=lambda s, a: (setattr(s, "reply", lambda: {"role": "user", "content": a}), GoodEnv.step(s, a))[1]),
        "not valid Unicode",
    ),
    "never done": (
        broken(step=lambda s, a: GoodEnv.step(s, a) | {"done": False, "observations": []}),
        "did not end the episode by step 1",
    ),
    "max_turns of the row": (broken(__init__=ignoring_the_row), r"extras\['max_turns'\] = 1 did not end"),
    "turns": (broken(step=not_counting), "turns is 0 after step 2"),
    "luck without a seed": (
        broken(init=lambda s, p: (setattr(s, "luck", random.random()), (p, {}))[1]),
        "gave different episodes: observations of step 1.*let init accept a seed",
    ),
    "shared state": (
        broken(step=sharing, reply=lambda s: {"role": "user", "content": shared[-2] if len(shared) > 1 else ""}),
        "different episodes|share state",
    ),
    "close twice": (broken(close=close_once), "a second close before init raised ValueError"),
    "close before init": (broken(close=closing_what_init_made), "close before init raised AttributeError"),
    "metrics before a step": (broken(get_metrics=lambda s: {"mean": 1 / s.turns}), "ZeroDivisionError"),
    "metrics infinite": (broken(get_metrics=lambda s: {"x": float("inf")}), "returned x = inf"),
    "aggregate of nothing": (
        broken(aggregate_metrics=staticmethod(lambda metrics: {"x": sum(m["turns"] for m in metrics) / len(metrics)})),
        "ZeroDivisionError",
    ),
    "example unsolved": (
        broken(examples=classmethod(lambda c: [Example([], GoodEnv.examples()[0].extras, ["no"])])),
        "does not end",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_contract_violation_is_found(name):
    env_class, expected = BROKEN[name]
    with pytest.raises(CheckError, match=expected) as caught:
        check_env(env_class)
    assert not caught.value.report.ok


def test_hang_is_found_without_hanging_check():
    slow = broken(step=lambda s, a: (time.sleep(3600) if a == "" else None, GoodEnv.step(s, a))[1])
    started = time.monotonic()
    report = check_env(slow, seconds_per_call=0.3, raise_on_error=False)
    assert [str(finding) for finding in report.findings] == [
        "error: hostile actions: empty: step did not return within 0.3 s"
    ]
    assert report.slowest_call.startswith("step, 0.3")
    assert time.monotonic() - started < 10


def test_thread_bound_state_is_found():
    """The trainer makes every call from another thread."""

    def connect(self, env_config=None, extras=None):
        GoodEnv.__init__(self, env_config, extras)
        self.database = sqlite3.connect(":memory:")

    def query(self, action):
        self.database.execute("SELECT 1")
        return GoodEnv.step(self, action)

    with pytest.raises(CheckError, match="ProgrammingError"):
        check_env(broken(__init__=connect, step=query))


def test_service_failure_is_not_an_environment_finding():
    with pytest.raises(InfraError, match="down"):
        check_env(broken(step=raising_on(lambda action: True, InfraError("the judge is down"))))


def test_warnings_do_not_fail():
    env_class = broken(step=lambda s, a: GoodEnv.step(s, a) | {"postprocessed_action": a})
    report = check_env(env_class)
    assert report.ok
    assert {finding.severity for finding in report.findings} == {"warning"}
    assert "tokens that it did not generate" in str(report)


def test_misused_column_without_task_error_is_warning():
    def with_limit(self, env_config=None, extras=None):
        GoodEnv.__init__(self, env_config, extras)
        self.bonus = len(extras.get("bonus", ""))

    tasks = [replace(example, extras={**example.extras, "bonus": "abc"}) for example in GoodEnv.examples()]
    (finding,) = check_env(broken(__init__=with_limit), tasks).findings
    assert str(finding).startswith(
        "warning: misused columns: a row with bonus = -1 should raise TaskError; it raised Typ"
    )


def test_check_accepts_prompts_or_rows_and_id_or_instance():
    prompt = [{"role": "user", "content": "What is 6 times 7?"}]
    row = {"prompt": prompt, "reward_spec": {"method": "rule", "ground_truth": "42"}}
    assert check_env("gsm8k", [row]).env == "gsm8k"
    env = skyrl_gym.make("gsm8k", extras={"reward_spec": row["reward_spec"]})
    assert check_env(env, [row]).ok

    class Free(BaseTextEnv):
        def __init__(self, env_config=None, extras=None):
            super().__init__()

        def step(self, action):
            self.turns += 1
            return BaseTextEnvStepOutput(observations=[], reward=0.0, done=True, metadata={})

    assert check_env(Free(), [prompt]).ok
    with pytest.raises(ValueError, match="examples"):
        check_env(Free)
    with pytest.raises(TypeError, match="expected an id"):
        check_env(3)  # type: ignore[arg-type]


@EVERY_ENVIRONMENT
def test_shipped_environments_keep_their_promises(env_id):
    if env_id in RUNS_CODE:
        require_sandbox()
    examples = examples_of(spec_of(env_id))
    with services_for(env_id) as env_config:
        check_env(env_id, examples, env_config=env_config, max_tasks=2)


def test_async_environments_are_checked_too():
    async def step(self, action):
        return GoodEnv.step(self, action)

    async def init(self, prompt, seed=None):
        return GoodEnv.init(self, prompt, seed)

    assert check_env(broken(step=step, init=init)).findings == []


def test_command_line_reports_findings_and_fails(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "my_envs", SimpleNamespace(Good=GoodEnv, Bad=BROKEN["never done"][0]))
    assert main(["my_envs:Good"]) == 0
    assert main(["my_envs:Good", "my_envs:Bad"]) == 1
    assert "error: turn limit: extras['max_turns'] = 1 did not end the episode" in capsys.readouterr().out
    assert main(["gsm8x"]) == 2
    assert "did you mean gsm8k" in capsys.readouterr().err

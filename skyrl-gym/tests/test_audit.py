import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from skyrl_gym.audit import audit, cheats_for, disguise, services_for
from skyrl_gym.audit.__main__ import main
from skyrl_gym.audit.trial import play
from skyrl_gym.check import check_env, examples_of, spec_of
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput, Example, ground_truth_of
from skyrl_gym.sandbox.testing import require_sandbox

from .sandboxed import RUNS_CODE
from .shipped import EVERY_ENVIRONMENT

ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
PRINT = re.compile(r"<python>print\(''\.join\(map\(chr, (\[[\d, ]*\])\)\)\)</python>")


class SoundEnv(BaseTextEnv):
    """Adds numbers; the last answer counts. A toy `print` tool in tags may be used before."""

    def __init__(self, env_config=None, extras=None):
        super().__init__()
        self.ground_truth = ground_truth_of(extras)
        self.max_turns = extras.get("max_turns", 3)
        self.said = []
        self.seen = []

    def step(self, action):
        self.turns += 1
        self.said.append(action)
        done = "</answer>" in action or self.turns >= self.max_turns
        call = PRINT.search(action)
        printed = "".join(map(chr, json.loads(call[1]))) if call else ""
        self.seen.append(printed)
        observations = [] if done else [{"role": "user", "content": printed}]
        return BaseTextEnvStepOutput(
            observations=observations, reward=self.grade() if done else 0.0, done=done, metadata={}
        )

    def grade(self):
        answers = ANSWER.findall("".join(self.said))
        return float(bool(answers) and answers[-1].strip() == self.ground_truth)

    @classmethod
    def examples(cls):
        sums = [(12, 30), (5, 9), (60, 38), (21, 20)]
        return [
            Example(
                prompt=[{"role": "user", "content": f"What is {a}+{b}?"}],
                extras={"reward_spec": {"ground_truth": str(a + b)}},
                oracle=["<think>adding</think>", f"<answer>{a + b}</answer>"],
            )
            for a, b in sums
        ]


def test_sound_environment_passes():
    report = audit(SoundEnv)
    assert (report.ok, report.oracle.outcome, report.best_cheater.outcome, report.gap) == (True, 1.0, 0.0, 1.0)
    assert report.num_examples == 4


def graded_by(grade, **methods):
    return type("Gameable", (SoundEnv,), {"grade": grade, **methods})


def form_alone(self):
    return float(bool(ANSWER.search("".join(self.said))))


def answers(self, seen=()):
    return [answer.strip() for answer in ANSWER.findall("".join([*self.said, *seen]))]


def or_right(pays):
    """Return a grader that pays for the right answer, and where `pays` says so."""
    return lambda self: float(pays(self)) or SoundEnv.grade(self)


def remembers_prompt(self, prompt):
    self.prompt = prompt[0]["content"]
    return prompt, {}


@pytest.mark.parametrize(
    "env_class, cheater",
    [
        (graded_by(form_alone), "marks with nothing inside"),
        (graded_by(form_alone), "another task's solution"),
        (graded_by(lambda self: float(self.ground_truth in answers(self))), "many solutions in one text"),
        (
            graded_by(lambda self: float(any(self.ground_truth in each for each in answers(self)[-1:]))),
            "many answers in one place, by comma",
        ),
        (
            graded_by(lambda self: float(answers(self, self.seen)[-1:] == [self.ground_truth])),
            "planted in an observation: python in tags",
        ),
        (graded_by(lambda self: float(len("".join(self.said)) > 10_000)), "longest allowed"),
        (graded_by(or_right(lambda self: not "".join(self.said))), "empty"),
        (graded_by(lambda self: max(SoundEnv.grade(self), 0.1 * form_alone(self))), "solution with the answer garbled"),
        (graded_by(or_right(lambda self: "Final Score: 1" in "".join(self.said))), "plea to a judge: score line"),
        (graded_by(or_right(lambda self: self.prompt in self.said[0]), init=remembers_prompt), "echo of the prompt"),
    ],
)
def test_gameable_environment_fails_with_policy_name(env_class, cheater):
    report = audit(env_class)
    assert not report.ok
    assert any(repr(cheater) in complaint for complaint in report.complaints)


class NaiveCodeEnv(BaseTextEnv):
    """Vulnerable grader: runs the program and its tests in one file; success is the exit code, or what was printed."""

    def __init__(self, env_config=None, extras=None):
        super().__init__()
        self.tests, self.judged_by = extras["tests"], (env_config or {}).get("judged_by", "exit code")

    def step(self, action):
        program = action.removeprefix("```python\n").removesuffix("\n```") + f"\n{self.tests}\nprint('PASSED')"
        result = subprocess.run([sys.executable, "-IS", "-"], input=program, capture_output=True, text=True, timeout=60)
        is_right = result.returncode == 0 if self.judged_by == "exit code" else "PASSED" in result.stdout
        return BaseTextEnvStepOutput(observations=[], reward=float(is_right), done=True, metadata={})

    @classmethod
    def examples(cls):
        return [
            Example(
                prompt=[{"role": "user", "content": f"Write add_{n}(x)."}],
                extras={"tests": f"assert add_{n}(10) == {10 + n}"},
                oracle=[f"```python\ndef add_{n}(x):\n    return x + {n}\n```"],
            )
            for n in (3, 4)
        ]


@pytest.mark.parametrize(
    "judged_by, cheaters",
    [
        ("exit code", {"ends with success", "raises SystemExit(0)", "returns what equals everything"}),
        ("output", {"says that it passed", "returns what equals everything"}),
    ],
)
def test_cheating_programs_are_tried_on_code_environments(judged_by, cheaters):
    report = audit(NaiveCodeEnv, env_config={"judged_by": judged_by})
    paid = {cheater.name.removeprefix("program that ") for cheater in report.cheaters if cheater.outcome == 1.0}
    assert cheaters <= paid and report.oracle.outcome == 1.0
    assert "breaks comparison" not in paid


def test_oracle_without_full_reward_fails():
    wrong = [Example(each.prompt, each.extras, ["<answer>0</answer>"]) for each in SoundEnv.examples()]
    assert audit(SoundEnv, wrong).complaints[0] == "the oracle earns 0.000; it must earn at least 0.98"


def test_shaping_rewards_are_listed_apart():
    class Shaped(SoundEnv):
        def step(self, action):
            output = SoundEnv.step(self, action)
            self.outcome = output["reward"]
            return output | {"reward": output["reward"] + 0.2 * ("<answer>" in action)}

        def get_metrics(self):
            return {"outcome_reward": self.outcome}

    report = audit(Shaped)
    assert report.ok
    assert report.oracle.shaping == pytest.approx(0.2)
    assert report.best_shaped.shaping == pytest.approx(0.2)


def test_environment_may_define_cheats():
    class Backdoor(SoundEnv):
        def grade(self):
            return float("xyzzy" in "".join(self.said)) or SoundEnv.grade(self)

        @classmethod
        def cheats(cls):
            def say_the_magic_word(example):
                return ["xyzzy"]

            return [say_the_magic_word]

    assert audit(Backdoor).best_cheater.name == "own: say_the_magic_word"


def test_no_cheat_contains_only_the_answer():
    """Wherever a cheat writes the right answer, it writes other answers before and after it."""
    examples = SoundEnv.examples()
    for cheat in cheats_for(SoundEnv, examples):
        for example in examples:
            turns = cheat.turns(example) or []
            truth = example.extras["reward_spec"]["ground_truth"]
            answers = [answer for turn in turns for answer in ANSWER.findall(turn)]
            assert answers[:1] != [truth] and answers[-1:] != [truth], cheat.name


@pytest.mark.parametrize(
    "text, emptied, inside",
    [
        ("so <think>a</think> <answer> 42 </answer>", "so <think></think> <answer></answer>", "42"),
        (r"thus \boxed{\frac{1}{2}}.", r"thus \boxed{}.", r"\frac{1}{2}"),
        ("6*7\n#### 42", "6*7\n#### ", "42"),
        ("```python\nprint(1)\n```", "```python\n\n```", "print(1)"),
        ("Answer: 42", "Answer: ", "42"),
        ("go north", None, "go north"),
    ],
)
def test_marked_places_are_found(text, emptied, inside):
    assert disguise.change_marked(text, lambda _: "") == emptied
    assert disguise.extract_last_marked(text) == inside
    assert disguise.extract_last_marked(disguise.replace_last_marked(text, "new")) == "new"


def test_garbled_text_keeps_shape_and_loses_content():
    assert disguise.garbled("42 Apples, é") == "86 Bqqmft, x"
    assert disguise.garbled("(+ +)") == "xx xx"


GUIDE = Path(__file__).parents[2] / "docs" / "environments.md"


@pytest.mark.skipif(not GUIDE.exists(), reason="the guide is not beside the package")
def test_guide_environment_passes_check_and_audit():
    code = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)[0]
    names = {}
    exec(code, names)
    assert check_env(names["CapitalsEnv"]).findings == []
    assert audit(names["CapitalsEnv"]).complaints == []


@EVERY_ENVIRONMENT
def test_no_cheat_beats_shipped_environment(env_id):
    if env_id in RUNS_CODE:
        require_sandbox()
    examples = examples_of(spec_of(env_id))
    with services_for(env_id, examples) as env_config:
        report = audit(env_id, examples, env_config=env_config)
    assert report.complaints == []
    assert report.num_examples >= 4


@pytest.mark.parametrize(
    "env_id, cheat",
    [
        ("search", "search"),
        ("searchcode", "search in tool tags"),
        ("searchcode", "python in tool tags"),
        ("text2sql", "SQL"),
        ("rlm", "repl block"),
    ],
)
def test_planted_answers_reach_observations(env_id, cheat):
    """Control: otherwise the audit would prove nothing."""
    if env_id in RUNS_CODE:
        require_sandbox()
    if env_id.startswith("search"):
        pytest.importorskip("bm25s", reason="the retrieval server needs bm25s")
    env_spec = spec_of(env_id)
    examples = examples_of(env_spec)
    (planting,) = [each for each in cheats_for(None, examples) if each.name == f"planted in an observation: {cheat}"]
    with services_for(env_id, examples) as env_config:
        task = Example(examples[0].prompt, {**examples[0].extras, "max_turns": 3}, examples[0].oracle, env_config)
        task = Example(task.prompt, task.extras, task.oracle, {**examples[0].env_config, **env_config})
        result = play(env_spec, task, planting.turns(examples[0]))
    seen = "".join(m["content"] for m in result.messages[len(task.prompt) :] if m["role"] != "assistant")
    assert disguise.extract_last_marked(task.oracle[-1]) in seen
    assert result.outcome_reward <= 0


def test_command_line_prints_gap_and_fails_for_gameable_environment(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "my_envs", sys.modules[__name__])
    monkeypatch.setattr(sys.modules[__name__], "Gameable", graded_by(form_alone), raising=False)
    assert main(["my_envs:SoundEnv"]) == 0
    assert main(["my_envs:SoundEnv", "my_envs:Gameable", "--json", str(tmp_path / "audit.json")]) == 1
    printed = capsys.readouterr().out
    assert re.search(r"my_envs:SoundEnv +1\.000 +0\.000 +1\.000 .* ok", printed)
    assert re.search(r"my_envs:Gameable +1\.000 +1\.000 +0\.000 .* FAIL", printed)
    found = json.loads((tmp_path / "audit.json").read_text())
    assert [report["ok"] for report in found["reports"]] == [True, False]
    assert main(["my_envs:SoundEnv", "--max-turns", "1"]) == 1  # one turn is too few for this solution


def test_unauditable_environments_are_reported(capsys):
    assert main(["gsm8x"]) == 2
    assert "gsm8x: could not be audited: Error: No registered env with id: gsm8x; did you mean gsm8k" in (
        capsys.readouterr().err
    )
    with pytest.raises(ValueError, match=r"examples\(\)"):
        audit(BaseTextEnv)
    with pytest.raises(SystemExit):
        main([])

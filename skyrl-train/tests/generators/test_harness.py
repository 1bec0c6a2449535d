"""Harnesses: programs and functions that know a base URL and a key alone become trajectories, with every token as it
was drawn, and whatever they do wrong has a name."""

import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from openai import OpenAI

from skyrl_gym.error import InfraError
from skyrl_gym.sandbox import make_sandbox
from skyrl_gym.sandbox.container_engine import EngineName
from skyrl_gym.sandbox.testing import needed_image
from skyrl_train.config import GeneratorConfig, SamplingParams
from skyrl_train.config.harness import HarnessConfig
from skyrl_train.endpoint.session_endpoint import create_socket_folder
from skyrl_train.errors import ConfigError
from skyrl_train.generators.base import BatchMetadata, GeneratorInput, TrajectoryID
from skyrl_train.generators.harness import generator
from skyrl_train.generators.harness.generator import HarnessGenerator
from skyrl_train.generators.harness.task import HarnessTask, convert_reward, grade_workspace
from skyrl_train.inference_engines.base import (
    Completion,
    EngineInfo,
    GenerationRequest,
)
from skyrl_train.rollouts.types import RolloutBatch, Trajectory
from skyrl_train_testing.harness_audit import audit_grade

from .conftest import ScriptedEngine

needs_sandbox = pytest.mark.usefixtures("needs_local")

ASK = """ask() {
    curl -sS --fail-with-body "$OPENAI_BASE_URL/chat/completions" \\
        -H "Authorization: Bearer $OPENAI_API_KEY" -H 'Content-Type: application/json' \\
        -d "{\\"model\\": \\"$SKYRL_MODEL\\", \\"temperature\\": 0, \\"messages\\": $1}"
}
"""
"""A shell function: the endpoint's answer to messages."""
ONCE = ASK + 'ask \'[{"role": "user", "content": "go"}]\'\n'
PASSES = {"command": ["sh", "-c", "exit 0"]}


class Model(ScriptedEngine):
    """Engine that answers by a function of the prompt's text."""

    def __init__(self, tokenizer: Any, answer: Callable[[str], str], max_model_len: int = 512) -> None:
        super().__init__(tokenizer, {})
        self.answer, self.max_model_len = answer, max_model_len

    async def describe(self) -> EngineInfo:
        size = self.max_model_len
        return EngineInfo(backend="scripted", release="0", model="m", vocab_size=200, max_model_len=size, dtype=None)

    async def generate(self, request: GenerationRequest) -> Completion:
        self.requests.append(request)
        params = request.sampling_params
        text = self.answer(self.tokenizer.decode(request.prompt_token_ids))
        ids: Any = [*self.tokenizer(text, add_special_tokens=False)["input_ids"], self.tokenizer.eos_token_id]
        is_cut = len(ids) > params["max_tokens"]
        ids = ids[: params["max_tokens"]]
        log_probs = [-0.5 - place for place in range(len(ids))]
        return Completion(ids, "length" if is_cut else "stop", [7] * len(ids), log_probs, text)


async def trajectories_of(
    engine: Model, harness: HarnessConfig, rows: Sequence[dict[str, Any]], text: str = "task", **settings: Any
) -> tuple[list[Trajectory], RolloutBatch]:
    sampling = SamplingParams(max_generate_length=60)
    cfg = GeneratorConfig(model_name="m", sampling_params=sampling, harness=harness, max_rollout_retries=0, **settings)
    generator = HarnessGenerator(cfg, engine, engine.tokenizer)
    batch = GeneratorInput(
        prompts=[
            row.get("prompt") or [{"role": "user", "content": f"{text} {number}"}] for number, row in enumerate(rows)
        ],
        env_classes=[""] * len(rows),
        env_extras=list(rows),
        trajectory_ids=[TrajectoryID(f"row {row.get('uid', number)}", number) for number, row in enumerate(rows)],
        batch_metadata=BatchMetadata(1, "train"),
    )
    rollouts = await generator.generate_groups(batch)
    return rollouts.trajectories, rollouts


def certified(trajectory: Trajectory) -> Any:
    assert trajectory.certificate is not None
    return trajectory.certificate


@needs_sandbox
async def test_sandboxed_programs_become_trajectories_with_named_failures(characters: Any):
    """Shell scripts with curl: one that works, and those that a user may bring in the first hour."""
    scripts = {
        "works": ASK + 'ask "[{\\"role\\": \\"user\\", \\"content\\": \\"$SKYRL_TASK\\"}]" > answer.json\n'
        "grep -o 'fixed[0-9]*' answer.json > result; test \"$(cat result)\" = fixed0\n"
        "! curl -sS -m 1 http://192.0.2.1 2>/dev/null && echo done && echo noted >&2\n",
        "crashes": ONCE + "exit 3\n",
        "hangs": ONCE + "sleep 60\n",
        "silent": "echo I need no model\n",
        "wrong key": "OPENAI_API_KEY=other\n" + ONCE,
        "no program": "exec no-such-program\n",
        "never ends": ONCE + 'while ask \'[{"role": "user", "content": "again"}]\'; do :; done; exit 9\n',
    }
    rows = [{"files": {"agent.sh": text, "other": None}, "grade": PASSES} for text in scripts.values()]
    rows[0]["grade"] = {"command": ["sh", "check.sh"], "files": {"check.sh": 'test "$(cat result)" = fixed0'}}
    harness = HarnessConfig(command=["sh", "agent.sh"], deadline_seconds=3, max_turns=3)
    model = Model(characters, lambda prompt: "fixed" + prompt.split("task ")[1][0] if "task" in prompt else "ok")
    started = time.monotonic()
    trajectories, rollouts = await trajectories_of(model, harness, rows)
    found = dict(zip(scripts, trajectories, strict=True))

    works = found["works"]
    assert (works.failure, works.reward, works.stop_reason) == (None, 1.0, "stop")
    assert (certified(works).num_trained, certified(works).exact_share) == (len("fixed0") + 1, 1.0)
    assert works.program_output == "done\nnoted"
    assert works.samples[0].log_probs == [-0.5 - place for place in range(7)]
    assert all(request.sampling_params["temperature"] == 1.0 for request in model.requests), "not the harness's 0"

    messages = {name: each.failure.message for name, each in found.items() if each.failure is not None}
    assert found["crashes"].reward == 1.0, "graded: an exit status must not take a bad grade out of the baseline"
    assert messages["hangs"].startswith("harness hung: it was terminated after generator.harness.deadline_seconds=3")
    assert messages["silent"].startswith("harness no_answer: it made no request that the endpoint accepted")
    assert "401" in messages["wrong key"] and "harness no_answer" in messages["wrong key"]
    assert "no-such-program" in messages["no program"]
    for name in messages:
        assert (found[name].reward, sum(map(sum, (s.loss_mask for s in found[name].samples)))) == (0.0, 0)

    ends = found["never ends"]  # its own budget's end is none of its faults
    assert (ends.failure, ends.reward, ends.stop_reason, len(ends.turn_lengths)) == (None, 1.0, "length", 2)
    assert certified(ends).not_trained == {"repeated_request": 3}, "the second of the three asked for the same again"
    assert rollouts.metrics["harness/num_crashed"] == 1 and rollouts.metrics["harness/num_no_answer"] == 3
    assert rollouts.metrics["tokens/exact_share"] == 1.0
    assert time.monotonic() - started < 60


@needs_sandbox
@pytest.mark.parametrize("names", ["aa", "ab"])
async def test_crash_is_graded_within_prompt_and_fails_when_all_crash(names: str, characters: Any):
    grade = {"command": ["false"]}
    rows = [{"uid": name, "files": {"agent.sh": ONCE + "exit 3"}, "grade": grade} for name in names]
    harness = HarnessConfig(command=["sh", "agent.sh"])
    trajectories, _ = await trajectories_of(Model(characters, lambda _: "ok"), harness, rows)
    assert [each.failure is None for each in trajectories] == [names == "aa"] * 2


AGENT = """
import json, os, sys, urllib.request
body = {"model": os.environ["SKYRL_MODEL"], "messages": [{"role": "user", "content": os.environ["SKYRL_TASK"]}]}
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
request = urllib.request.Request(url, json.dumps(body).encode(), headers)
answer = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
print(answer, os.getuid(), file=open("result", "w"))
try:
    urllib.request.urlopen("http://192.0.2.1", timeout=1)
except OSError:
    sys.exit(int(sys.argv[1]))
"""


@pytest.mark.full
@pytest.mark.parametrize("engine", get_args(EngineName))
async def test_program_in_container_reaches_only_endpoint(engine: EngineName, characters: Any):
    image = needed_image(engine)
    grade = {"command": ["sh", "-c", "read answer user <result && test $answer = fixed && test $user -ge 30000"]}
    rows = [{"files": {"agent.py": AGENT.replace("sys.argv[1]", status)}, "grade": grade} for status in ("0", "3")]
    harness = HarnessConfig(command=["python", "agent.py"], sandbox=engine, image=image, pull="never")
    (works, crashes), rollouts = await trajectories_of(Model(characters, lambda prompt: "fixed"), harness, rows)
    assert (works.failure, works.reward) == (None, 1.0)
    assert (certified(works).num_trained, certified(works).exact_share) == (len("fixed") + 1, 1.0)
    assert (crashes.failure, crashes.reward) == (None, 1.0)
    assert rollouts.metrics["harness/num_crashed"] == 1


FILES = {"f.py": "def f(a):\n    return a+2\n"}


@needs_sandbox
def test_grade_by_tests_gives_no_reward_for_tampering():
    assert audit_grade({"files": FILES, "grade": {"program": "f.py", "tests": ["assert f(20) == 27"]}}) == []


@needs_sandbox
def test_audit_detects_grade_importing_program():
    grade = {"command": ["python", "check.py"], "files": {"check.py": "import f\nassert f.f(20) == 27\n"}}
    assert {"leaves at once", "equals everything", "reads the test"} <= set(
        audit_grade({"files": FILES, "grade": grade})
    )


@needs_sandbox
@pytest.mark.parametrize("inputs", [{}, {"inputs": ["result.txt"]}])
def test_agent_cannot_veto_grade_of_command(inputs: dict[str, Any]):
    """Folders, links and read-only files in the place of the grader's file."""
    grade = {"command": ["sh", "tests/check.sh"], "files": {"tests/check.sh": "grep -qx 42 result.txt"}, **inputs}
    assert audit_grade({"files": {"result.txt": "0"}, "grade": grade}) == []
    right = HarnessTask(
        prompt=[], row={"grade": grade}, base_url="", api_key="", model="", sandbox=make_sandbox(), deadline_seconds=5
    )
    with right.sandbox:
        right.sandbox.write("result.txt", "42")
        assert grade_workspace(right, 5.0, make_sandbox) == 1.0


@needs_sandbox
async def test_task_over_argument_limit_is_passed_by_file(characters: Any):
    """The variable is left out, and a command line with it is refused, before anything starts or when it would."""
    long = "x" * (128 << 10)
    script = ONCE + 'test "${SKYRL_TASK-none}" = none && test "$1" = "$SKYRL_TASK_FILE" && wc -c < "$1" > size\n'
    script += "test $(wc -c < $SKYRL_MESSAGES_FILE) -gt $(cat size)\n"
    row = {"files": {"agent.sh": script}, "grade": {"command": ["grep", "-qx", str(len(long) + 2), "size"]}}
    model = Model(characters, lambda _: "ok")
    for sandbox in ("local", "process"):
        harness = HarnessConfig(command=["sh", "agent.sh", "{task_file}"], sandbox=sandbox)  # type: ignore[arg-type]
        [trajectory], _ = await trajectories_of(model, harness, [row], long)
        assert (trajectory.failure, trajectory.reward) == (None, 1.0)

    harness = HarnessConfig(command=["sh", "agent.sh", "-t={task}"], sandbox="process")
    message = f"has {len(long) + 2} bytes, too many for {{task}} in generator.harness.command.*Pass.* {{task_file}}"
    [trajectory], _ = await trajectories_of(model, harness, [row], long)
    assert trajectory.failure is not None and re.search(message, trajectory.failure.message)
    generator = HarnessGenerator(GeneratorConfig(model_name="m", harness=harness), None, characters)
    fits = [{"role": "user", "content": [{"type": "text", "text": long[:-4]}]}]
    generator.check_rows([row | {"prompt": fits}], "data.train_data")
    with pytest.raises(ConfigError, match=f"row 1 of data.train_data: .*{message.replace(str(len(long) + 2), '.*')}"):
        prompt = [{"role": "user", "content": long}]
        generator.check_rows([row | {"prompt": fits}, row | {"prompt": prompt}], "data.train_data")


def client_of(task: HarnessTask) -> OpenAI:
    return OpenAI(base_url=task.base_url, api_key=task.api_key, max_retries=0)


def ask(task: HarnessTask, *messages: tuple[str, str]) -> str:
    with client_of(task) as client:
        said = [{"role": role, "content": content} for role, content in messages]
        answer = client.chat.completions.create(model=task.model, messages=said)  # type: ignore[arg-type]
        return answer.choices[0].message.content or ""


SYSTEM = "You are a careful agent of many words."


def compacting(task: HarnessTask) -> float:
    """Two turns, then a summary in place of the history, then two more."""
    history = [("system", SYSTEM), ("user", task.text)]
    for _ in range(2):
        history += [("assistant", ask(task, *history)), ("user", "go on")]
    short = [("system", SYSTEM), ("user", "a summary of it")]
    short += [("assistant", ask(task, *short)), ("user", "finish")]
    ask(task, *short)
    return 1.0


def delegating(task: HarnessTask) -> float:
    """A sub-agent of two turns between the two turns of an agent."""
    history = [("system", SYSTEM), ("user", task.text)]
    history += [("assistant", ask(task, *history)), ("user", "the sub-agent says")]
    other = [("user", "another's work")]
    other += [("assistant", ask(task, *other)), ("user", "more")]
    ask(task, *other)
    ask(task, *history)
    return 0.5


FUNCTIONS = {
    "compacting": (compacting, [2, 2], [0, None]),
    "delegating": (delegating, [2, 2], [None]),
}


@pytest.mark.parametrize("name", list(FUNCTIONS))
async def test_function_rewriting_history_produces_tree(name: str, characters: Any):
    function, _, _ = FUNCTIONS[name]
    harness = HarnessConfig(function=f"{__name__}:{function.__name__}", sandbox="process")
    numbers = iter(range(100, 200))
    [trajectory], _ = await trajectories_of(Model(characters, lambda _: f"word {next(numbers)}"), harness, [{}])
    certificate = certified(trajectory)
    assert trajectory.failure is None and trajectory.reward == (1.0 if name == "compacting" else 0.5)
    written = ["".join(characters.decode(_trained(sample))) for sample in trajectory.samples]
    end = "<|im_end|>"
    if name == "compacting":
        assert written == [f"word 100{end}word 101{end}", f"word 102{end}word 103{end}"]
        shared = f"<|im_start|>system\n{SYSTEM}{end}\n<|im_start|>user\n"
        assert [(b.parent, b.start) for b in certificate.branches] == [(None, 0), (0, len(_ids(characters, shared)))]
    else:
        assert written == [f"word 100{end}word 103{end}", f"word 101{end}word 102{end}"]
    assert certificate.new_rows == {"new_context": 1}
    assert (certificate.exact_share, certificate.num_drawn, certificate.num_trained) == (1.0, 36, 36)


def _ids(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def _trained(sample: Any) -> list[int]:
    return [token for token, mask in zip(sample.response_ids, sample.loss_mask, strict=True) if mask]


def misbehaving(task: HarnessTask) -> Any:
    """Do what the row says."""
    if task.row["does"] != "nothing":
        ask(task, ("user", task.text))
    if task.row["does"] == "raise":
        raise KeyError("oops")
    if task.row["does"] == "hang":
        time.sleep(3)
        ask(task, ("user", "too late"))
    return {"words": "many", "nan": float("nan")}.get(task.row["does"], 0.25)


def with_biases(task: HarnessTask) -> float:
    """Ask as an agent that knows better how to sample."""
    with client_of(task) as client:
        messages: Any = [{"role": "user", "content": task.text}]
        client.chat.completions.create(
            model=task.model, messages=messages, temperature=0.2, logit_bias={"5": 3}, frequency_penalty=1, seed=4
        )
    return 1.0


@pytest.mark.parametrize("sampling", ["trainer", "harness"])
async def test_sampling_follows_training_or_harness_parameters(sampling: Any, characters: Any):
    model = Model(characters, lambda _: "yes")
    harness = HarnessConfig(function=f"{__name__}:with_biases", sandbox="process", sampling=sampling)
    [trajectory], _ = await trajectories_of(model, harness, [{}])
    params = model.requests[0].sampling_params
    assert params is not None
    biases = {name for name in ("logit_bias", "frequency_penalty") if params.get(name)}
    if sampling == "trainer":
        assert (params["temperature"], biases, certified(trajectory).num_trained) == (1.0, set(), 4)
        assert params["seed"] != 4
    else:
        assert (params["temperature"], len(biases)) == (0.2, 2)
        assert certified(trajectory).not_trained == {"other_temperature": 4}


async def asynchronous(task: HarnessTask) -> float:
    return float(len(ask(task, ("user", task.text))))


async def test_batch_sessions_are_announced_grouped_by_prompt(characters: Any):
    model = Model(characters, lambda _: f"after {len(model.announced_groups)}")
    harness = HarnessConfig(function=f"{__name__}:asynchronous", sandbox="process")
    rows = [{"prompt": [{"role": "user", "content": f"say {number}"}], "uid": number // 2} for number in range(4)]
    trajectories, _ = await trajectories_of(model, harness, rows)
    assert {trajectory.reward for trajectory in trajectories} == {float(len("after 1"))}
    [[first, second]] = model.announced_groups
    sessions = {request.session_id for request in model.requests}
    assert len(first) == len(second) == 2 and {*first, *second} == sessions


@pytest.mark.parametrize("value", [1, True, np.float32(1), np.int64(1), np.bool_(True)])
def test_numpy_numbers_are_valid_rewards(value: Any):
    reward = convert_reward(value, "a grader")
    assert (reward, type(reward)) == (1.0, float)


def bad_grader(task: HarnessTask, output: Any) -> float:
    raise RuntimeError(f"cannot grade {output}")


async def test_failing_functions_are_named_and_returned_numbers_are_rewards(characters: Any):
    def harness(function: str, **settings: Any) -> HarnessConfig:
        return HarnessConfig(function=f"{__name__}:{function}", sandbox="process", deadline_seconds=3, **settings)

    rows = [{"does": does} for does in ("well", "raise", "hang", "nothing", "words", "nan")]
    model = Model(characters, lambda _: "yes")
    trajectories, _ = await trajectories_of(model, harness("misbehaving"), rows)
    assert trajectories[0].failure is None and trajectories[0].reward == 0.25
    messages = [each.failure.message for each in trajectories if each.failure is not None]
    for message, words in zip(
        messages, ("KeyError", "hung", "no_answer", "finite number; got 'many'", "nan"), strict=True
    ):
        assert words in message
    [trajectory], _ = await trajectories_of(model, harness("asynchronous"), [{}])
    assert trajectory.reward == 3.0
    [trajectory], _ = await trajectories_of(model, harness("asynchronous", grader=f"{__name__}:bad_grader"), [{}])
    assert trajectory.failure is not None and trajectory.failure.kind == "reward"
    assert "cannot grade 3.0" in trajectory.failure.message


async def test_token_budget_and_full_context_end_trajectory_without_failure(characters: Any):
    """The function goes on for as long as it is answered; then the SDK raises."""
    harness = HarnessConfig(function=f"{__name__}:endless", sandbox="process", max_tokens=25)
    model = Model(characters, lambda _: "0123456789")
    grader = {"grader": f"{__name__}:by_output"}
    [trajectory], _ = await trajectories_of(model, HarnessConfig(**{**vars(harness), **grader}), [{}])
    assert (trajectory.failure, trajectory.turn_lengths, trajectory.stop_reason) == (None, [11, 11, 3], "length")
    full = HarnessConfig(**{**vars(harness), **grader, "max_tokens": None, "sampling": "harness"})
    [trajectory], _ = await trajectories_of(Model(characters, lambda _: "0123456789", 80), full, [{}])
    assert (trajectory.failure, trajectory.stop_reason, trajectory.reward) == (None, "length", 0.75)


def endless(task: HarnessTask) -> None:
    history = [("user", task.text)]
    while True:
        history += [("assistant", ask(task, *history)), ("user", "go on")]


def by_output(task: HarnessTask, output: Any) -> float:
    return 0.75


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"function": "no_such_module:run"}, "generator.harness.function='no_such_module:run' must be package.module"),
        ({"function": "json:no_such"}, "has no attribute 'no_such'"),
        (
            {"command": ["sh"], "env": {"a.b": "c"}},
            "generator.harness.env: the environment variable 'a.b'",
        ),
        ({"command": ["sh"]}, "row 0 of data.train_data has no column `grade`"),
    ],
)
def test_invalid_harness_settings_are_refused_before_start(settings: Any, message: str, characters: Any):
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        generator = HarnessGenerator(
            GeneratorConfig(model_name="m", harness=HarnessConfig(**settings)), None, characters
        )
        generator.check_rows([{"prompt": json.dumps([])}], "data.train_data")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"grade": {"command": "pytest -q"}}, "grade.command .* got 'pytest -q'"),
        ({"grade": {"files": {"check.py": ""}}}, "grade must have either program and tests"),
        ({"grade": "pytest -q"}, "grade must be an object with command and files; got 'pytest -q'"),
        ({"files": [{"path": "f.py", "content": ""}]}, "files must be an object of paths and texts"),
        ({"grade": {"program": "f.py", "tests": []}}, "grade.tests cannot be used"),
        (
            {"grade": {"program": "f.py", "tests": ["x"], "command": ["true"]}},
            "grade must have either program and tests .* or command",
        ),
        ({"grade": PASSES | {"files": {"../check.py": ""}}}, "grade.files: '../check.py' is not a path inside"),
        ({"grade": PASSES | {"inputs": ["/f.py"]}}, "grade.inputs: '/f.py' is not a path inside"),
        ({"grade": {"program": "../f.py", "tests": ["x"]}}, "grade.program: '../f.py' is not a path inside"),
        ({"grade": PASSES | {"inputs": ["d"], "files": {"d/check.py": ""}}}, "grade.inputs must not contain"),
        ({"grade": PASSES | {"inputs": "a"}}, "grade.inputs must be a list of paths"),
        ({"grade": PASSES | {"files": {"check.py": 3}}}, "grade.files must be an object of paths and texts"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "text", "text": "go"}, {"image": {"bytes": b"PNG"}}]}]},
            r"prompt\[0\].content\[1\].image.bytes \(bytes b'PNG'\) cannot be encoded as JSON",
        ),
        (
            {"prompt": [{"role": "user", "content": "go", b"at": 1}]},
            r"the key b'at' in prompt\[0\] cannot be encoded as JSON",
        ),
        ({"prompt": [{"role": "user", "content": 5}]}, r"prompt\[0\].content must be text or a list of parts; got 5"),
    ],
)
async def test_invalid_columns_are_refused_or_fail_row(row: Any, message: str, characters: Any):
    harness = HarnessConfig(function=f"{__name__}:asynchronous", sandbox="process")
    [trajectory, works], _ = await trajectories_of(Model(characters, lambda _: "yes"), harness, [row, {}])
    assert trajectory.failure is not None and re.search(message, trajectory.failure.message)
    assert (trajectory.failure.kind, works.failure) == ("environment", None)
    generator = HarnessGenerator(GeneratorConfig(model_name="m", harness=harness), None, characters)
    with pytest.raises(ConfigError, match=f"row 1 of data.train_data: {message}"):
        generator.check_rows([{}, row], "data.train_data")


def test_folders_of_killed_endpoints_are_removed_and_used_folders_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left, foreign = tmp_path / "skyrl-endpoint-left", tmp_path / "skyrl-endpoint-without-lock"
    for folder in (left, foreign):
        folder.mkdir()
    (left / "lock").touch()
    (left / "socket").touch()
    with create_socket_folder() as used:
        assert not left.exists()
        with create_socket_folder() as other:
            assert Path(used, "lock").exists() and used != other
    assert list(tmp_path.iterdir()) == [foreign]


def test_task_files_are_readable_by_other_user_for_any_umask(tmp_path):
    texts: Any = {"base_url": "", "api_key": "", "model": "", "sandbox": None, "deadline_seconds": 1.0}
    task = HarnessTask(prompt=[{"role": "user", "content": "fix it"}], row={}, **texts)
    before = os.umask(0o077)
    try:
        task.write_texts(str(tmp_path))
    finally:
        os.umask(before)
    assert {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {
        "task.txt": 0o644,
        "messages.json": 0o644,
    }


def place_of(task: HarnessTask) -> float:
    endpoint = Path(task.folder).parent
    assert endpoint.name.startswith("skyrl-endpoint-") and (endpoint / "lock").exists(), "removed after kill -9"
    ask(task, ("user", "go"))
    return 1.0


class Stuck:
    """Sandbox of an engine that neither starts nor removes containers."""

    def __enter__(self) -> None:
        time.sleep(1)
        raise InfraError("it did not start")

    def __exit__(self, *error: object) -> None: ...

    def close(self) -> None:
        raise InfraError("podman rm did not end within 60 s")


async def test_full_disk_and_unclosable_sandbox_fail_only_own_trajectory(
    characters: Any, monkeypatch: pytest.MonkeyPatch
):
    model = Model(characters, lambda _: "ok")
    harness = HarnessConfig(function=f"{__name__}:place_of", sandbox="process", grade_seconds=0.2)
    with monkeypatch.context() as patch:
        written = HarnessTask.write_texts

        def full(task: HarnessTask, folder: str) -> None:
            if task.row["disk"] == "full":
                raise OSError(28, "No space left on device")
            written(task, folder)

        patch.setattr(HarnessTask, "write_texts", full)
        [works, fails], _ = await trajectories_of(model, harness, [{"disk": "large"}, {"disk": "full"}])
    assert (works.failure, works.reward) == (None, 1.0)
    assert fails.failure is not None and fails.failure.kind == "infrastructure"
    assert "No space left on device" in fails.failure.message

    monkeypatch.setattr(generator, "_FURTHER_SECONDS", 0.0)
    monkeypatch.setattr(generator.Harness, "create_sandbox", lambda *_: Stuck())
    [stuck], _ = await trajectories_of(model, replace(harness, deadline_seconds=0.2), [{}])
    assert stuck.failure is not None and "harness hung: it could not be terminated" in stuck.failure.message

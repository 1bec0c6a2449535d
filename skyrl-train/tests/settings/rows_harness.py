"""Rows for `generator.harness`: one trajectory each, of a function or a small program, on a tiny engine."""

import asyncio
import os
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from effects import Bench, Row, Settings, error
from openai import OpenAI

from skyrl_gym.error import InfraError
from skyrl_gym.sandbox import backends
from skyrl_train.errors import ConfigError
from skyrl_train.generators.base import GeneratorInput
from skyrl_train.generators.harness.generator import HarnessGenerator
from skyrl_train.generators.harness.task import HarnessTask
from skyrl_train.inference_engines.native.engine import NativeInferenceEngine
from skyrl_train.inference_engines.native.loading import load_tokenizer

HARNESS = "generator.harness"
FUNCTION = {f"{HARNESS}.function": f"{__name__}:asks_twice", f"{HARNESS}.sandbox": "process"}
PROGRAM = """
import json, os, urllib.request
body = {"model": os.environ["SKYRL_MODEL"], "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)).read()
print("x" * len(os.environ.get("MORE", "")))
"""
COMMAND = {
    f"{HARNESS}.command": [sys.executable, "-c", PROGRAM],
    f"{HARNESS}.grader": f"{__name__}:length_of_output",
    f"{HARNESS}.sandbox": "process",
}


def asks_twice(task: HarnessTask) -> float:
    """Ask twice, with a short pause. Returns: a reward."""
    time.sleep(0.3)
    with OpenAI(base_url=task.base_url, api_key=task.api_key, max_retries=0) as client:
        for text in ("one", "two"):
            messages: Any = [{"role": "user", "content": text}]
            client.chat.completions.create(model=task.model, messages=messages, temperature=0.5)
    return 0.5


def asks_never(task: HarnessTask) -> float:
    return 1.0


def length_of_output(task: HarnessTask, output: Any) -> float:
    """Grade slowly."""
    time.sleep(0.3)
    return len(str(output)) / 100


@cache
def engine_of(path: str) -> NativeInferenceEngine:
    return NativeInferenceEngine(path, device="cpu", dtype="float32", max_num_seqs=4)


def outcome(bench: Bench, settings: Settings) -> Any:
    """Failure, reward, turns and trained tokens of one trajectory."""
    cfg = bench.config(settings)
    if not cfg.generator.harness.is_on:
        return "no harness"
    path = cfg.trainer.policy.model.path

    async def attempt() -> Any:
        generator = HarnessGenerator(cfg.generator, engine_of(path), load_tokenizer(path, False))
        prompt: Any = [{"role": "user", "content": "go"}]
        rollouts = await generator.generate_groups(GeneratorInput(prompts=[prompt], env_classes=[""]))
        [trajectory] = rollouts.trajectories
        failure = None if trajectory.failure is None else trajectory.failure.message.split(";")[0][:60]
        trained = [sum(sample.loss_mask) for sample in trajectory.samples]
        return failure, trajectory.reward, trajectory.turn_lengths, trained

    return asyncio.run(attempt())


def built(see: Any) -> Any:
    """See a generator that nothing was asked of."""

    def found(bench: Bench, settings: Settings) -> Any:
        try:
            return see(HarnessGenerator(bench.config(settings).generator, None, None))  # type: ignore[arg-type]
        except ConfigError as refusal:
            return str(refusal)

    return found


def sandboxed(bench: Bench, settings: Settings) -> Any:
    """See what the container engine, a program that fails, was asked when a sandbox was made."""
    harness = HarnessGenerator(bench.config(settings).generator, None, None)._harness("")  # type: ignore[arg-type]
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        engine = Path(folder, "podman")
        engine.write_text(f'#!/bin/sh\necho "$@" >>{folder}/asked; echo image not known >&2; exit 1\n')
        engine.chmod(0o755)
        patch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        patch.setattr(backends, "_found", {})
        with pytest.raises(InfraError):
            harness.create_sandbox()
        return Path(folder, "asked").read_text()


ROWS = [
    Row(f"{HARNESS}.command", COMMAND[f"{HARNESS}.command"], outcome, {**COMMAND, f"{HARNESS}.command": None}),
    Row(f"{HARNESS}.function", f"{__name__}:asks_never", outcome, FUNCTION),
    Row(f"{HARNESS}.grader", f"{__name__}:length_of_output", outcome, FUNCTION),
    Row(
        f"{HARNESS}.sandbox",
        "local",
        built(lambda generator: generator._harness("").get_base_url("http://127.0.0.1:1/s/name/v1")),
        COMMAND,
    ),
    Row(f"{HARNESS}.image", "an/image", sandboxed, COMMAND | {f"{HARNESS}.sandbox": "podman"}),
    Row(f"{HARNESS}.pull", "never", sandboxed, COMMAND | {f"{HARNESS}.sandbox": "podman"}),
    Row(f"{HARNESS}.visible", ["no/whole/path"], error, FUNCTION),
    Row(f"{HARNESS}.env", {"MORE": "words"}, outcome, COMMAND),
    Row(f"{HARNESS}.deadline_seconds", 0.1, outcome, FUNCTION),
    Row(f"{HARNESS}.grade_seconds", 0.1, outcome, {**FUNCTION, f"{HARNESS}.grader": f"{__name__}:length_of_output"}),
    Row(f"{HARNESS}.max_turns", 1, outcome, FUNCTION),
    Row(f"{HARNESS}.max_tokens", 8, outcome, FUNCTION),
    Row(f"{HARNESS}.max_parallel", 3, built(lambda generator: generator._threads.max_workers), FUNCTION),
    Row(
        f"{HARNESS}.memory_gb",
        3.0,
        built(lambda generator: generator._harness("").create_sandbox().limits.memory_bytes),
        FUNCTION,
    ),
    Row(f"{HARNESS}.sampling", "harness", outcome, FUNCTION),
]

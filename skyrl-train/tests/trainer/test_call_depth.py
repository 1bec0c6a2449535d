"""Functions between the training loop and the engine's forward, as docs/architecture.md lists them."""

import asyncio
import gc
import inspect
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.inference_engines.native.runner import ModelRunner

FUNCTIONS = [
    "RayPPOTrainer.train",
    "RayPPOTrainer.generate",
    "SkyRLGymGenerator.generate_groups",
    "SkyRLGymGenerator._trajectory",
    "run_agent_loop",
    "InferenceEngineClient.generate",
    "RequestRunner.run",
    "Supervisor.run",
    "InlineEngine.generate",
    "NativeInferenceEngine.generate",
    "NativeInferenceEngine._run",
    "NativeEngineCore.step",
    "ModelRunner.prefill",
]
RECORDING = ["RequestRunner._generate", "EngineHost._recorded"]
"""Functions around a call that record that somebody waits for it, for `skyrl_train.explain`."""

ALONE = {
    "algorithm": {"advantage_estimator": "reinforce++"},
    "train_batch_size": 1,
    "policy_mini_batch_size": 1,
    "max_training_steps": 1,
}


def awaited_functions() -> list[str]:
    """Names of all functions of ours in the await chains of all tasks."""
    names = []
    # `type`, as `isinstance` would ask lazy objects of torch for their class, which warns.
    for task in [each for each in gc.get_objects() if issubclass(type(each), asyncio.Task) and not each.done()]:
        coroutine = task.get_coro()
        while inspect.iscoroutine(coroutine):
            if "skyrl_train" in coroutine.cr_code.co_filename:
                names.append(coroutine.cr_code.co_qualname)
            coroutine = coroutine.cr_await
    return names


def functions_of_this_thread() -> list[str]:
    names, frame = [], sys._getframe()
    while frame is not None:
        if "skyrl_train" in frame.f_code.co_filename and "tests" not in frame.f_code.co_filename:
            names.append(frame.f_code.co_qualname)
        frame = frame.f_back
    return names


def test_training_reaches_the_forward_by_thirteen_functions(
    settings: Any, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    under_way: list[str] = []
    prefill = ModelRunner.prefill

    def recorded(self: ModelRunner, *args: Any) -> Any:
        if threading.current_thread().name == "native-engine" and not under_way:
            names = [*awaited_functions(), *functions_of_this_thread(), "ModelRunner.prefill"]
            if "RayPPOTrainer.generate" in names:  # and no sync of weights, which generates a few tokens
                under_way.extend(names)
        return prefill(self, *args)

    monkeypatch.setattr(ModelRunner, "prefill", recorded)
    generator = {"n_samples_per_prompt": 1, "engine_health_interval_seconds": 0}
    run(settings(tmp_path, {"trainer": ALONE, "generator": generator}))
    below_train = [name for name in under_way if not name.startswith("BasePPOExp")]
    assert sorted(below_train) == sorted([*FUNCTIONS, *RECORDING])

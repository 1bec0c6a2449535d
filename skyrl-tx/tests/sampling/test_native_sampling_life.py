"""Failed, cancelled and concurrent sampling, and shared weights."""

import asyncio
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import random_data
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tx.errors import ModelError
from tx.tinker.backends.base import BackendLost
from tx.tinker.backends.torch.sampling import NativeSampling
from tx.tinker.types import SampleSpec


def spec(num_samples: int = 1, max_tokens: int = 400, seed: int = 1) -> SampleSpec:
    return random_data.spec(num_samples, max_tokens=max_tokens, seed=seed)


async def wait_until(holds: Any, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


def core_of(sampling: NativeSampling) -> Any:
    assert sampling._engine is not None
    return sampling._engine._core


async def test_cancelled_caller_frees_rows_and_adapter(sampling_of, adapter):
    async with sampling_of(max_num_seqs=4, max_loaded_adapters=1) as sampling:
        task = asyncio.create_task(sampling.sample(spec(8), adapter(1)))
        await wait_until(lambda: core_of(sampling).num_running == 4)
        assert sampling.num_running() == 8
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert sampling.num_running() == 0
        async with asyncio.timeout(20):
            await sampling.sample(spec(max_tokens=2), adapter(2))  # takes the slot
        assert core_of(sampling).num_running == core_of(sampling).num_waiting == 0


async def test_stopped_engine_fails_all_requests(sampling_of, adapter):
    async with sampling_of(max_num_seqs=2, max_loaded_adapters=1) as sampling:
        calls = [spec(), spec(3), spec()]
        tasks = [asyncio.create_task(sampling.sample(call, None)) for call in calls]
        tasks += [asyncio.create_task(sampling.sample(spec(), adapter(index))) for index in range(3)]
        await wait_until(lambda: core_of(sampling).num_running == 2)
        core_of(sampling)._rows.append = None  # as if memory were corrupted
        for task in tasks:
            with pytest.raises(BackendLost, match="TypeError"):
                async with asyncio.timeout(20):
                    await task
        with pytest.raises(BackendLost, match="native engine stopped"):
            await sampling.sample(spec(), None)
        assert sampling.num_running() == 0
        with pytest.raises(BackendLost, match="native engine stopped"):
            await sampling.end_of_step()


async def test_hung_step_is_detected(sampling):
    await asyncio.wait_for(sampling.end_of_step(), 20)
    core, go = core_of(sampling), threading.Event()
    step = core.step
    core.step = lambda **how: (go.wait(60), step(**how))[1]
    answer = asyncio.create_task(sampling.sample(spec(max_tokens=2), None))
    await wait_until(lambda: core.num_waiting == 1)
    end = asyncio.create_task(sampling.end_of_step())
    assert await asyncio.wait((end,), timeout=0.3) == (set(), {end})
    go.set()
    await asyncio.wait_for(end, 20)
    await asyncio.wait_for(answer, 20)


async def test_closing_ends_every_call(sampling_of, adapter):
    async with sampling_of(max_num_seqs=2, max_loaded_adapters=1) as sampling:
        tasks = [asyncio.create_task(sampling.sample(spec(3), adapter(index))) for index in range(3)]
        await wait_until(lambda: core_of(sampling).num_running == 2)
        await sampling.close()
        for task in tasks:
            with pytest.raises(BackendLost, match="closed"):
                async with asyncio.timeout(20):
                    await task


@pytest.fixture
def not_finite(adapter: Any, tmp_path: Path) -> Path:
    folder = tmp_path / "nan"
    shutil.copytree(adapter(1), folder)
    tensors = load_file(folder / "adapter_model.safetensors")
    tensors["base_model.model.model.layers.0.self_attn.v_proj.lora_B.weight"][3] = float("nan")
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return folder


async def test_adapter_with_nan_fails_only_own_requests(sampling, adapter, not_finite):
    good = adapter(2)
    expected = [await sampling.sample(spec(4, 30, seed=index), good) for index in range(8)]
    calls = [
        call
        for index in range(8)
        for call in (sampling.sample(spec(4, 30, seed=index), good), sampling.sample(spec(2, 30), not_finite))
    ]
    answers = await asyncio.gather(*calls, return_exceptions=True)
    assert answers[::2] == expected
    for error in answers[1::2]:
        assert isinstance(error, ModelError) and error.category == "user" and "not finite" in str(error)
    assert await sampling.sample(spec(4, 30, seed=0), good) == expected[0]


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda folder: shutil.rmtree(folder), "no adapter could be read"),
        (lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"\x08"), "no adapter could be read"),
        (lambda folder: (folder / "adapter_config.json").write_text("[1]"), "must contain an object"),
    ],
)
async def test_damaged_adapter_fails_only_own_requests(sampling_of, adapter, tmp_path, damage, message):
    folder = tmp_path / "damaged"
    shutil.copytree(adapter(1), folder)
    damage(folder)
    async with sampling_of(max_loaded_adapters=1) as sampling:
        answers = await asyncio.gather(*(sampling.sample(spec(), folder) for _ in range(3)), return_exceptions=True)
        for error in answers:
            assert isinstance(error, ModelError) and error.category == "user" and message in str(error)
        await sampling.sample(spec(max_tokens=2), adapter(1))  # the slot is free


async def test_rank_above_maximum_is_refused(sampling_of, adapter):
    async with sampling_of(max_lora_rank=4) as sampling:
        with pytest.raises(ModelError, match="max_lora_rank=4"):
            await sampling.sample(spec(), adapter(1))


async def test_long_samples_of_tenant_do_not_block_other_tenant(sampling_of):
    """One tenant takes 6 of 8 rows; another tenant's first request starts immediately."""
    async with sampling_of(max_num_seqs=8) as sampling:
        greedy = asyncio.create_task(sampling.sample(spec(64), None, tenant="greedy"))
        await wait_until(lambda: core_of(sampling).num_running == 6)
        async with asyncio.timeout(20):
            for index in range(5):
                await sampling.sample(spec(1, 10, seed=index), None, tenant="modest")
        assert not greedy.done() and core_of(sampling).num_waiting == 64 - 6
        greedy.cancel()


async def test_preloaded_model_weights_are_reused_with_same_results(sampling_of, adapter, tiny_model):
    async with sampling_of() as sampling:
        expected = [await sampling.sample(spec(4, 30), folder) for folder in (None, adapter(1))]
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    async with sampling_of(share_with=model) as sampling:
        assert [await sampling.sample(spec(4, 30), folder) for folder in (None, adapter(1))] == expected
        assert core_of(sampling)._eos_ids == (1,)
        held = dict(core_of(sampling).model.named_parameters())
    for name, parameter in model.named_parameters():
        assert parameter.data_ptr() == held[name].data_ptr() and parameter.requires_grad


async def test_another_models_weights_are_refused(tiny_model):
    sampling = NativeSampling(tiny_model, share_with=torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="shared_weights"):
        await sampling.start()

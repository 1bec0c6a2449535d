"""The native engine beyond what every engine keeps (`test_conformance_native.py`): bits, weights in flight, errors."""

import asyncio

import numpy as np
import pytest
import torch
from native_runs import PROMPT, batch, engine_of, log_probs_of, way_to
from transformers import AutoModelForCausalLM, AutoTokenizer

from skyrl_train.config import SkyRLConfig
from skyrl_train.errors import ConfigError, WeightSyncError, WorkerError
from skyrl_train.inference_engines.inference_engine_client import InferenceEngineClient
from skyrl_train.inference_engines.native.engine import NativeInferenceEngine
from skyrl_train.inference_engines.native.requests import EngineSamplingParams, Request
from skyrl_train.weight_sync.base import WeightUpdateRequest

LONG = {"max_tokens": 200, "ignore_eos": True}


async def until_running(engine: NativeInferenceEngine, tokens: int = 3) -> None:
    """Waits until something has been written; at most 10 seconds."""
    for _ in range(1000):
        rows = engine._core._rows
        if len(rows) and rows.length[0] - rows.prompt_length[0] >= tokens:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("nothing runs")


async def test_trained_model_generates_training_text(stories260k):
    async with engine_of(stories260k) as engine:
        ids = engine._tokenizer("Once upon a time")["input_ids"]
        answer = await engine.generate_batch(batch(ids, temperature=0.0, max_tokens=60))
        assert answer["responses"][0].startswith(
            ", there was a little girl named Lily. She loved to play outside in the park."
        )
        stopped = await engine.generate_batch(batch(ids, temperature=0.0, max_tokens=60, stop=["Lily. She", "park"]))
        assert stopped["stop_reasons"] == ["stop"]
        assert stopped["responses"][0].startswith(", there was a little girl named Lily. She")
        assert len(stopped["responses"][0]) < len(", there was a little girl named Lily. She loved to")


async def test_mixed_settings_batch_equals_transformers_generate(tiny_models):
    settings = [{"temperature": 0.5}, {"top_k": 3, "temperature": 2.0}, {"temperature": 0.0}, {"top_p": 0.5}, {}]
    async with engine_of(tiny_models("qwen3")) as engine:
        expected = [await engine.generate_batch(batch(PROMPT, max_tokens=12, seed=7, **params)) for params in settings]
        prompt = engine.check_prompt(PROMPT)
        requests = [Request(prompt, EngineSamplingParams(max_tokens=12, **params), (7, 0)) for params in settings]
        completions = await asyncio.gather(*map(engine.complete, requests))
        with pytest.raises(ValueError, match="'other'"):
            await engine.complete(Request(prompt, EngineSamplingParams(), (0, 0)), "other")
        assert not any((await engine.generate_batch(batch())).values()), "no prompts, no answers"
    for completion, answer in zip(completions, expected, strict=True):
        assert [completion.token_ids] == answer["response_ids"]
        assert [completion.log_probs] == answer["response_logprobs"]


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])  # tied embeddings, fused experts
async def test_loaded_weights_are_shared(tiny_models, name):
    async with engine_of(tiny_models(name)) as engine:
        expected = await engine.generate_batch(batch(PROMPT, [9, 9], max_tokens=20, seed=1))
    model = AutoModelForCausalLM.from_pretrained(tiny_models(name))
    given = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    async with engine_of(tiny_models(name), shared_weights=given) as engine:
        assert await engine.generate_batch(batch(PROMPT, [9, 9], max_tokens=20, seed=1)) == expected
        for key, parameter in engine._core.model.named_parameters():
            assert parameter.data_ptr() == given[key].data_ptr()
    assert all(parameter.requires_grad for parameter in model.parameters())
    del given["model.norm.weight"]
    with pytest.raises(ValueError, match=r"model\.norm\.weight"):
        NativeInferenceEngine(tiny_models(name), shared_weights=given)


def other_weights(path: str) -> dict[str, torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(path)
    torch.manual_seed(1)
    return {name: parameter + 0.1 * torch.randn_like(parameter) for name, parameter in model.named_parameters()}


def without(lost: str):
    """Make a fault that loses the bucket with this tensor."""
    return lambda request: [] if lost in request.names else [request]


async def test_no_token_is_generated_by_partially_updated_weights(tiny_models, tmp_path):
    weights = other_weights(tiny_models("qwen3"))
    last = list(weights)[-1]
    async with engine_of(tiny_models("qwen3")) as engine, way_to(engine, tmp_path) as path:
        before = await engine.generate_batch(batch(PROMPT, seed=3, **LONG))
        running = asyncio.create_task(engine.generate_batch(batch(PROMPT, seed=3, **LONG)))
        await until_running(engine)
        with pytest.raises(WeightSyncError, match="4 parameters"):
            await path.send(weights, 2, without(last))
        length = engine._core._rows.length[0]
        late = asyncio.create_task(engine.generate_batch(batch(PROMPT, seed=3, max_tokens=3)))
        await asyncio.sleep(0.1)
        assert engine._core._rows.length[0] == length and not late.done() and not running.done()
        await path.send(weights, 3)
        [versions] = (await running)["weight_versions"]
        old = versions.count(0)
        assert versions == sorted(versions) and 3 <= old < 200 and versions[-1] == 3
        answer = await running
        assert answer["response_ids"][0][:old] == before["response_ids"][0][:old]
        assert (await late)["weight_versions"] == [[3, 3, 3]]


@pytest.mark.first_case
@pytest.mark.parametrize("kv_after_sync", ["keep", "clear", "recompute"])
async def test_log_probs_match_version_when_kv_cache_is_recomputed(tiny_models, tmp_path, kv_after_sync: str):
    """One answer over a sync of weights that differ, by the steps of a weight publisher with this setting."""
    model, weights = tiny_models("qwen3"), other_weights(tiny_models("qwen3"))
    tokenizer = AutoTokenizer.from_pretrained(model)
    async with engine_of(model) as engine, way_to(engine, tmp_path) as path:
        client = InferenceEngineClient([engine], tokenizer, SkyRLConfig())
        running = asyncio.create_task(client.generate_batch(batch(PROMPT, seed=3, logprobs=0, **LONG)))
        await until_running(engine)
        await client.pause_generation("abort" if kv_after_sync == "recompute" else "keep")
        await path.send(weights, 1)
        if kv_after_sync != "keep":
            await client.reset_prefix_cache()
        await client.resume_generation()
        answer = await running
    [response], [versions], log_probs = answer["response_ids"], answer["weight_versions"], answer["response_logprobs"]
    assert log_probs is not None and len(response) == 200 and versions == sorted(versions)
    num_old = versions.count(0)
    assert 3 <= num_old < 200
    reported = torch.tensor(log_probs[0])
    trainer = AutoModelForCausalLM.from_pretrained(model)
    _, old = log_probs_of(trainer, PROMPT, response)
    trainer.load_state_dict(weights, strict=False)
    _, new = log_probs_of(trainer, PROMPT, response)
    assert float((reported - old)[:num_old].abs().max()) < 1e-4
    gap = float((reported - new)[num_old:].abs().max())
    if kv_after_sync == "recompute":
        assert gap < 1e-4
    else:  # behind keys and values of the weights before, neither of the one version nor of the other
        assert gap > 0.01 and float((reported - old)[num_old:].abs().max()) > 0.01


async def test_weight_update_without_connection_is_rejected(tiny_models):
    request = WeightUpdateRequest(names=[], dtypes=[], shapes=[], version=1, index=0, num_bytes=0)
    async with engine_of(tiny_models("qwen3")) as engine:
        with pytest.raises(WeightSyncError, match="before init_weight_update_communicator"):
            await engine.update_named_weights(request)
        assert (await engine.generate_batch(batch(PROMPT, max_tokens=2)))["weight_versions"] == [[0, 0]]


async def test_unfinished_weight_update_times_out(tiny_models, tmp_path):
    weights = other_weights(tiny_models("qwen3"))
    settings = {"update_timeout_seconds": 0.5}
    async with engine_of(tiny_models("qwen3"), **settings) as engine, way_to(engine, tmp_path) as path:
        with pytest.raises(WeightSyncError, match=r"no parameter 'model\.typo'"):
            await path.send(weights | {"model.typo": torch.zeros(2)}, 1)
        with pytest.raises(WorkerError, match=r"'model\.typo'"):
            await engine.generate_batch(batch(PROMPT, max_tokens=2))
        with pytest.raises(WorkerError, match="WeightSyncError"):
            await engine.check_health()


async def test_sleep_level_1_keeps_weights_and_level_2_requires_resync(tiny_models, tmp_path):
    weights = other_weights(tiny_models("qwen3"))
    *most, last = list(weights)
    async with engine_of(tiny_models("qwen3")) as engine, way_to(engine, tmp_path) as path:
        before = await engine.generate_batch(batch(PROMPT, seed=1, max_tokens=20))
        await engine.sleep(level=1)
        waiting = asyncio.create_task(engine.generate_batch(batch(PROMPT, seed=1, max_tokens=20)))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await engine.wake_up()
        assert await waiting == before

        await engine.sleep(level=2)
        with pytest.raises(WeightSyncError, match="wake_up"):
            await path.send(weights, 1)
        await engine.wake_up(["weights"])
        with pytest.raises(RuntimeError, match="full weight update must come first"):
            await engine.generate_batch(batch(PROMPT, max_tokens=2))
        with pytest.raises(
            WeightSyncError, match=rf"1 parameters did not come, such as {last}.*sleep\(level=2\) dropped"
        ):
            await path.send({name: weights[name] for name in most}, 2)
        await path.send(weights, 3)
        await engine.wake_up(["kv_cache"])
        assert (await engine.generate_batch(batch(PROMPT, max_tokens=2)))["weight_versions"] == [[3, 3]]


async def test_dummy_weights_stay_random_until_all_received(tiny_models, tmp_path):
    weights = other_weights(tiny_models("llama"))
    *most, last = list(weights)
    async with engine_of(tiny_models("llama"), dummy_weights=True) as engine, way_to(engine, tmp_path) as path:
        dummy = await engine.generate_batch(batch(PROMPT, max_tokens=3, prompt_logprobs=0, temperature=0.0))
        assert dummy["weight_versions"] == [[0, 0, 0]]
        with pytest.raises(WeightSyncError, match=rf"1 parameters did not come, such as {last}.*first update"):
            await path.send({name: weights[name] for name in most}, 1)
        await path.send(weights, 2)
        answer = await engine.generate_batch(batch(PROMPT, max_tokens=3, prompt_logprobs=0, temperature=0.0))
    reference = AutoModelForCausalLM.from_pretrained(tiny_models("llama"))
    reference.load_state_dict(weights)
    expected, _ = log_probs_of(reference, PROMPT, [])
    torch.testing.assert_close(torch.tensor(answer["prompt_logprobs"][0]), expected, atol=1e-4, rtol=0)
    assert not np.allclose(dummy["prompt_logprobs"][0], expected, atol=0.1)


async def test_prompt_log_probs_are_independent_of_batch_composition(tiny_models):
    """The same bits alone and beside others, with shared beginnings and without; and the answers stay the same."""
    prompts = [PROMPT, PROMPT, [8] * 40, [7], list(range(2, 60)) * 5]
    async with engine_of(tiny_models("qwen3")) as engine:
        params = {"max_tokens": 5, "seed": 1, "temperature": 0.8}
        plain = await engine.generate_batch(batch(*prompts, **params))
        scored = await engine.generate_batch(batch(*prompts, prompt_logprobs=0, **params))
        assert {**scored, "prompt_logprobs": None} == {**plain, "prompt_logprobs": None}
        assert [len(row) for row in scored["prompt_logprobs"]] == [4, 4, 39, 0, 289]
        for prompt, row in zip(prompts, scored["prompt_logprobs"], strict=True):
            alone = await engine.generate_batch(batch(prompt, prompt_logprobs=0, **params))
            assert alone["prompt_logprobs"] == [row]


@pytest.mark.parametrize(
    "prompt, params, message",
    [
        ([], {}, "at least one token; got an empty prompt"),
        ([5, 62], {}, "vocabulary, 0 to 61; got 62"),
        ([-1], {}, "vocabulary, 0 to 61; got -1"),
        ([5] * 64, {}, "max_model_len=64"),
        ([5], {"temperatur": 1}, "temperature"),
        ([5], {"stop_token_ids": [99]}, "stop_token_ids"),
        ([5], {"seed": [[1, 2, 3]]}, "seed must be an integer or a .seed, index. pair"),
    ],
)
async def test_invalid_input_error_names_rule(tiny_models, prompt, params, message):
    async with engine_of(tiny_models("qwen3"), max_model_len=64) as engine:
        with pytest.raises(ValueError, match=message):
            await engine.generate_batch(batch(prompt, **params))
        assert engine._core.num_running + engine._core.num_waiting == 0


async def test_step_error_fails_pending_and_later_requests(tiny_models):
    async with engine_of(tiny_models("qwen3"), max_num_seqs=1) as engine:
        running = [asyncio.create_task(engine.generate_batch(batch(PROMPT, **LONG))) for _ in range(3)]
        await until_running(engine)
        engine._core.model.lm_head = None  # as if memory were corrupted
        for task in running:
            with pytest.raises(WorkerError, match="TypeError"):
                await asyncio.wait_for(task, 10)
        with pytest.raises(WorkerError, match="TypeError"):
            await engine.generate_batch(batch(PROMPT))
        with pytest.raises(WorkerError, match="native engine stopped"):
            await engine.weight_version()


async def test_closing_ends_thread_and_fails_pending_requests(tiny_models):
    engine = NativeInferenceEngine(tiny_models("qwen3"))
    running = asyncio.create_task(engine.generate_batch(batch(PROMPT, **LONG)))
    await until_running(engine)
    await engine.teardown()
    assert not engine._thread.is_alive()
    with pytest.raises(WorkerError, match="closed"):
        await running
    with pytest.raises(WorkerError, match="closed"):
        await engine.generate_batch(batch(PROMPT))
    await engine.teardown()  # twice is fine


def test_context_longer_than_model_raises_config_error(tiny_models):
    with pytest.raises(ConfigError, match="max_position_embeddings=512"):
        NativeInferenceEngine(tiny_models("qwen3"), max_model_len=1000)

"""The engine behind the interface: seeds, stops, pauses, weights in flight, sleep, and errors that reach callers."""

import asyncio
import contextlib

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from skyrl_train.errors import ConfigError, WeightSyncError, WorkerError
from skyrl_train.inference_engines.base import InferenceEngineInput
from skyrl_train.inference_engines.native.engine import NativeInferenceEngine
from skyrl_train.weight_sync.base import WeightSyncInitInfo, WeightUpdateRequest
from skyrl_train.weight_sync.checksum import checksum_of

PROMPT = [5, 9, 12, 30, 7]
LONG = {"max_tokens": 200, "ignore_eos": True}


@contextlib.asynccontextmanager
async def engine_of(path: str, **settings):
    engine = NativeInferenceEngine(path, **settings)
    try:
        yield engine
    finally:
        await engine.teardown()


def batch(*prompts: list[int], **params) -> InferenceEngineInput:
    return InferenceEngineInput(prompt_token_ids=list(prompts), sampling_params=params)


async def until_running(engine: NativeInferenceEngine, tokens: int = 3) -> None:
    """Waits until something has been written; at most 10 seconds."""
    for _ in range(1000):
        rows = engine._core._rows
        if len(rows) and rows.length[0] - rows.prompt_length[0] >= tokens:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("nothing runs")


async def test_a_trained_model_writes_its_story(stories260k):
    async with engine_of(stories260k) as engine:
        ids = engine._tokenizer("Once upon a time")["input_ids"]
        answer = await engine.generate(batch(ids, temperature=0.0, max_tokens=60))
        assert answer["responses"][0].startswith(
            ", there was a little girl named Lily. She loved to play outside in the park."
        )
        stopped = await engine.generate(batch(ids, temperature=0.0, max_tokens=60, stop=["Lily. She", "park"]))
        assert stopped["stop_reasons"] == ["stop"]
        assert stopped["responses"][0].startswith(", there was a little girl named Lily. She")
        assert len(stopped["responses"][0]) < len(", there was a little girl named Lily. She loved to")


async def test_the_same_seed_gives_the_same_answers_and_another_seed_others(tiny_models):
    async with engine_of(tiny_models("qwen3")) as engine:
        params = {"max_tokens": 30, "ignore_eos": True}
        first = await engine.generate(batch(PROMPT, PROMPT, seed=1, **params))
        again = await engine.generate(batch(PROMPT, PROMPT, seed=1, **params))
        other = await engine.generate(batch(PROMPT, PROMPT, seed=2, **params))
        assert first == again
        answers = [*first["response_ids"], *other["response_ids"]]
        assert len({tuple(ids) for ids in answers}) == 4  # request i of a batch has randomness of its own
        swapped = await engine.generate(batch(PROMPT, PROMPT, seed=[[1, 1], [1, 0]], **params))
        assert swapped["response_ids"] == first["response_ids"][::-1]
        free = await engine.generate(batch(PROMPT, PROMPT, **params))
        assert free["response_ids"][0] != free["response_ids"][1]


async def test_answers_tell_tokens_text_log_probs_and_versions(tiny_models):
    async with engine_of(tiny_models("llama")) as engine:
        answer = await engine.generate(batch(PROMPT, max_tokens=6, ignore_eos=True, logprobs=None))
        assert answer["response_logprobs"] is None
        assert answer["weight_versions"] == [[0] * 6]
        answer = await engine.generate(batch(PROMPT, max_tokens=6, ignore_eos=True))
        assert len(answer["response_logprobs"][0]) == 6 and max(answer["response_logprobs"][0]) <= 0
        text = engine._tokenizer.decode(answer["response_ids"][0], skip_special_tokens=True)
        assert answer["responses"] == [text]
        assert await engine.generate(batch()) == {
            "responses": [],
            "response_ids": [],
            "stop_reasons": [],
            "response_logprobs": [],
            "weight_versions": [],
        }


async def test_abort_returns_what_was_written_and_the_rest_can_be_asked_for(tiny_models):
    async with engine_of(tiny_models("qwen3"), max_num_seqs=1) as engine:
        whole = await engine.generate(batch(PROMPT, seed=3, **LONG))
        running = asyncio.create_task(engine.generate(batch(PROMPT, PROMPT, seed=3, **LONG)))
        await until_running(engine)
        await engine.abort_generation()
        part = await running
        assert part["stop_reasons"] == ["abort", "abort"]
        assert part["response_ids"][1] == []  # still waiting for a row
        written = part["response_ids"][0]
        assert 3 <= len(written) < 200
        params = LONG | {"max_tokens": 200 - len(written), "seed": 3}
        rest = await engine.generate(batch(PROMPT + written, **params))
        assert written + rest["response_ids"][0] == whole["response_ids"][0]
        assert part["response_logprobs"][0] + rest["response_logprobs"][0] == whole["response_logprobs"][0]


async def test_a_pause_that_keeps_changes_nothing_but_the_time(tiny_models):
    async with engine_of(tiny_models("qwen3")) as engine:
        whole = await engine.generate(batch(PROMPT, seed=3, **LONG))
        running = asyncio.create_task(engine.generate(batch(PROMPT, seed=3, **LONG)))
        await until_running(engine)
        await engine.pause_generation("keep")
        length = engine._core._rows.length[0]
        late = asyncio.create_task(engine.generate(batch(PROMPT, max_tokens=2)))
        await asyncio.sleep(0.1)
        assert engine._core._rows.length[0] == length and not late.done()
        await engine.resume_generation()
        assert await running == whole
        await late


async def test_a_pause_that_waits_lets_the_running_end_and_no_new_ones_start(tiny_models):
    async with engine_of(tiny_models("qwen3")) as engine:
        running = asyncio.create_task(engine.generate(batch(PROMPT, seed=3, **LONG)))
        await until_running(engine)
        pausing = asyncio.create_task(engine.pause_generation("wait"))
        await asyncio.sleep(0)
        late = asyncio.create_task(engine.generate(batch(PROMPT, max_tokens=2)))
        await pausing
        assert engine._core.num_running == 0
        assert (await running)["stop_reasons"] == ["length"]
        assert not late.done()
        await engine.resume_generation()
        assert (await late)["stop_reasons"] == ["length"]


async def test_a_pause_that_aborts_returns_the_running_now(tiny_models):
    async with engine_of(tiny_models("qwen3")) as engine:
        running = asyncio.create_task(engine.generate(batch(PROMPT, **LONG)))
        await until_running(engine)
        await engine.pause_generation("abort")
        assert (await running)["stop_reasons"] == ["abort"]
        await engine.resume_generation()


async def test_a_caller_who_goes_away_frees_its_row(tiny_models):
    async with engine_of(tiny_models("qwen3")) as engine:
        running = asyncio.create_task(engine.generate(batch(PROMPT, **LONG)))
        await until_running(engine)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await engine.pause_generation("wait")
        assert engine._core.num_running == 0 and not engine._pending
        await engine.resume_generation()
        assert (await engine.generate(batch(PROMPT, max_tokens=1)))["stop_reasons"]


def chunk_of(tensors: dict[str, torch.Tensor]) -> WeightUpdateRequest:
    """The tensors' bytes one after the other, as the trainer sends them."""
    return WeightUpdateRequest(
        names=list(tensors),
        dtypes=[str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
        shapes=[tuple(tensor.shape) for tensor in tensors.values()],
        buffer=np.concatenate([tensor.detach().numpy().reshape(-1).view(np.uint8) for tensor in tensors.values()]),
    )


def other_weights(path: str) -> dict[str, torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(path)
    torch.manual_seed(1)
    return {name: parameter + 0.1 * torch.randn_like(parameter) for name, parameter in model.named_parameters()}


SHARED_MEMORY = WeightSyncInitInfo(strategy="shared_memory")


@pytest.mark.parametrize("name", ["llama", "qwen3"])  # untied and tied embeddings
async def test_weights_change_in_flight_and_later_tokens_say_so(tiny_models, tmp_path, name):
    weights = other_weights(tiny_models(name))
    async with engine_of(tiny_models(name)) as engine:
        await engine.init_weight_update_communicator(SHARED_MEMORY)
        before = await engine.generate(batch(PROMPT, seed=3, **LONG))
        running = asyncio.create_task(engine.generate(batch(PROMPT, seed=3, **LONG)))
        await until_running(engine)
        names = list(weights)
        await engine.update_named_weights(chunk_of({name: weights[name] for name in names[:5]}))
        length = engine._core._rows.length[0]
        await asyncio.sleep(0.1)
        assert engine._core._rows.length[0] == length  # nothing is written by weights half old, half new
        await engine.update_named_weights(chunk_of({name: weights[name] for name in names[5:]}))
        assert await engine.finish_weight_update(7) == checksum_of(weights.items())
        assert await engine.weight_version() == 7
        answer = await running
        [versions] = answer["weight_versions"]
        old = versions.count(0)
        assert versions == [0] * old + [7] * (200 - old) and 3 <= old < 200
        assert answer["response_ids"][0][:old] == before["response_ids"][0][:old]
        after = await engine.generate(batch(PROMPT, seed=3, **LONG))

    reference = AutoModelForCausalLM.from_pretrained(tiny_models(name))
    reference.load_state_dict(weights, strict=False)
    reference.tie_weights()
    reference.save_pretrained(tmp_path)
    ids = torch.tensor([PROMPT + after["response_ids"][0]])
    with torch.no_grad():
        log_probs = reference(ids).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
    expected = log_probs.gather(1, ids[0, len(PROMPT) :, None])[:, 0]
    torch.testing.assert_close(torch.tensor(after["response_logprobs"][0]), expected, atol=1e-4, rtol=0)


async def test_a_wrong_chunk_changes_nothing(tiny_models):
    weights = other_weights(tiny_models("qwen3"))
    first = next(iter(weights))
    async with engine_of(tiny_models("qwen3")) as engine:
        with pytest.raises(WeightSyncError, match="before init_weight_update_communicator"):
            await engine.update_named_weights(chunk_of(weights))
        await engine.init_weight_update_communicator(SHARED_MEMORY)
        unchanged = await engine.finish_weight_update(0)
        with pytest.raises(WeightSyncError, match="no parameter"):
            await engine.update_named_weights(chunk_of({first: weights[first], "model.typo": torch.zeros(2)}))
        with pytest.raises(WeightSyncError, match=r"has shape \(62, 48\) in the engine; got \(3,\)"):
            await engine.update_named_weights(chunk_of({first: torch.zeros(3)}))
        assert await engine.finish_weight_update(0) == unchanged


async def test_an_update_that_is_not_finished_in_time_is_an_error_and_no_hang(tiny_models):
    weights = other_weights(tiny_models("qwen3"))
    async with engine_of(tiny_models("qwen3"), update_timeout_seconds=0.2) as engine:
        await engine.init_weight_update_communicator(SHARED_MEMORY)
        await engine.update_named_weights(chunk_of(weights))
        with pytest.raises(WorkerError, match="not finished within 0"):
            await engine.generate(batch(PROMPT, max_tokens=2))


async def test_sleep_one_keeps_the_weights_and_sleep_two_wants_them_all_again(tiny_models):
    weights = other_weights(tiny_models("qwen3"))
    async with engine_of(tiny_models("qwen3")) as engine:
        await engine.init_weight_update_communicator(SHARED_MEMORY)
        before = await engine.generate(batch(PROMPT, seed=1, max_tokens=20))
        await engine.sleep(level=1)
        waiting = asyncio.create_task(engine.generate(batch(PROMPT, seed=1, max_tokens=20)))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await engine.wake_up()
        assert await waiting == before

        await engine.sleep(level=2)
        with pytest.raises(WeightSyncError, match="wake_up"):
            await engine.update_named_weights(chunk_of(weights))
        await engine.wake_up(["weights"])
        with pytest.raises(RuntimeError, match="full weight update must come first"):
            await engine.generate(batch(PROMPT, max_tokens=2))
        names = list(weights)
        await engine.update_named_weights(chunk_of({name: weights[name] for name in names[:-1]}))
        with pytest.raises(WeightSyncError, match="1 parameters dropped"):
            await engine.finish_weight_update(1)
        await engine.update_named_weights(chunk_of({names[-1]: weights[names[-1]]}))
        await engine.finish_weight_update(1)
        await engine.wake_up(["kv_cache"])
        assert (await engine.generate(batch(PROMPT, max_tokens=2)))["weight_versions"] == [[1, 1]]


async def test_sleep_is_refused_while_requests_run(tiny_models):
    async with engine_of(tiny_models("qwen3")) as engine:
        running = asyncio.create_task(engine.generate(batch(PROMPT, **LONG)))
        await until_running(engine)
        await engine.pause_generation("keep")
        with pytest.raises(RuntimeError, match="cannot sleep while 1 requests run"):
            await engine.sleep()
        await engine.resume_generation()
        await running


@pytest.mark.parametrize(
    "prompt, params, message",
    [
        ([], {}, "at least one token; got an empty prompt"),
        ([5, 62], {}, "vocabulary, 0 to 61; got 62"),
        ([-1], {}, "vocabulary, 0 to 61; got -1"),
        ([5] * 64, {}, "shorter than max_model_len=64"),
        ([5], {"temperatur": 1}, "unknown sampling parameter temperatur=1; did you mean temperature"),
        ([5], {"stop_token_ids": [99]}, "stop_token_ids must lie in the vocabulary, 0 to 61; got 99"),
        ([5], {"seed": [[1, 2], [3, 4]]}, "one .seed, index. pair for each of the 1 requests"),
    ],
)
async def test_bad_input_is_named_with_its_rule(tiny_models, prompt, params, message):
    async with engine_of(tiny_models("qwen3"), max_model_len=64) as engine:
        with pytest.raises(ValueError, match=message):
            await engine.generate(batch([5], prompt, **params) if not params else batch(prompt, **params))
        assert engine._core.num_running + engine._core.num_waiting == 0


async def test_an_error_in_a_step_reaches_everyone_who_waits_and_all_who_come_later(tiny_models):
    async with engine_of(tiny_models("qwen3"), max_num_seqs=1) as engine:
        running = [asyncio.create_task(engine.generate(batch(PROMPT, **LONG))) for _ in range(3)]
        await until_running(engine)
        engine._core.model.lm_head = None  # as if memory were corrupted
        for task in running:
            with pytest.raises(WorkerError, match="native engine stopped: TypeError"):
                await asyncio.wait_for(task, 10)
        with pytest.raises(WorkerError, match="native engine stopped: TypeError"):
            await engine.generate(batch(PROMPT))
        with pytest.raises(WorkerError, match="native engine stopped"):
            await engine.weight_version()


async def test_closing_ends_the_thread_and_fails_what_is_pending(tiny_models):
    engine = NativeInferenceEngine(tiny_models("qwen3"))
    running = asyncio.create_task(engine.generate(batch(PROMPT, **LONG)))
    await until_running(engine)
    await engine.teardown()
    assert not engine._thread.is_alive()
    with pytest.raises(WorkerError, match="closed"):
        await running
    with pytest.raises(WorkerError, match="closed"):
        await engine.generate(batch(PROMPT))
    await engine.teardown()  # twice is fine


def test_a_context_beyond_the_models_is_a_config_error(tiny_models):
    with pytest.raises(ConfigError, match="from 2 to the model's max_position_embeddings=512; got 1000"):
        NativeInferenceEngine(tiny_models("qwen3"), max_model_len=1000)


@pytest.mark.slow
def test_a_ray_actor_computes_what_the_plain_class_does(tiny_models, ray_cpu):
    import ray

    request = batch(PROMPT, [8] * 40, seed=4, max_tokens=50)
    actor = ray.remote(num_cpus=1)(NativeInferenceEngine).remote(tiny_models("qwen3"))
    two = ray.get([actor.generate.remote(request), actor.generate.remote(request)], timeout=120)  # both at a time
    ray.get(actor.teardown.remote(), timeout=30)
    ray.kill(actor)

    async def here():
        async with engine_of(tiny_models("qwen3")) as engine:
            return await engine.generate(request)

    assert two == [asyncio.run(here())] * 2

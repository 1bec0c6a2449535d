"""Responses of engines through the client equal those of the `torch` backend, whatever happens to engines meanwhile."""

import asyncio
from pathlib import Path

import pytest
from msgspec import structs
from random_data import spec
from transformers import AutoTokenizer

from tx.errors import ModelError
from tx.tinker.backends.base import BackendLost
from tx.tinker.backends.torch.sampling import NativeSampling
from tx.tinker.types import PromptTargets, SampleParams, SampleSpec

SPECS = {
    "several": spec(5),
    "greedy, with scores": spec(temperature=0.0, scores=True),
    "truncated": spec(4, temperature=0.7, top_k=9, top_p=0.9),
    "scores at a temperature": spec(3, temperature=0.5, scores=True),
    "top-k tokens of the prompt": spec(top=3),
    "top-k tokens and scores of several": spec(2, temperature=0.5, scores=True, top=2),
    "scores of one": spec(max_tokens=1, scores=True),
    "the end of sequence": spec(6, max_tokens=80, stop_at_eos=True),
    "stop tokens": spec(3, max_tokens=80, stop_token_ids=(17, 40)),
    "no budget": SampleSpec(prompt=[9] * 480, params=SampleParams(seed=2)),
}


async def test_completions_match_torch_backend(engines_of, adapter, tiny_model: Path):
    native = NativeSampling(tiny_model)
    await native.start()
    async with engines_of(num_engines=2) as engines:
        for name, one in SPECS.items():
            assert await engines.sampling.sample(one, adapter(1)) == await native.sample(one, adapter(1)), name
        for folder in (None, adapter(2, train_mlp=False), adapter(3, train_unembed=True)):
            one = SPECS["scores at a temperature"]
            assert await engines.sampling.sample(one, folder) == await native.sample(one, folder)
        [plain] = (await engines.sampling.sample(spec(max_tokens=150, seed=5), None)).sequences
        place = next(place for place, token in enumerate(plain.tokens) if token < 3)
        stops = (
            AutoTokenizer.from_pretrained(tiny_model).decode([plain.tokens[place]]),
        )  # the text of a special token
        [ended] = (await engines.sampling.sample(spec(max_tokens=150, seed=5, stop_strings=stops), None)).sequences
    assert ended.tokens == plain.tokens[: place + 1] and ended.stop_reason == "stop"
    await native.close()


async def test_requests_unsupported_by_engines_are_refused_as_user_error(engines_of, adapter):
    async with engines_of(takes_head=False) as engines:
        with pytest.raises(ModelError, match=r"generator\.backend=native") as refused:
            await engines.sampling.sample(spec(), adapter(3, train_unembed=True))
        with pytest.raises(ModelError, match="512") as too_long:
            await engines.sampling.sample(spec(prompt=[5] * 600), None)
        targets = PromptTargets(shape=(len(spec().prompt) - 1, 1), ids=[5] * (len(spec().prompt) - 1))
        with pytest.raises(ModelError, match="target_prompt_logprobs"):
            await engines.sampling.sample(structs.replace(spec(), targets=targets), None)
        assert refused.value.category == too_long.value.category == "user"
        assert engines.sampling.num_running() == 0
        await engines.sampling.sample(spec(), adapter(1))


@pytest.mark.slow
async def test_more_adapters_than_there_is_room_for_take_turns(engines_of, adapter):
    folders = [adapter(seed) for seed in range(3)]
    async with engines_of(max_loaded_adapters=4) as engines:
        alone = [await engines.sampling.sample(spec(2), folder) for folder in folders]
    async with engines_of(max_loaded_adapters=1) as engines:
        calls = [engines.sampling.sample(spec(2), folder, tenant=str(folder)) for folder in [*folders, *folders]]
        async with asyncio.timeout(60):
            assert await asyncio.gather(*calls) == [*alone, *alone]
    assert len({tuple(output.sequences[0].tokens) for output in alone}) == 3


@pytest.mark.slow
async def test_engine_crash_costs_only_time(engines_of, adapter):
    """Requests under way go on, and adapters are there again, in every engine."""
    long = spec(2, max_tokens=150)
    async with engines_of(num_engines=2) as engines, asyncio.timeout(120):
        undisturbed = await engines.sampling.sample(long, adapter(1))
        loaded = await engines.sampling.sample(spec(2), adapter(2))
        for index in (0, 1):
            running = asyncio.create_task(engines.sampling.sample(long, adapter(1)))
            await asyncio.sleep(0.05)
            await engines.end(index)
            assert await running == undisturbed
        for _ in range(4):
            assert await engines.sampling.sample(spec(2), adapter(2)) == loaded
        assert engines.client.take_metrics()["engines/restarts"] == 2


async def test_adapter_is_loaded_despite_simultaneous_engine_crash(engines_of, adapter):
    async with engines_of(num_engines=2, max_loaded_adapters=1) as engines, asyncio.timeout(120):
        before = await engines.sampling.sample(spec(), adapter(1))
        asking = asyncio.create_task(engines.sampling.sample(spec(), adapter(2)))  # takes the place of the first
        await asyncio.sleep(0)
        await engines.end(0)
        await asking
        assert await engines.sampling.sample(spec(), adapter(1)) == before


async def test_backend_is_lost_after_exhausting_restarts(engines_of, adapter):
    async with engines_of(max_restarts=0) as engines, asyncio.timeout(60):
        running = asyncio.create_task(engines.sampling.sample(spec(max_tokens=None), adapter(1)))
        while not engines.sampling.num_running():
            await asyncio.sleep(0.01)
        await engines.end()
        with pytest.raises(BackendLost, match=r"generator\.max_engine_restarts=0"):
            await running
        with pytest.raises(BackendLost):
            await engines.sampling.sample(spec(), None)

"""The client over two real engines: who gets what, in which order, and that splitting a batch changes nothing."""

import asyncio
from collections.abc import Iterator

import pytest
from transformers import AutoTokenizer

from skyrl_train.config import SkyRLConfig
from skyrl_train.errors import WeightSyncError
from skyrl_train.inference_engines.base import InferenceEngineInput, InferenceEngineOutput
from skyrl_train.inference_engines.inference_engine_client import InferenceEngineClient
from skyrl_train.inference_engines.native.engine import NativeInferenceEngine

PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13], [5, 6, 7], [20]]
PARAMS = {"max_tokens": 6, "temperature": 1.0, "seed": 11, "logprobs": 0, "ignore_eos": True}


class Watched(NativeInferenceEngine):
    """A native engine that counts the requests it got."""

    num_requests = 0

    async def generate(self, input_batch: InferenceEngineInput) -> InferenceEngineOutput:
        self.num_requests += len(input_batch.get("prompt_token_ids") or [])
        return await super().generate(input_batch)


@pytest.fixture
def engines(chat_model: str) -> Iterator[list[Watched]]:
    pair = [Watched(chat_model), Watched(chat_model)]
    yield pair
    for engine in pair:
        asyncio.run(engine.teardown())


@pytest.fixture
def client(engines: list[Watched], chat_model: str) -> InferenceEngineClient:
    return InferenceEngineClient(engines, AutoTokenizer.from_pretrained(chat_model), SkyRLConfig())


async def test_a_split_batch_gives_what_one_engine_would(client, engines):
    alone = await engines[0].generate(InferenceEngineInput(prompt_token_ids=PROMPTS, sampling_params=PARAMS))
    before = [engine.num_requests for engine in engines]
    split = await client.generate(InferenceEngineInput(prompt_token_ids=PROMPTS, sampling_params=PARAMS))
    taken = [engine.num_requests - count for engine, count in zip(engines, before, strict=True)]
    assert sorted(taken) == [2, 3]
    assert split == alone


async def test_a_session_stays_and_new_ones_go_where_least_is_to_do(client, engines):
    def ask(session: str):
        request = InferenceEngineInput(prompt_token_ids=[[5, 6]], sampling_params=PARAMS, session_ids=[session])
        return client.generate(request)

    await asyncio.gather(*(ask(f"s{i}") for i in range(8)))
    assert [engine.num_requests for engine in engines] == [4, 4]
    for _ in range(3):
        await ask("s1")
    assert sorted(engine.num_requests for engine in engines) == [4, 7]


async def test_conversations_are_templated_and_other_requests_refused(client):
    conversation = [{"role": "user", "content": "hi"}]
    tokens = client.tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_dict=True)
    by_text = await client.generate(InferenceEngineInput(prompts=[conversation], sampling_params=PARAMS))
    by_ids = await client.generate(InferenceEngineInput(prompt_token_ids=[tokens["input_ids"]], sampling_params=PARAMS))
    assert by_text == by_ids
    with pytest.raises(ValueError, match="either prompts or prompt_token_ids"):
        await client.generate(InferenceEngineInput(sampling_params=PARAMS))
    with pytest.raises(ValueError, match="2 prompts need as many session_ids; got 1"):
        await client.generate(InferenceEngineInput(prompt_token_ids=[[5], [6]], session_ids=["a"]))
    with pytest.raises(ValueError, match="at least one engine"):
        InferenceEngineClient([], client.tokenizer, SkyRLConfig())


async def test_engines_that_hold_different_weights_are_found(client, engines):
    assert await client.finish_weight_update(3) == await engines[0].finish_weight_update(3)
    assert await client.weight_version() == 3
    weight = next(iter(engines[1]._core.model.parameters()))
    weight.data[0, 0] += 1
    with pytest.raises(WeightSyncError, match="different weights"):
        await client.finish_weight_update(4)

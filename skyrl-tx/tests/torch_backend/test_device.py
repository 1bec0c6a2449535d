"""A server on a GPU, and on a CPU: an adapter learns a text, and a sampler has what it learned."""

import json
from pathlib import Path

import numpy as np
import pytest
from plain_client import Client, Model
from tx_server import ServerProcess

from tx.tinker.types import Datum
from tx.tinker.wire.codec import decode_sample_output

TOKENS = np.random.default_rng(0).permutation(np.arange(3, 99))[:12]
DATA = [Datum(TOKENS[:-1], {"target_tokens": TOKENS[1:], "weights": np.ones(11, np.float32)})]


async def score(model: Model, number: int) -> float:
    """The log-prob of the text under the model's weights so far, by a sampler."""
    request_id, sampler = await model.save_for_sampler()
    await model.client.fetch(request_id)
    asked = await model.sample(sampler, number, TOKENS.tolist(), 1, max_tokens=4, stop=[], prompt_logprobs=True)
    output = decode_sample_output(await model.client.fetch(asked))
    assert output.prompt_logprobs is not None and len(output.sequences[0].tokens) == 4
    return sum(value for value in output.prompt_logprobs if value is not None)


@pytest.mark.process
@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)]
)
async def test_server_trains_and_samples_on_device(device: str, tiny_model: Path, tmp_path: Path):
    options = ("--base-model", str(tiny_model), "--served-model-name", "tiny", "--no-standby-engine")
    settings = json.dumps({"device": device})
    with ServerProcess(tmp_path, *options, "--backend-config", settings, port=0) as server:
        async with Client(server.url) as client:
            model = await Model.new(client, "tiny", number=0, rank=8, seed=0)
            before = await score(model, 0)
            for _ in range(3):
                await model.train(DATA)
                await client.fetch(await model.step(learning_rate=0.02))
            assert await score(model, 1) > before + 5

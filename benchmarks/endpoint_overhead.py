"""CPU seconds of the rollout endpoint and its recorder, as a share of the rollout's.

    OMP_NUM_THREADS=1 python benchmarks/endpoint_overhead.py --protocol messages --stream

Concurrent conversations, each with a separate session key, grow turn by turn over HTTP. The server's process is
measured twice, with the client elsewhere: with the native engine and an untrained model, and with an engine that
returns as many tokens without computing. The second is what the endpoint costs, HTTP, templates, streams and recorder
together. A larger model makes the share smaller.
"""

import argparse
import asyncio
import gc
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch

import httpx

from skyrl_train.endpoint.recorder import RequestRecorder
from skyrl_train.endpoint.server import EndpointServer
from skyrl_train.inference_engines.base import Completion, GenerationRequest
from skyrl_train.inference_engines.native.engine import NativeInferenceEngine
from skyrl_train.utils.process_log import configure_logging
from skyrl_train_testing.scripted_engine import PromptScriptEngine
from skyrl_train_testing.tiny_models import build_character_tokenizer, build_tiny_qwen3

LIMIT = 0.05
MAX_SECONDS = 1800.0
PATHS = {"chat": "chat/completions", "messages": "messages", "responses": "responses"}


class LongAnswers(NativeInferenceEngine):
    """Native engine with responses of maximal length."""

    async def generate(self, request: GenerationRequest) -> Completion:
        return await super().generate(replace(request, sampling_params=request.sampling_params | {"ignore_eos": True}))


class NoWork(PromptScriptEngine):
    """Engine that returns responses without computation."""

    async def generate(self, request: GenerationRequest) -> Completion:
        count = request.sampling_params["max_tokens"]
        return Completion([40 + place % 50 for place in range(count)], "length", [0] * count, [-1.0] * count)


def serve(pipe: Connection, folder: str, computes: bool, options: argparse.Namespace) -> None:
    """Serve until the client is done. Sends: the keys and the URL, then the CPU seconds and the counts."""
    configure_logging()

    async def run() -> None:
        tokenizer = build_character_tokenizer()
        length = 2 * options.turns * (options.tokens + options.prompt) + 256
        if computes:
            engine = LongAnswers(
                folder, device="cpu", dtype="float32", max_num_seqs=options.conversations, enable_prefix_caching=True
            )
        else:
            engine = NoWork(tokenizer, str, length)
        recorder = RequestRecorder()
        server = EndpointServer(engine, tokenizer, "tiny", recorder=recorder, api_key="secret")
        await server.start()
        pipe.send((server.url, [server.session_key(f"s{number}") for number in range(options.conversations)]))
        gc.collect()  # what imports and the start left behind is not the endpoint's
        began = time.process_time()
        while not await asyncio.to_thread(pipe.poll, 1.0):
            pass
        seconds = time.process_time() - began
        turns = [turn for name in recorder.list_sessions() for turn in recorder.take(name)]
        tokens = sum(len(turn.response_ids) for turn in turns)
        pipe.send((seconds, len(turns), tokens, server.frontend.take_metrics()))
        await server.stop()
        await engine.teardown()

    asyncio.run(run())


async def converse(client: httpx.AsyncClient, url: str, key: str, options: argparse.Namespace) -> None:
    """Hold one conversation."""
    messages: list[dict[str, Any]] = []
    for turn in range(options.turns):
        messages.append({"role": "user", "content": f"{turn} " + "tell me more " * (options.prompt // 13)})
        body: dict[str, Any] = {"model": "tiny", "stream": options.stream}
        if options.protocol == "responses":
            body |= {"input": messages, "max_output_tokens": options.tokens, "store": False}
        else:
            body |= {"messages": messages, "max_tokens": options.tokens}
        headers = {"Authorization": f"Bearer {key}"}
        async with client.stream("POST", f"{url}/{PATHS[options.protocol]}", json=body, headers=headers) as answer:
            if answer.status_code != 200:
                raise SystemExit(f"{answer.status_code}: {(await answer.aread()).decode()}")
            text = "".join([piece async for piece in _pieces(answer, options)])
        messages.append({"role": "assistant", "content": text})


async def _pieces(answer: httpx.Response, options: argparse.Namespace) -> AsyncIterator[str]:
    """Yield the texts of an answer."""
    if not options.stream:
        body = json.loads(await answer.aread())
        if options.protocol == "chat":
            yield body["choices"][0]["message"]["content"]
        elif options.protocol == "messages":
            yield body["content"][0]["text"]
        else:
            yield body["output"][0]["content"][0]["text"]
        return
    async for line in answer.aiter_lines():
        if not line.startswith("data: {"):
            continue
        event = json.loads(line.removeprefix("data: "))
        if options.protocol == "chat" and event["choices"]:
            yield event["choices"][0]["delta"].get("content") or ""
        elif event.get("type") == "content_block_delta":
            yield event["delta"]["text"]
        elif event.get("type") == "response.output_text.delta":
            yield event["delta"]


def measured(folder: str, computes: bool, options: argparse.Namespace) -> tuple[float, int, int, dict[str, float]]:
    """Return CPU seconds of the server, turns, tokens and the endpoint's counts."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(there, folder, computes, options), daemon=True)
    process.start()
    there.close()  # so that the end of the process is the end of what it sends
    url, keys = here.recv()

    async def run() -> None:
        limits = httpx.Limits(max_connections=len(keys))
        async with httpx.AsyncClient(timeout=1800, limits=limits) as client:
            await asyncio.gather(*(converse(client, url, key, options) for key in keys))

    asyncio.run(asyncio.wait_for(run(), MAX_SECONDS))
    here.send("done")
    result = here.recv()
    process.join()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--protocol", choices=list(PATHS), default="chat")
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--conversations", type=int, default=64)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=128, help="of an answer")
    parser.add_argument("--prompt", type=int, default=128, help="characters, which are tokens, of what a user says")
    parser.add_argument("--hidden", type=int, default=256, help="size of the model, with four layers")
    options = parser.parse_args()
    configure_logging()
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = build_character_tokenizer()
        tokenizer.save_pretrained(folder)
        model = build_tiny_qwen3(
            hidden_size=options.hidden,
            intermediate_size=3 * options.hidden,
            num_hidden_layers=4,
            vocab_size=len(tokenizer),
            max_position_embeddings=4 * options.turns * (options.tokens + options.prompt),
        )
        model.save_pretrained(Path(folder))
        parameters = sum(weight.numel() for weight in model.parameters())
        whole, turns, tokens, counts = measured(folder, True, options)
        own, same_turns, same_tokens, _ = measured(folder, False, options)
    assert (turns, tokens) == (same_turns, same_tokens), "the engines answered differently"
    form = f"{options.protocol}{', streamed' if options.stream else ''}"
    print(f"{form}: {options.conversations} conversations at once, {turns} turns, {tokens} tokens drawn")
    print(f"model of {parameters / 1e6:.1f} million parameters: {whole:.1f} CPU seconds; load {os.getloadavg()[0]:.1f}")
    print(f"turns that went on from drawn tokens: {counts['endpoint/exact_turns']:.0f}")
    print(f"endpoint and recorder: {own:.2f} CPU seconds, {1000 * own / turns:.2f} ms a turn, {own / whole:.1%}")
    sys.exit(own > LIMIT * whole)


if __name__ == "__main__":
    main()

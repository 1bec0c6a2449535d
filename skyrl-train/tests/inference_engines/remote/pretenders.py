"""Small HTTP servers that are not what they should be, each in a thread."""

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from skyrl_train.distributed.process_group import find_free_port
from skyrl_train_testing.engine_conformance.model import VOCABULARY


@contextmanager
def serving(app: FastAPI, port: int | None = None) -> Iterator[str]:
    """`app` on loopback while the block runs; its URL."""
    port = port or find_free_port()
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = server.force_exit = True
        thread.join(10)


def something_else() -> FastAPI:
    """A web page."""
    app = FastAPI(openapi_url=None)

    @app.get("/")
    def page() -> str:
        return "It works!"

    return app


def like_vllm(
    model: str,
    *,
    vocab_size: int,
    tokenize: Callable[[str], list[int]],
    generate: Callable[[], Any] | None = None,
    served_name: str | None = None,
    dev_mode: bool = True,
    scale_out: bool = True,
) -> FastAPI:
    """Answers vLLM's routes as a vLLM server that was started so would, but computes nothing."""
    app = FastAPI(openapi_url=None)
    config = {
        "model_config": {
            "model": model,
            "dtype": "torch.float32",
            "max_model_len": 1024,
            "logprobs_mode": "raw_logprobs",
            "enable_sleep_mode": False,
        },
        "parallel_config": {"worker_extension_cls": ""},
        "lora_config": None,
        "device_config": {"device_type": "cuda"},
        "cache_config": {"enable_prefix_caching": True},
    }
    fixed: dict[str, Any] = {
        "/version": {"version": "0.32.0"},
        "/health": {},
        "/v1/models": {"data": [{"id": served_name or model, "root": model, "parent": None}]},
        "/get_world_size": {"world_size": 1},
        "/weight_info": {"weight_version": "default"},
    }
    if dev_mode:
        fixed["/server_info"] = {"vllm_config": config, "vllm_env": {}}
    for path, answer in fixed.items():
        app.get(path)(lambda answer=answer: answer)

    @app.post("/tokenize")
    async def tokens(request: Request) -> dict[str, Any]:
        return {"tokens": tokenize((await request.json())["prompt"])}

    @app.post("/inference/v1/generate")
    async def answer(request: Request) -> Any:
        asked = await request.json()
        if not scale_out:
            return JSONResponse({"error": {"message": "Scale-out endpoints are disabled."}}, 403)
        if asked["sampling_params"].get("stop_token_ids") == [-1]:
            return JSONResponse({"error": {"message": f"out of vocab. Vocabulary size: {vocab_size}"}}, 400)
        assert generate is not None
        said = generate()
        return await said if asyncio.iscoroutine(said) else said

    return app


def spelled(text: str) -> list[int]:
    """Encode a text like the tiny model's tokenizer: one character per token, `<pad>` for unknown ones."""
    if text in VOCABULARY:
        return [VOCABULARY.index(text)]
    return [VOCABULARY.index(letter) if letter in VOCABULARY else 0 for letter in text]


async def forever() -> None:
    await asyncio.sleep(3600)


def die() -> None:
    os._exit(9)

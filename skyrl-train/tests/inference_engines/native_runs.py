"""Native engines and their cores on tiny models, for tests."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoTokenizer

from skyrl_gym.concurrency import gather_or_cancel
from skyrl_train.config import SkyRLConfig
from skyrl_train.inference_engines.base import InferenceEngineInput, InferenceEngineInterface
from skyrl_train.inference_engines.columns import to_requests
from skyrl_train.inference_engines.inference_engine_client import InferenceEngineClient
from skyrl_train.inference_engines.native.core import NativeEngineCore
from skyrl_train.inference_engines.native.engine import NativeInferenceEngine
from skyrl_train.inference_engines.native.loading import load_model
from skyrl_train.inference_engines.native.requests import Request
from skyrl_train.inference_engines.request import Completion
from skyrl_train_testing.engine_conformance.transfer import WeightPath

PROMPT = [5, 9, 12, 30, 7]


def make_core(path: str, dtype: str = "float32", device: str = "cpu", **settings: Any) -> NativeEngineCore:
    model = load_model(
        path, device=torch.device(device), dtype=dtype, model_config_kwargs=None, trust_remote_code=False
    )
    given: dict[str, Any] = {"max_num_seqs": 64, "eos_ids": ()} | settings
    core = NativeEngineCore(model, max_model_len=512, decode=lambda ids: "".join(map(chr, ids)), **given)
    if core._runner.graphs is not None and device == "cpu":
        check_captures(core)
    return core


def random_prompts(lengths: list[int], seed: int = 0) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    return [generator.integers(2, 62, length) for length in lengths]


def run(core: NativeEngineCore, requests: list[Request], late: Iterable[Request] = ()) -> list[Completion]:
    """Answer requests. Those that are `late`, too, join one a step while the others run."""
    joining = list(late)
    for request in requests:
        if request not in joining:
            core.add_request(request)
    done = {}
    while core.num_running or core.num_waiting or joining:
        if joining:
            core.add_request(joining.pop(0))
        done |= core.step()
    return [done[request] for request in requests]


class NoHostReads(TorchDispatchMode):
    """Fail where a value of a tensor is needed on the host, or decides a shape: neither can be captured."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "bincount"), name
        masks = args[1] if name in ("index", "index_put", "index_put_") else []
        assert not any(mask is not None and mask.dtype == torch.bool for mask in masks), f"{name} with a mask"
        return func(*args, **(kwargs or {}))


def get_addresses(core: NativeEngineCore) -> list[int]:
    """Return the addresses of everything that a decoding pass reads and writes from outside."""
    graphs, loras = core._runner.graphs, core.loras
    assert graphs is not None
    tensors = [*core.model.parameters(), *core.model.buffers(), *core._cache.tensors(), core._cache._all_rows]
    for layer in loras._layers.values():
        tensors += [layer.a, layer.b, layer.scaling]  # pyright: ignore[reportAttributeAccessIssue]
    return [tensor.data_ptr() for tensor in (*tensors, graphs._inputs, graphs._logits)]


def check_captures(core: NativeEngineCore) -> None:
    """Make a core's replays fail where a captured graph would: if a pass reads values on the host, or uses memory that
    has been replaced since its capture."""
    graphs = core._runner.graphs
    assert graphs is not None

    def capture(compute: Callable[[], None]) -> Callable[[], None]:
        addresses = get_addresses(core)

        def replay() -> None:
            assert get_addresses(core) == addresses
            with NoHostReads():
                compute()

        return replay

    graphs._capture = capture


def log_probs_of(model: Any, prompt: Any, answer: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of the prompt's tokens but the first, and of the answer's, by one plain forward pass."""
    ids = torch.tensor([[*prompt, *answer]])
    with torch.no_grad():
        log_probs = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    return log_probs[: len(prompt) - 1], log_probs[len(prompt) - 1 :]


def same_bits(one: Completion, other: Completion) -> bool:
    return one.token_ids == other.token_ids and one.log_probs == other.log_probs


@contextlib.asynccontextmanager
async def engine_of(path: str, **settings: Any) -> AsyncIterator[NativeInferenceEngine]:
    engine = NativeInferenceEngine(path, **settings)
    try:
        yield engine
    finally:
        await engine.teardown()


@contextlib.asynccontextmanager
async def way_to(engine: NativeInferenceEngine, directory: Path) -> AsyncIterator[WeightPath]:
    """The trainer's sender, in buckets of about a fifth of the model."""
    settings: dict[str, Any] = dict(dtype=torch.float32, timeout_seconds=30, max_bucket_bytes=100_000)
    path = WeightPath(engine, "shared_memory", "full", directory=directory, **settings)
    try:
        yield path
    finally:
        await path.close()


async def interrupted(
    folder: str, prompts: list[list[int]], params: dict[str, Any], **settings: Any
) -> list[Completion]:
    """Answers of two engines behind a client, which sends each again behind its tokens where a weight sync interrupts
    it: that happens once."""
    async with engine_of(folder, **settings) as one, engine_of(folder, **settings) as other:
        client = InferenceEngineClient([one, other], AutoTokenizer.from_pretrained(folder), SkyRLConfig())
        asked = asyncio.create_task(completions_of(client, *prompts, **params))
        before = one.progress()
        while one.progress() < before + 9:
            await asyncio.sleep(0)
        await client.pause_generation("abort")
        await client.resume_generation()
        completions = await asked
        assert client.take_metrics()["engines/continued_requests"] > 0
    return completions


async def completions_of(
    engine: InferenceEngineInterface, *prompts: list[int], lora: str | None = None, **params: Any
) -> list[Completion]:
    """Return the completions of prompts; prompt i draws from the seed pair (seed, i)."""
    return await gather_or_cancel(
        [engine.generate(request) for request in to_requests(batch(*prompts, lora=lora, **params))]
    )


def batch(*prompts: list[int], lora: str | None = None, **params: Any) -> InferenceEngineInput:
    return InferenceEngineInput(prompt_token_ids=list(prompts), sampling_params=params, lora_name=lora)

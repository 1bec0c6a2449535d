"""Native engines and their cores on tiny models, for tests."""

import contextlib
from collections.abc import AsyncIterator, Iterable
from typing import Any

import numpy as np
import torch

from skyrl_train.inference_engines.base import InferenceEngineInput
from skyrl_train.inference_engines.completion import Completion
from skyrl_train.inference_engines.native.core import NativeEngineCore
from skyrl_train.inference_engines.native.engine import NativeInferenceEngine
from skyrl_train.inference_engines.native.loading import load_model
from skyrl_train.inference_engines.native.requests import Request

PROMPT = [5, 9, 12, 30, 7]


def make_core(path: str, dtype: str = "float32", **settings: Any) -> NativeEngineCore:
    model = load_model(path, device=torch.device("cpu"), dtype=dtype, model_config_kwargs=None, trust_remote_code=False)
    given: dict[str, Any] = {"max_num_seqs": 64, "eos_ids": ()} | settings
    return NativeEngineCore(model, max_model_len=512, decode=lambda ids: "".join(map(chr, ids)), **given)


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


def same_bits(one: Completion, other: Completion) -> bool:
    return one.token_ids == other.token_ids and one.log_probs == other.log_probs


@contextlib.asynccontextmanager
async def engine_of(path: str, **settings: Any) -> AsyncIterator[NativeInferenceEngine]:
    engine = NativeInferenceEngine(path, **settings)
    try:
        yield engine
    finally:
        await engine.teardown()


def batch(*prompts: list[int], lora: str | None = None, **params: Any) -> InferenceEngineInput:
    return InferenceEngineInput(prompt_token_ids=list(prompts), sampling_params=params, lora_name=lora)

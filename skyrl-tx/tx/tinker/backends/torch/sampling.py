"""Sampling with the native engine of skyrl_train, in a separate thread of this process: continuous batching over the
requests of all tenants. Independent of training, permissions and the wire format.

A completion is a function of its `SampleSpec` and the adapter's folder: float32 on a CPU gives the same bits for any
co-batched requests, and in every repetition.

Fairness: requests of a tenant are served in arrival order, tenants in turn, and one tenant never holds more than three
times as many rows as it leaves free (`skyrl_train.inference_engines.native.waiting`). So a request need not wait for
another tenant's completions while fewer than about `max_num_seqs / 3` tenants have waiting requests; the latency of a
token grows with the running rows, and with the prompts being prefilled (`max_prefill_tokens` a step).
"""

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import psutil
import torch

from skyrl_gym.concurrency import gather_or_cancel
from skyrl_train.config.engine_kinds import PREFIX_CACHE_GIB
from skyrl_train.errors import WorkerError
from skyrl_train.inference_engines.native.core import MAX_PREFILL_TOKENS
from skyrl_train.inference_engines.native.engine import NativeInferenceEngine
from skyrl_train.inference_engines.native.requests import EngineSamplingParams, PromptScores, PromptScoring, Request
from skyrl_train.inference_engines.request import Completion
from tx.errors import ModelError
from tx.tinker.backends.base import BackendLost, SamplingBackend
from tx.tinker.backends.torch.adapter_slots import AdapterSlots
from tx.tinker.chunked_lists import list_of
from tx.tinker.types import PromptTargets, SampleOutput, SampleSpec, Sequence, TargetLogProbs

_STEP_SECONDS = 86_400.0
"""The caller of `end_of_step` has a shorter timeout of its own."""


class NativeSampling(SamplingBackend):
    """Samples from a base model and adapters of it.

    Args:
        base_model: its folder
        device: `cpu`, `cuda`, `cuda:N`
        dtype: of the weights: `float32`, `bfloat16`, `float16`
        max_num_seqs: sequences generated concurrently
        max_context: tokens of prompt and completion; None: the model's limit
        max_loaded_adapters: further adapters wait for a slot
        max_lora_rank: an adapter of a larger rank is refused
        max_prefill_tokens: prompt tokens computed between two decoding steps
        max_cache_gib: memory for keys and values; None: a quarter of the memory free at the start (half on a GPU)
        prefix_cache_gib: memory for keys and values of earlier prompts and completions, reused for common prefixes
        share_with: the same base model, already loaded in this process by transformers (before its layers were
            wrapped). Its parameters are shared where device and dtype match, and must not be modified. On a CPU the
            engine still keeps a packed copy of the linear layers: for 104 million parameters 0.21 GB more in bfloat16,
            0.43 in float32
    """

    def __init__(
        self,
        base_model: str | Path,
        *,
        device: str = "cpu",
        dtype: str = "float32",
        max_num_seqs: int = 256,
        max_context: int | None = None,
        max_loaded_adapters: int = 32,
        max_lora_rank: int = 128,
        max_prefill_tokens: int = MAX_PREFILL_TOKENS,
        max_cache_gib: float | None = None,
        prefix_cache_gib: float = PREFIX_CACHE_GIB,
        share_with: torch.nn.Module | None = None,
    ):
        self._make_engine = functools.partial(
            NativeInferenceEngine,
            str(base_model),
            device=device,
            dtype=dtype,
            max_num_seqs=max_num_seqs,
            max_model_len=max_context,
            max_loras=max_loaded_adapters,
            max_lora_rank=max_lora_rank,
            max_prefill_tokens=max_prefill_tokens,
            max_cache_gib=_get_memory_share(device) if max_cache_gib is None else max_cache_gib,
            prefix_cache_gib=prefix_cache_gib,
            command_timeout_seconds=_STEP_SECONDS,
            shared_weights=None if share_with is None else _to_tensors(share_with),
        )
        self._max_loaded_adapters = max_loaded_adapters
        self._engine: NativeInferenceEngine | None = None
        self._slots: AdapterSlots | None = None
        self._num_running = 0

    async def start(self) -> None:
        self._engine = await asyncio.to_thread(self._make_engine)
        self._slots = AdapterSlots(self._engine, self._max_loaded_adapters)

    def num_running(self) -> int:
        """Return the number of unfinished sequences."""
        return self._num_running

    async def sample(self, spec: SampleSpec, adapter: Path | None, *, tenant: str = "") -> SampleOutput:
        """See the interface.

        Args:
            tenant: for fair scheduling; "": no tenant, may use every row

        Raises:
            BackendLost: the engine has stopped; every call fails.
        """
        self._num_running += spec.num_samples
        try:
            async with self._load_adapter(adapter) as name:
                return await self._complete(spec, name, tenant)
        except FloatingPointError as error:
            raise ModelError(str(error), "server" if adapter is None else "user") from error
        except WorkerError as error:
            raise BackendLost(str(error)) from error
        finally:
            self._num_running -= spec.num_samples

    async def end_of_step(self) -> None:
        assert self._engine is not None, "call start() first"
        try:
            await self._engine.check_health()
        except WorkerError as error:
            raise BackendLost(str(error)) from error

    async def close(self) -> None:
        if self._engine is not None and self._slots is not None:
            # In this order: the engine's end also ends loads of adapters, which `_slots.close` waits for.
            await self._engine.teardown()
            await self._slots.close()

    @contextlib.asynccontextmanager
    async def _load_adapter(self, adapter: Path | None) -> AsyncIterator[str | None]:
        assert self._slots is not None, "call start() first"
        async with contextlib.AsyncExitStack() as stack:
            # Only around the start of the block: a ValueError raised inside it is not one of loading the adapter.
            try:
                name = await stack.enter_async_context(self._slots.use(adapter))
            except ValueError as error:
                raise ModelError(str(error)) from error
            yield name

    async def _complete(self, spec: SampleSpec, lora_name: str | None, tenant: str) -> SampleOutput:
        engine, params = self._engine, spec.params
        assert engine is not None
        try:
            prompt = engine.check_prompt(spec.prompt)
            settings = EngineSamplingParams(
                max_tokens=params.max_tokens,
                temperature=params.temperature,
                top_k=params.top_k,
                top_p=params.top_p,
                stop=params.stop_strings,
                stop_token_ids=params.stop_token_ids,
                ignore_eos=not params.stop_at_eos,
            )
        except ValueError as error:
            raise ModelError(str(error)) from error
        # The first sample brings the prompt's scores; the others share the prompt that was computed for it.
        scoring = None
        if spec.prompt_logprobs or spec.topk_prompt_logprobs or spec.targets is not None:
            targets = None if spec.targets is None else spec.targets.cells()[1:]
            scoring = PromptScoring(temperature=1.0, num_top=spec.topk_prompt_logprobs, targets=targets)
        requests = [
            Request(
                prompt,
                settings,
                # A random stream for each sample: a request's samples differ, and are independent of other requests.
                (params.seed, index),
                scoring=scoring if index == 0 else None,
                group=tenant or None,
                decode=engine.decode_tokens,
            )
            for index in range(spec.num_samples)
        ]
        completions = await gather_or_cancel([_complete(engine, request, lora_name) for request in requests])
        return _to_sample_output(spec, completions, requests[0].prompt_scores)


async def _complete(engine: NativeInferenceEngine, request: Request, lora_name: str | None) -> Completion:
    return await engine.complete(request, lora_name)


def _get_memory_share(device: str) -> float:
    """GiB."""
    if torch.device(device).type == "cuda":
        return torch.cuda.mem_get_info(device)[0] / 2 / 2**30
    return psutil.virtual_memory().available / 4 / 2**30


def _to_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _to_sample_output(spec: SampleSpec, completions: list[Completion], scores: PromptScores | None) -> SampleOutput:
    sequences = []
    for completion in completions:
        if completion.stop_reason == "abort":
            raise ModelError("the engine aborted all requests", "server")
        reason = "length" if completion.stop_reason == "length" else "stop"
        sequences.append(Sequence(completion.token_ids, completion.log_probs or [], reason))
    return SampleOutput(
        sequences=sequences,
        # Nothing predicts the first token of a prompt.
        prompt_logprobs=[None, *_log_probs(scores)] if spec.prompt_logprobs else None,
        topk_prompt_logprobs=[None, *_extract_topk(scores)] if spec.topk_prompt_logprobs else None,
        target_prompt_logprobs=None if spec.targets is None else _extract_target_logprobs(spec.targets, scores),
    )


def _log_probs(scores: PromptScores | None) -> list[float]:
    """A prompt of one token has no scores."""
    return [] if scores is None else scores.log_probs.tolist()


def _extract_target_logprobs(targets: PromptTargets, scores: PromptScores | None) -> TargetLogProbs:
    values = np.zeros(len(targets.ids))
    if scores is not None:
        values[targets.cells()[0]] = scores.target_log_probs
    return TargetLogProbs(targets.shape, list_of(values), targets.crow, targets.columns)


def _extract_topk(scores: PromptScores | None) -> list[list[tuple[int, float]]]:
    if scores is None:
        return []
    ids, log_probs = scores.top_ids.tolist(), scores.top_log_probs.tolist()
    return [list(zip(*place, strict=True)) for place in zip(ids, log_probs, strict=True)]

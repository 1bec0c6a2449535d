"""Sampling with engines of skyrl_train, each in a separate Ray process or on an external server.

Crashed engines are restarted with their loaded adapters, up to `generator.max_engine_restarts` times; their requests
resume from the tokens generated so far. Independent of training, permissions and the wire format.
"""

import asyncio
import math
from pathlib import Path
from typing import Any

from skyrl_gym.concurrency import gather_or_cancel
from skyrl_train.errors import UnsupportedByEngine, WeightSyncError, WorkerError
from skyrl_train.inference_engines.base import Completion, GenerationRequest
from skyrl_train.inference_engines.inference_engine_client import InferenceEngineClient
from skyrl_train.inference_engines.supervision import Process
from tx.errors import ConfigError, ModelError
from tx.tinker.backends.base import BackendLost, SamplingBackend
from tx.tinker.backends.skyrl_train.adapters import SteadyAdapters
from tx.tinker.backends.skyrl_train.turns import Turns
from tx.tinker.backends.torch.adapter_slots import AdapterSlots
from tx.tinker.types import TARGETS_REFUSED, SampleOutput, SampleSpec, Sequence


class EngineSampling(SamplingBackend):
    """Samples from a base model and adapters of it.

    Args:
        client: over the engines; `close` ends them
        max_num_seqs: that all engines together write at the same time; tenants take turns for them
        max_loaded_adapters: of each engine; requests that need more at the same time take turns
        takes_head: the engines compute adapters of the output layer
    """

    def __init__(self, client: InferenceEngineClient, *, max_num_seqs: int, max_loaded_adapters: int, takes_head: bool):
        self._client = client
        self._slots = AdapterSlots(SteadyAdapters(client, takes_head=takes_head), max_loaded_adapters)
        self._turns = Turns(max_num_seqs)
        self._num_running = 0

    async def start(self) -> None:
        """Wait until the engines have started.

        Raises:
            ConfigError: they take no adapters.
            WorkerError: one did not start.
        """
        info = await self._client.describe()
        if why := info.unsupported.get("lora"):
            raise ConfigError(f"the {info.backend} engines do not support adapters: {why}")

    def num_running(self) -> int:
        """Return the number of unfinished sequences."""
        return self._num_running

    async def sample(self, spec: SampleSpec, adapter: Path | None, *, tenant: str = "") -> SampleOutput:
        if spec.targets is not None:  # accepted before the server was started again with this backend
            raise ModelError(TARGETS_REFUSED)
        self._num_running += spec.num_samples
        try:
            async with self._turns.take(tenant, spec.num_samples), self._slots.use(adapter) as name:
                return await self._sample_and_score(spec, name)
        except (ValueError, UnsupportedByEngine, WeightSyncError) as error:
            raise ModelError(str(error)) from error
        except TimeoutError as error:
            raise ModelError(str(error), "server") from error
        except WorkerError as error:
            await self._raise_if_lost()
            raise ModelError(str(error).splitlines()[0], "server") from error
        finally:
            self._num_running -= spec.num_samples

    async def close(self) -> None:
        """Stop the engines immediately: their state is stored elsewhere."""
        engines = [engine for engine in self._client.engines if isinstance(engine, Process)]
        await asyncio.gather(self._client.teardown(), *(asyncio.to_thread(engine.kill) for engine in engines))
        await self._slots.close()

    async def _raise_if_lost(self) -> None:
        try:
            await self._client.wait_until_healthy()
        except WorkerError as error:
            raise BackendLost(str(error)) from error

    async def _sample_and_score(self, spec: SampleSpec, lora_name: str | None) -> SampleOutput:
        """Sample, and score the prompt once at temperature 1. Engines score prompts at the sampling temperature and
        once per completion; where that differs, scoring is a separate request.
        """
        params, num_top = spec.params, spec.topk_prompt_logprobs
        is_scored = spec.prompt_logprobs or num_top > 0
        together = is_scored and spec.num_samples == 1 and params.temperature in (0.0, 1.0)
        scores: list[Completion] = []
        if is_scored and not together:
            score = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": num_top, "ignore_eos": True}
            scores = await self._generate(spec.prompt, score, [(params.seed, 0)], lora_name)
        values = {
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_k": params.top_k,
            "top_p": params.top_p,
            "stop": list(params.stop_strings),
            "stop_token_ids": list(params.stop_token_ids),
            "ignore_eos": not params.stop_at_eos,
            "skip_special_tokens": False,  # of the text that stops are looked for in
        } | ({"prompt_logprobs": num_top} if together else {})
        seeds = [(params.seed, index) for index in range(spec.num_samples)]
        answers = await self._generate(spec.prompt, values, seeds, lora_name)
        return _to_sample_output(spec, answers, (scores or answers)[0])

    async def _generate(
        self, prompt: list[int], params: dict[str, Any], seeds: list[tuple[int, int]], lora_name: str | None
    ) -> list[Completion]:
        """Generate a completion for each seed."""
        requests = [
            GenerationRequest(
                prompt_token_ids=prompt,
                sampling_params=params | {"logprobs": 0, "seed": list(seed)},
                lora_name=lora_name,
            )
            for seed in seeds
        ]
        return await gather_or_cancel([self._client.generate(request) for request in requests])


def _to_sample_output(spec: SampleSpec, completions: list[Completion], scored: Completion) -> SampleOutput:
    sequences = []
    for completion in completions:
        reason, log_probs = completion.stop_reason, completion.log_probs
        assert log_probs is not None
        if reason not in ("stop", "length"):
            raise ModelError("the engines aborted all requests", "server")
        if not all(map(math.isfinite, log_probs)):
            raise ModelError("the model's output was not finite", "server")
        sequences.append(Sequence(completion.token_ids, log_probs, reason))
    scores: list[float | None] | None = None
    if spec.prompt_logprobs:
        assert scored.prompt_log_probs is not None
        scores = [None, *scored.prompt_log_probs]
    return SampleOutput(sequences=sequences, prompt_logprobs=scores, topk_prompt_logprobs=_extract_topk(spec, scored))


def _extract_topk(spec: SampleSpec, scored: Completion) -> list[list[tuple[int, float]] | None] | None:
    """Return the top-k tokens at each prompt position; None at the first, which has no prediction."""
    if not spec.topk_prompt_logprobs:
        return None
    assert scored.prompt_top is not None
    places = zip(scored.prompt_top.ids.tolist(), scored.prompt_top.log_probs.tolist(), strict=True)
    return [None, *(list(zip(ids, log_probs, strict=True)) for ids, log_probs in places)]

"""Engine under test with a reference, weight transports, requests and deadlines."""

import asyncio
import tempfile
import time
from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from skyrl_train.inference_engines.base import (
    EngineInfo,
    GenerationRequest,
    InferenceEngineInput,
    InferenceEngineInterface,
    InferenceEngineOutput,
    PauseMode,
)
from skyrl_train.weight_sync.base import Encoding, Transport, WeightReport
from skyrl_train_testing.engine_conformance.reference import Reference, Weights
from skyrl_train_testing.engine_conformance.registry import ConformanceError
from skyrl_train_testing.engine_conformance.transfer import Tamper, WeightPath

T = TypeVar("T")

TOLERANCES: Mapping[str, float] = {"float32": 1e-4, "float16": 0.03, "bfloat16": 0.15}
"""The largest difference of a token's log-prob from the reference's, by the engine's dtype."""

_MOST_LONG_TOKENS = 640


class EngineUnderTest:
    """An engine, and the same model in transformers.

    Args:
        engine: it may have answered requests before, and may do so afterwards: checks leave it as they found it.
        model_path: what it runs, as a folder; small, since the reference computes every answer again on the CPU.
        ways: transports and encodings by which weights are to reach it; the first one carries the weights of checks
            that are about something else. None of them needs to be tried if it lacks `weight_update`.
        tolerance: of a log-prob; None: by the engine's dtype (`TOLERANCES`).
        timeout_seconds: the longest that any call may take.
        lora_targets, lora_rank: of the adapters that are made for it.
    """

    def __init__(
        self,
        engine: InferenceEngineInterface,
        model_path: str,
        *,
        ways: Sequence[tuple[Transport, Encoding]] = (("shared_memory", "full"),),
        tolerance: float | None = None,
        timeout_seconds: float = 120.0,
        lora_targets: Sequence[str] = ("q_proj", "v_proj", "o_proj", "down_proj"),
        lora_rank: int = 4,
        trust_remote_code: bool = False,
    ):
        self.engine = engine
        self.model_path = model_path
        self.ways = tuple(ways)
        self.lora_targets = tuple(lora_targets)
        self.lora_rank = lora_rank
        self.version = 0
        self.info: EngineInfo
        self.reference: Reference
        self.tolerance = 0.0
        self._tolerance = tolerance
        self._timeout_seconds = timeout_seconds
        self._trust_remote_code = trust_remote_code
        self._folder = tempfile.TemporaryDirectory(prefix="engine_conformance_")
        self.directory = Path(self._folder.name)
        self.tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            model_path, trust_remote_code=trust_remote_code
        )
        self._path: WeightPath | None = None
        self._way: tuple[Transport, Encoding] | None = None
        self._changed = False
        self._tasks: list[asyncio.Task[Any]] = []
        self._seconds: float | None = None
        self._ready = False

    async def prepare(self) -> None:
        """Read the engine's description and load the reference. Once; later calls do nothing."""
        if self._ready:
            return
        self.info = await self.in_time(self.engine.describe())
        dtype = self.info.dtype or "float32"
        self.tolerance = TOLERANCES[dtype] if self._tolerance is None else self._tolerance
        self.reference = Reference(self.model_path, getattr(torch, dtype), trust_remote_code=self._trust_remote_code)
        self.version = await self.in_time(self.engine.weight_version())
        self._ready = True

    async def in_time(self, call: Awaitable[T], seconds: float | None = None) -> T:
        """Await `call`. Raises ConformanceError if that takes longer than the deadline."""
        seconds = self._timeout_seconds if seconds is None else seconds
        try:
            return await asyncio.wait_for(call, seconds)
        except TimeoutError as error:
            raise ConformanceError(f"the engine did not answer within {seconds:g} seconds") from error

    # Requests.

    def prompt(self, length: int, seed: int = 0) -> list[int]:
        """Random tokens of the vocabulary but the special ones."""
        special = {*self.tokenizer.all_special_ids}
        words = [token for token in range(min(self.info.vocab_size, len(self.tokenizer))) if token not in special]
        draw = torch.Generator().manual_seed(seed)
        return [words[i] for i in torch.randint(len(words), (length,), generator=draw).tolist()]

    @property
    def eos_ids(self) -> set[int]:
        """Tokens that end an answer: of the tokenizer, the model's config and its generation config."""
        model = self.reference.model
        found = set()
        for named in (self.tokenizer, model.config.get_text_config(), model.generation_config):
            ids = getattr(named, "eos_token_id", None)
            found.update(ids if isinstance(ids, list) else [ids])
        return found - {None}

    def params(self, **params: Any) -> dict[str, Any]:
        """Build sampling parameters, with a default seed if the engine supports seeds."""
        if "seed" not in params and "seed" not in self.info.unsupported and params.get("temperature") != 0:
            params["seed"] = 7
        return params

    def request(self, prompt: list[int], **params: Any) -> GenerationRequest:
        return GenerationRequest(prompt_token_ids=prompt, sampling_params=self.params(**params))

    def batch(self, prompts: Sequence[list[int]], *, lora: str | None = None, **params: Any) -> InferenceEngineInput:
        return InferenceEngineInput(
            prompt_token_ids=list(prompts), sampling_params=self.params(**params), lora_name=lora
        )

    async def generate(
        self, prompts: Sequence[list[int]], *, lora: str | None = None, **params: Any
    ) -> InferenceEngineOutput:
        return await self.in_time(self.engine.generate_batch(self.batch(prompts, lora=lora, **params)))

    def begin(
        self, prompts: Sequence[list[int]], *, lora: str | None = None, **params: Any
    ) -> "asyncio.Task[InferenceEngineOutput]":
        """The same in the background; ended with the check at the latest."""
        task = asyncio.ensure_future(self.generate(prompts, lora=lora, **params))
        self._tasks.append(task)
        return task

    @property
    def long_prompt(self) -> list[int]:
        return self.prompt(min(24, self.info.max_model_len // 4), seed=3)

    @property
    def long_params(self) -> dict[str, Any]:
        """Sampling parameters of an answer long enough to be interrupted."""
        room = self.info.max_model_len - len(self.long_prompt)
        return {"max_tokens": min(_MOST_LONG_TOKENS, room), "ignore_eos": True, "temperature": 1.0}

    def begin_long(self, *, prompt: list[int] | None = None) -> "asyncio.Task[InferenceEngineOutput]":
        """Two long answers to one prompt, in the background."""
        prompt = prompt or self.long_prompt
        room = self.info.max_model_len - len(prompt)
        params = self.long_params
        params["max_tokens"] = min(room, params["max_tokens"])
        return self.begin([prompt] * 2, **params)

    async def long_seconds(self) -> float:
        """Measure how long undisturbed long answers take."""
        if self._seconds is None:
            await self.begin_long()  # the first one may compile or allocate
            start = time.monotonic()
            await self.begin_long()
            self._seconds = time.monotonic() - start
        return self._seconds

    # Weights.

    async def set_weights(
        self,
        weights: Weights,
        *,
        way: tuple[Transport, Encoding] | None = None,
        pause: PauseMode | None = "keep",
        tamper: Tamper | None = None,
    ) -> WeightReport:
        """Send weights as the trainer does, under the next version.

        Args:
            pause: how generation is paused meanwhile; None: not at all. Modes that the engine lacks are replaced.
            tamper: what goes wrong on the way.
        """
        path = await self._get_path(way or self.ways[0])
        if pause == "keep" and "pause_keep" in self.info.unsupported:
            pause = "abort" if "pause_wait" in self.info.unsupported else "wait"
        self._changed = True
        self.version += 1
        if pause is not None:
            await self.in_time(self.engine.pause_generation(pause))
        try:
            return await self.in_time(path.send(weights, self.version, tamper))
        finally:
            if pause is not None:
                await self.in_time(self.engine.resume_generation())

    async def load_original_weights(self) -> None:
        """The original ones, if a check changed them."""
        if self._changed:
            await self.set_weights(self.reference.original)
            self._changed = False

    async def _get_path(self, way: tuple[Transport, Encoding]) -> WeightPath:
        if self._path is None or self._way != way:
            if self._path is not None:
                await self._path.close()
            num_bytes = sum(value.numel() for value in self.reference.original.values()) * self.reference.dtype.itemsize
            self._way = way
            self._path = WeightPath(
                self.engine,
                *way,
                dtype=self.reference.dtype,
                directory=self.directory,
                timeout_seconds=self._timeout_seconds,
                max_bucket_bytes=max(1, num_bytes),  # the sender makes pieces of a quarter
            )
        return self._path

    # Between checks.

    async def clean_up(self, *, failed: bool) -> None:
        """Restore the engine's state from before a check."""
        unfinished = [task for task in self._tasks if not task.done()]
        self._tasks.clear()
        if failed or unfinished:
            await self.in_time(self.engine.abort_generation())
            if "sleep" not in self.info.unsupported:
                await self.in_time(self.engine.wake_up())
            await self.in_time(self.engine.resume_generation())
        for task in unfinished:
            task.cancel()
        await asyncio.gather(*unfinished, return_exceptions=True)
        await self.load_original_weights()

    async def close(self) -> None:
        """Close everything that was opened in addition to the engine, which keeps running."""
        if self._path is not None:
            await self._path.close()
            self._path = None
        self._folder.cleanup()

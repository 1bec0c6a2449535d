"""Native engine: runs the core's step loop in a dedicated thread and returns results to asyncio.

All access to the core or the weights happens in that thread, between two steps, so only the mailbox needs a lock. To
create it in a Ray actor: `ray.remote(NativeInferenceEngine).remote(path, ...)`.
"""

import asyncio
import contextlib
import logging
import platform
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

import numpy as np
import torch
import transformers
from transformers import PreTrainedModel

from skyrl_train.config.engine_kinds import PREFIX_CACHE_GIB
from skyrl_train.errors import ConfigError, UnsupportedByEngine, WorkerError
from skyrl_train.inference_engines.base import (
    Completion,
    EngineInfo,
    Feature,
    GenerationRequest,
    InferenceEngineInterface,
    OnTokens,
    PauseMode,
    SamplingKeywords,
    check_pause_mode,
    check_sleep_level,
    tags_to_wake,
)
from skyrl_train.inference_engines.loop_thread import LoopCalls
from skyrl_train.inference_engines.native.constrained import ConstraintCompiler
from skyrl_train.inference_engines.native.core import (
    MAX_DRAFTING,
    MAX_PREFILL_TOKENS,
    NativeEngineCore,
    Outcomes,
)
from skyrl_train.inference_engines.native.draft_model import DraftModel, check_same_tokens
from skyrl_train.inference_engines.native.loading import (
    cache_bytes_of_token,
    find_eos_ids,
    get_context_length,
    load_model,
    load_tokenizer,
)
from skyrl_train.inference_engines.native.lora import Lora
from skyrl_train.inference_engines.native.lora_loading import read_lora
from skyrl_train.inference_engines.native.mailbox import Mailbox
from skyrl_train.inference_engines.native.requests import (
    EngineSamplingParams,
    Request,
    SeedPair,
    select_requested,
    split_seed,
)
from skyrl_train.inference_engines.native.trial import check_generation
from skyrl_train.inference_engines.native.weights import EngineWeights
from skyrl_train.models.linear_attention import has_delta_nets
from skyrl_train.models.routing_replay import RoutingReplay
from skyrl_train.utils.cpu_numerics import set_strict_kernels, warn_if_rows_depend_on_their_number
from skyrl_train.utils.gpus import get_indexed_device
from skyrl_train.weight_sync.base import LoraLoadRequest, WeightReport, WeightSyncInitInfo, WeightUpdateRequest
from skyrl_train.weight_sync.cuda_ipc import gpu_uuid

logger = logging.getLogger(__name__)

T = TypeVar("T")

HAND_OUT_SECONDS = 0.02
"""Minimum interval between two deliveries of tokens to streams."""

_NO_LORA = "the engine was started without adapters (max_lora_rank=0)"


def _check_sizes(
    max_num_seqs: int,
    prefix_cache_gib: float,
    num_speculative_tokens: int,
    speculative_max_seqs: int,
    speculative_model: str | None,
) -> None:
    """Raise ConfigError for a size out of range, or a draft model without a number of tokens."""
    if max_num_seqs < 1:
        raise ConfigError(f"max_num_seqs must be at least 1; got {max_num_seqs}")
    if prefix_cache_gib < 0:
        raise ConfigError(
            f"prefix_cache_gib must not be negative; got {prefix_cache_gib} (enable_prefix_caching=False: no cache)"
        )
    if num_speculative_tokens < 0 or speculative_max_seqs < 0:
        raise ConfigError(
            "num_speculative_tokens and speculative_max_seqs must not be negative; got "
            f"{num_speculative_tokens} and {speculative_max_seqs} (0: no speculative decoding)"
        )
    if speculative_model is not None and not (num_speculative_tokens and speculative_max_seqs):
        raise ConfigError(
            f"speculative_model={speculative_model} has no effect with "
            f"num_speculative_tokens={num_speculative_tokens} and speculative_max_seqs={speculative_max_seqs}; set "
            "both above 0"
        )


def _load_bit_exact_model(model_path: str, num_speculative_tokens: int, **settings: Any) -> PreTrainedModel:
    """Load a model (`load_model`), bit-exact for any batch composition if the device supports it.

    Raises:
        ConfigError: the model does not support speculative decoding.
    """
    if settings["device"].type == "cpu" and settings["dtype"] == "float32":
        set_strict_kernels()
        warn_if_rows_depend_on_their_number()
    model = load_model(model_path, **settings)
    if has_delta_nets(model.config):
        if num_speculative_tokens:
            raise ConfigError(
                f"num_speculative_tokens={num_speculative_tokens} cannot be used with {model_path}: the state of its "
                "linear attention cannot be rolled back after a rejected draft. Set it to 0"
            )
        logger.info("%s has linear attention: prompts are computed in full, without a prefix cache", model_path)
    return model


class NativeInferenceEngine(InferenceEngineInterface):
    """Rollout engine that runs a transformers causal language model in this process, on a CPU or one CUDA device.
    At the start it generates a few tokens, and rejects a model that it cannot run (ConfigError, with a suitable
    backend).

    `skip_special_tokens` affects the response text. Requests without a seed use the engine's seed.

    In float32 on a CPU (one thread) tokens and log-probs are bit-exact for any batch composition. An aborted completion
    that is sent again after its prompt, with the same `[seed, index]`, continues as if uninterrupted.

    Weights may change while requests run, between two steps and never partially. Later tokens carry the new version;
        keys and values of earlier tokens are not recomputed.

    Low-rank adapters of linear layers, including the output layer, are kept separate from the model; requests with
    different adapters and with none are batched together (`lora.py`). Other adapter features are rejected by name
    (`lora_loading.py`).

    Args:
        model_path: a local folder or a hub name, with a tokenizer
        device: `cpu`, `cuda` or `cuda:N`
        dtype: `float32`, `bfloat16` or `float16`
        max_num_seqs: maximum number of running requests
        max_model_len: maximum tokens of prompt and response; None: the model's `max_position_embeddings`
        seed: for requests without one
        model_config_kwargs: changes to the model's config, such as `rope_scaling`
        command_timeout_seconds: deadline of control calls (except a pause with `wait`, which ends with the requests)
        update_timeout_seconds: maximum time from the last bucket of a weight update to its end
        dummy_weights: random weights instead of the ones on disk; the first update must then contain all of them
        max_loras: adapters that may be loaded at the same time
        max_lora_rank: maximum adapter rank; 0: no adapters
        max_prefill_tokens: maximum prompt tokens computed between two tokens of running requests
        enable_chunked_prefill: compute a longer prompt in chunks, if the prefix cache can hold it; otherwise alone, at
            once
        enable_prefix_caching: cache keys and values of prompts and completions for later prompts with the same prefix,
            until the weights change
        prefix_cache_gib: memory limit of this cache, allocated on demand; the least recently used entries are evicted
        max_cache_gib: memory limit for keys and values of running requests, which wait until they fit with their full
            budget. None: no limit
        shared_weights: parameters and buffers of the same model already loaded in this process, by transformers name.
            The engine uses their memory if device and dtype match (in addition to packed copies of linear layers on a
            CPU); they must not be modified
        return_expert_routes: return with completions the experts of each token of prompt and completion
        num_speculative_tokens: draft tokens per request, verified in one pass. In float32 on a CPU completions are
            bit-exact for any number. 0: disabled
        speculative_model: smaller model with the same tokens that proposes drafts, in the engine's dtype, with fixed
            weights. None: prompt lookup
        speculative_max_seqs: maximum number of running requests with drafting; more saturate the processor anyway
        enforce_eager: decode without CUDA graphs (`decode_graphs.py`). False on a CPU: the same padded passes, without
            graphs. None: graphs on CUDA
    """

    def __init__(
        self,
        model_path: str,
        *,
        device: str = "cpu",
        dtype: str = "float32",
        max_num_seqs: int = 256,
        max_model_len: int | None = None,
        seed: int = 0,
        model_config_kwargs: Mapping[str, object] | None = None,
        trust_remote_code: bool = False,
        command_timeout_seconds: float = 600.0,
        update_timeout_seconds: float = 600.0,
        dummy_weights: bool = False,
        max_loras: int = 8,
        max_lora_rank: int = 256,
        max_prefill_tokens: int = MAX_PREFILL_TOKENS,
        enable_chunked_prefill: bool = True,
        enable_prefix_caching: bool = True,
        prefix_cache_gib: float = PREFIX_CACHE_GIB,
        max_cache_gib: float | None = None,
        shared_weights: Mapping[str, torch.Tensor] | None = None,
        return_expert_routes: bool = False,
        num_speculative_tokens: int = 0,
        speculative_max_seqs: int = MAX_DRAFTING,
        speculative_model: str | None = None,
        enforce_eager: bool | None = None,
    ):
        _check_sizes(max_num_seqs, prefix_cache_gib, num_speculative_tokens, speculative_max_seqs, speculative_model)
        self._model_path, self._dtype, self._device = model_path, dtype, get_indexed_device(device)
        self._seed, self._max_lora_rank, self._command_timeout = seed, max_lora_rank, command_timeout_seconds
        loading = {"device": self._device, "dtype": dtype, "trust_remote_code": trust_remote_code}
        loading |= {"model_config_kwargs": model_config_kwargs, "dummy_weights": dummy_weights}
        model = _load_bit_exact_model(model_path, num_speculative_tokens, shared_weights=shared_weights, **loading)
        self._tokenizer = load_tokenizer(model_path, trust_remote_code)
        eos_ids, tokens_a_gib = find_eos_ids(model, self._tokenizer), 2**30 / cache_bytes_of_token(model)
        max_length = get_context_length(model, max_model_len)
        self._core = NativeEngineCore(
            model,
            max_num_seqs=max_num_seqs,
            max_model_len=max_length,
            eos_ids=eos_ids,
            decode=self._decode,
            max_prefill_tokens=max_prefill_tokens,
            max_loras=max_loras,
            max_cache_tokens=None if max_cache_gib is None else int(max_cache_gib * tokens_a_gib),
            chunked_prefill=enable_chunked_prefill,
            max_prefix_tokens=int(prefix_cache_gib * tokens_a_gib) if enable_prefix_caching else 0,
            num_draft_tokens=num_speculative_tokens,
            max_drafting=speculative_max_seqs,
            draft_model=self._load_draft_model(
                speculative_model, trust_remote_code, min(max_num_seqs, speculative_max_seqs), max_length
            ),
            routing=RoutingReplay(model, "trainer.policy.routing_replay=R3") if return_expert_routes else None,
            use_graphs=self._device.type == "cuda" if enforce_eager is None else not enforce_eager,
        )
        self._constraints = ConstraintCompiler(self._tokenizer, self._core.vocabulary, eos_ids)
        self._weights = EngineWeights(model, self._device, update_timeout_seconds)
        self._start()

    def _load_draft_model(
        self, path: str | None, trust_remote_code: bool, max_rows: int, max_length: int
    ) -> DraftModel | None:
        """Load the draft model, if any. Raises ConfigError if its tokens differ."""
        if path is None:
            return None
        tokens = load_tokenizer(path, trust_remote_code).get_vocab()
        check_same_tokens(tokens, self._tokenizer.get_vocab(), path, self._model_path)
        model = load_model(
            path,
            device=self._device,
            dtype=self._dtype,
            model_config_kwargs=None,
            trust_remote_code=trust_remote_code,
        )
        return DraftModel(model, max_rows=max_rows, max_length=max_length)

    def _start(self) -> None:
        """Check that the model generates, and start the only thread that accesses model, cache and requests. Calls
        reach it through the mailbox, so no other lock is needed.
        """
        check_generation(self._core, self._model_path)
        self._num_unseeded = 0
        self._leaving: list[tuple[Lora, Future[None]]] = []
        self._pending: dict[Request, Future[Completion]] = {}
        self._pause: PauseMode | None = None
        self._drained: list[Future[None]] = []
        self._cache_asleep = False
        self._mailbox = Mailbox("the native engine")
        self._new_tokens = LoopCalls()
        self._handed_out = float("-inf")
        self._num_threads = torch.get_num_threads()  # OpenMP has a thread count per calling thread
        self._thread = threading.Thread(target=self._run, name="native-engine", daemon=True)
        self._thread.start()

    # The interface, called from asyncio.

    async def describe(self) -> EngineInfo:
        return EngineInfo(
            backend="native",
            release=transformers.__version__,
            model=self._model_path,
            vocab_size=self._core.vocabulary,
            max_model_len=self._core.max_model_len,
            dtype=self._dtype,
            node=platform.node(),
            gpus=[] if (gpu := gpu_uuid(self._device)) is None else [gpu],
            unsupported=self._find_unsupported(),
        )

    def _find_unsupported(self) -> dict[Feature, str]:
        unsupported: dict[Feature, str] = {}
        if not self._max_lora_rank:
            unsupported["lora"] = _NO_LORA
        if self._constraints.unsupported is not None:
            unsupported["json_schema"] = unsupported["grammar"] = self._constraints.unsupported
        return unsupported

    async def check_health(self) -> None:
        await self._run_command(lambda: None)

    def progress(self) -> int:
        return self._core.num_forwards

    async def generate(self, request: GenerationRequest) -> Completion:
        own = await self._to_native_request(request)
        completion = await self.complete(own, request.lora_name)
        return select_requested(completion, own.params, self._decode, request.count_cached_tokens)

    async def stream(self, request: GenerationRequest, on_tokens: OnTokens) -> Completion:
        if (
            type(self).generate is not NativeInferenceEngine.generate
            and type(self).stream is NativeInferenceEngine.stream
        ):
            # If a subclass overrides `generate`, streams must return its completions too.
            return await super().stream(request, on_tokens)
        own, loop = await self._to_native_request(request), asyncio.get_running_loop()
        # In the engine's thread tokens are only recorded; all streams are notified together.
        own.on_tokens = lambda delta: self._new_tokens.add(loop, lambda: on_tokens(delta))
        completion = await self.complete(own, request.lora_name)
        return select_requested(completion, own.params, self._decode, request.count_cached_tokens)

    async def _to_native_request(self, given: GenerationRequest) -> Request:
        """Check a request and convert it to a native one. Raises ValueError."""
        params, seed = self._parse_sampling(given.sampling_params)
        prompt, matcher = self.check_prompt(given.prompt_token_ids), None
        if params.constraint is not None:  # after the completion's tokens at the end of the prompt
            answer = prompt[len(prompt) - min(len(prompt), params.num_answer_tokens) :].tolist()
            matcher = await self._constraints.build_matcher(params.constraint, answer)
        decode = None if params.skip_special_tokens else self.decode_tokens  # also searched for stop strings
        return Request(prompt, params, seed, decode=decode, matcher=matcher)

    def check_prompt(self, prompt: list[int]) -> np.ndarray:
        """Return the prompt of a `Request` as an array. Raises ValueError like `generate`."""
        return self._core.check_prompt(prompt)

    def decode_tokens(self, token_ids: list[int]) -> str:
        """Decode tokens, including special ones."""
        return self._decode(token_ids, skip_special_tokens=False)

    def complete(self, request: Request, lora_name: str | None = None) -> "asyncio.Future[Completion]":
        """Complete a native request for callers in this process, without text. Cancelling the future aborts the
        request.

        Raises:
            ValueError: no adapter has that name.
            FloatingPointError: the model's output was not finite.
            ConstraintFailed: the constraint became too complex.
        """
        outcome: Future[Completion] = Future()
        outcome.set_running_or_notify_cancel()  # a cancelled caller must not cancel the future that the thread sets

        def add() -> None:
            if not self._weights.complete and not self._weights.updating:
                raise RuntimeError("the weights were dropped by sleep(level=2); a full weight update must come first")
            request.lora = self._core.loras.get_by_name(lora_name)
            self._pending[request] = outcome
            self._core.add_request(request)

        def fail(added: "Future[None]") -> None:
            if (error := added.exception()) is not None:
                outcome.set_exception(error)

        def abort(completion: "asyncio.Future[Completion]") -> None:
            if completion.cancelled():
                with contextlib.suppress(WorkerError):
                    self._mailbox.post(lambda: self._resolve(self._core.abort([request])))

        self._mailbox.post(add).add_done_callback(fail)
        completion = asyncio.wrap_future(outcome)
        completion.add_done_callback(abort)
        return completion

    async def pause_generation(self, mode: PauseMode = "keep") -> None:
        check_pause_mode(mode)
        drained: Future[None] = Future()
        drained.set_running_or_notify_cancel()

        def pause() -> None:
            self._pause = mode
            if mode == "abort":
                self._resolve(self._core.abort())
            if mode == "wait" and self._core.num_running:
                self._drained.append(drained)
            else:
                self._release_drained()
                drained.set_result(None)

        await self._run_command(pause)
        await asyncio.wrap_future(drained)

    async def resume_generation(self) -> None:
        def resume() -> None:
            self._pause = None
            for waiting in self._drained:
                waiting.set_exception(RuntimeError("resumed before the pause with mode 'wait' was reached"))
            self._drained.clear()

        await self._run_command(resume)

    async def abort_generation(self) -> None:
        await self._run_command(lambda: self._resolve(self._core.abort()))

    async def sleep(self, level: int = 1) -> None:
        check_sleep_level(level)

        def sleep() -> None:
            if self._core.num_running:
                raise RuntimeError(
                    f"the engine cannot sleep while {self._core.num_running} requests run; "
                    "pause with mode 'wait' or 'abort' first"
                )
            if not self._weights.asleep:
                self._weights.sleep(level)
                # Updates do not include adapters and draft model, so both levels keep them.
                self._core.loras.to(torch.device("cpu"))
                if self._core.draft_model is not None:
                    self._core.draft_model.to(torch.device("cpu"))
            self._core.release_cache()
            self._cache_asleep = True
            if self._device.type == "cuda":
                torch.cuda.empty_cache()

        await self._run_command(sleep)

    async def wake_up(self, tags: list[str] | None = None) -> None:
        wanted = tags_to_wake(tags)

        def wake() -> None:
            if "weights" in wanted and self._weights.asleep:
                self._weights.wake_up()
                self._core.loras.to(self._device)
                if self._core.draft_model is not None:
                    self._core.draft_model.to(self._device)
            if "kv_cache" in wanted:
                self._cache_asleep = False  # its memory is allocated again on demand

        await self._run_command(wake)

    async def init_weight_update_communicator(self, init_info: WeightSyncInitInfo) -> None:
        await self._run_command(lambda: self._weights.connect(init_info), timeout=init_info.timeout_seconds)

    async def update_named_weights(self, request: WeightUpdateRequest) -> None:
        await self._run_command(lambda: self._weights.update(request))

    async def finish_weight_update(self, version: int) -> WeightReport:
        def finish() -> WeightReport:
            report = self._weights.finish_update(version)
            self._core.update_version(version)
            return report

        return await self._run_command(finish)

    async def load_lora(self, request: LoraLoadRequest) -> WeightReport:
        """See the interface. Running requests of a replaced adapter continue with the new one, on top of keys and
        values computed by the old one.
        """
        self._check_has_loras()
        # Files are read in another thread while the engine continues generating.
        layers = await asyncio.to_thread(read_lora, request.path, self._core.model, self._max_lora_rank)
        return await self._run_command(lambda: self._core.loras.load(request, layers, self._weights.verification))

    async def unload_lora(self, name: str) -> None:
        self._check_has_loras()
        unused: Future[None] = Future()
        unused.set_running_or_notify_cancel()
        await self._run_command(lambda: self._leaving.append((self._core.loras.forget(name), unused)))
        await asyncio.wrap_future(unused)

    async def weight_version(self) -> int:
        return await self._run_command(lambda: self._core.weight_version)

    async def reset_prefix_cache(self) -> None:
        await self._run_command(self._core.clear_prefixes)

    async def teardown(self) -> None:
        """Stop the thread. Waiting and running requests and all later calls fail with `WorkerError`."""
        self._mailbox.close()
        self._constraints.close()
        await asyncio.to_thread(self._thread.join, self._command_timeout)
        if self._thread.is_alive():
            raise WorkerError(f"the native engine's thread did not exit within {self._command_timeout:g} seconds")

    # Parsing of requests.

    def _parse_sampling(self, given: SamplingKeywords) -> tuple[EngineSamplingParams, SeedPair]:
        """Parse the settings of a request and its seed pair."""
        params, seed = split_seed(given)
        named = {"stop_token_ids": params.stop_token_ids, "logit_bias": [token for token, _ in params.logit_bias]}
        for name, token in [(name, token) for name, tokens in named.items() for token in tokens]:
            if not 0 <= token < self._core.vocabulary:
                raise ValueError(
                    f"sampling parameter {name} must be in the vocabulary, 0 to {self._core.vocabulary - 1}; got "
                    f"{token}"
                )
        if seed is None:
            # Negative indices: distinct from requests with an equal explicit seed.
            self._num_unseeded += 1
            seed = (self._seed, -self._num_unseeded)
        return params, seed

    def _decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        text = self._tokenizer.decode(
            token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text

    def _check_has_loras(self) -> None:
        if not self._max_lora_rank:
            raise UnsupportedByEngine(_NO_LORA)

    async def _run_command(self, call: Callable[[], T], timeout: float | None = None) -> T:
        seconds = self._command_timeout if timeout is None else timeout
        try:
            return await asyncio.wait_for(asyncio.wrap_future(self._mailbox.post(call)), seconds)
        except TimeoutError as error:
            raise WorkerError(f"the native engine did not respond within {seconds:g} seconds") from error

    # The engine's thread.

    def _run(self) -> None:
        failure = WorkerError("the native engine is closed")
        torch.set_num_threads(self._num_threads)
        try:
            while self._mailbox.run_calls(self._has_work_or_flush, self._weights.get_seconds_left()):
                if self._has_work():
                    if self._should_admit_prompts():  # a long prefill may run first
                        self._send_new_tokens(at_once=True)
                    self._resolve(self._core.step(admit=self._pause is None))
                    self._send_new_tokens()
                    if self._pause == "wait" and not self._core.num_running:
                        self._release_drained()
                if self._leaving:
                    self._remove_unused_loras()
        except Exception as error:  # any error must be reported to waiting callers
            failure = WorkerError(f"the native engine stopped: {type(error).__name__}: {error}")
            failure.__cause__ = error
        finally:
            self._fail_all(failure)

    def _send_new_tokens(self, *, at_once: bool = False) -> None:
        """Send the new tokens of all streams together, if the minimum interval has passed."""
        now = time.monotonic()
        # Waking a caller's loop and its streams takes 0.2 ms of processor time, a fifth of a small model's step.
        if at_once or now - self._handed_out >= HAND_OUT_SECONDS:
            self._core.hand_out_tokens()
            if not self._new_tokens.is_empty:
                self._handed_out = now
                self._new_tokens.flush()

    def _has_work_or_flush(self) -> bool:
        """Return whether the core has work. If not, send the remaining tokens of streams before the thread waits."""
        if self._has_work():
            return True
        self._send_new_tokens(at_once=True)
        return False

    def _should_admit_prompts(self) -> bool:
        """Return whether the next step may admit prompts."""
        has_room = self._core.num_running < self._core.max_num_seqs
        return self._pause is None and self._core.num_waiting > 0 and has_room

    def _has_work(self) -> bool:
        if self._weights.asleep or self._cache_asleep or self._weights.updating or not self._weights.complete:
            return False
        if self._pause is None:
            return self._core.num_running + self._core.num_waiting > 0
        return self._pause == "wait" and self._core.num_running > 0

    def _resolve(self, outcomes: Outcomes) -> None:
        for request, outcome in outcomes.items():
            if isinstance(outcome, Exception):
                self._pending.pop(request).set_exception(outcome)
            else:
                self._pending.pop(request).set_result(outcome)

    def _remove_unused_loras(self) -> None:
        used = {request.lora for request in self._pending}
        for lora, unused in [leaving for leaving in self._leaving if leaving[0] not in used]:
            self._leaving.remove((lora, unused))
            self._core.loras.free(lora)
            unused.set_result(None)

    def _release_drained(self) -> None:
        for waiting in self._drained:
            waiting.set_result(None)
        self._drained.clear()

    def _fail_all(self, failure: WorkerError) -> None:
        waiting = self._mailbox.fail(failure) + self._drained + [unused for _, unused in self._leaving]
        waiting += self._pending.values()
        self._drained, self._leaving, self._pending = [], [], {}
        self._weights.close()
        for done in waiting:  # a separate exception each: raising one extends its traceback
            error = WorkerError(str(failure))
            error.__cause__ = failure.__cause__
            done.set_exception(error)

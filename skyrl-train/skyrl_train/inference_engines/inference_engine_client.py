"""Client over many engines: routes requests, continues interrupted ones, and forwards control calls to all engines.

See `routing` for routing, `request_runner` for the life cycle of a request, `supervision` for the state of engines.
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from uuid import uuid4

from transformers import PreTrainedTokenizerBase

from skyrl_train.config import SkyRLConfig
from skyrl_train.errors import WeightSyncError, WorkerError
from skyrl_train.inference_engines.base import (
    Completion,
    EngineInfo,
    GenerationRequest,
    InferenceEngineInput,
    InferenceEngineInterface,
    InferenceEngineOutput,
    OnTokens,
    PauseMode,
)
from skyrl_train.inference_engines.continuation import EngineCall
from skyrl_train.inference_engines.health import ROUTED, Health
from skyrl_train.inference_engines.request_runner import ClientRequest, RequestRunner
from skyrl_train.inference_engines.routing import Router, Session
from skyrl_train.inference_engines.supervision import EngineFailure, Restart, Supervisor
from skyrl_train.inference_engines.token_stream import TokenStream
from skyrl_train.utils.chat_templates import get_configured_chat_template
from skyrl_train.utils.explanations import write_explanation
from skyrl_train.weight_sync.base import LoraLoadRequest, WeightReport, WeightSyncInitInfo, WeightUpdateRequest
from skyrl_train.weight_sync.fingerprint import differences

_PAUSED = "generation is paused"
_ASLEEP = "the engines are asleep"


class InferenceEngineClient(InferenceEngineInterface):
    """Client that presents all engines as one and tolerates failures of engines.

    A request interrupted by a pause with `abort` or by an engine failure is continued from its tokens, after the pause
    or on another engine; `abort_generation` returns requests with the tokens generated so far. Failed engines are
    restarted up to `generator.max_engine_restarts` times in total; after that, every call raises `WorkerError` with the
    end of the engine's log. A control call during which an engine crashes raises `WorkerError` after all other engines
    executed it; `wait_until_healthy()` then waits for the new engine, and the call can be repeated.

    Args:
        engines: at least one.
        tokenizer: converts `prompts` (conversations) to tokens, and tokens of interrupted completions to text.
        restart: restarts engine i. None: an engine failure ends the run.
    """

    def __init__(
        self,
        engines: Sequence[InferenceEngineInterface],
        tokenizer: PreTrainedTokenizerBase,
        full_config: SkyRLConfig,
        restart: Restart | None = None,
    ):
        if not engines:
            raise ValueError("the client needs at least one engine")
        self.tokenizer = tokenizer
        self.model_name = full_config.trainer.policy.model.path
        self.lora_name: str | None = None
        """Default adapter of requests."""
        self.give_weights: Callable[[int], Awaitable[None]] | None = None
        """Callback that sends the current weights to engine i after a restart. None: engines start with current
        weights.
        """
        settings = full_config.generator
        self.receives_all_weights = settings.syncs_all_weights
        """True if every weight sync contains all weights."""
        self._chat_template = get_configured_chat_template(tokenizer, settings)
        self._request_timeout = settings.request_timeout_seconds
        self._router = Router(len(engines), settings.max_requests_per_engine)
        self._supervisor = Supervisor(engines, settings, restart, self._update_router)
        self._supervisor.prepare = self._prepare
        self._runner = RequestRunner(self._router, self._supervisor, tokenizer)
        self._tickets = itertools.count()
        self._adapters: dict[str, LoraLoadRequest] = {}
        self._num_continued = 0
        self._reported = {"deaths": 0, "restarts": 0}

    @property
    def engines(self) -> list[InferenceEngineInterface]:
        """Current engines by number; some may have crashed or be starting (see `wait_until_healthy`)."""
        return self._supervisor.engines

    @property
    def restart(self) -> Restart | None:
        """Function that restarts engine i; settable, so that it can be wrapped to free memory first."""
        return self._supervisor.restart

    @restart.setter
    def restart(self, restart: Restart | None) -> None:
        self._supervisor.restart = restart

    # ---- requests

    async def generate(self, request: GenerationRequest) -> Completion:
        """Generate the completion of a prompt.

        Raises:
            ValueError: an invalid request.
            RolloutError: it was interrupted too often.
            TimeoutError: not completed within `generator.request_timeout_seconds`, waiting included.
            WorkerError: engines failed too often.
        """
        return await self._run(self._prepare_request(request))

    async def stream(self, request: GenerationRequest, on_tokens: OnTokens) -> Completion:
        """Generate a completion as `generate` does, and deliver its tokens while it runs: in pieces if the engine does
        not stream, all at the end if an interrupted completion would be restarted.
        """
        if request.session_id is None:  # so that each piece is sent to the engine that cached the previous one
            request = replace(request, session_id=f"stream {uuid4()}")
        prepared = self._prepare_request(request)
        prepared.stream = TokenStream(on_tokens)
        return await self._run(prepared)

    async def generate_batch(self, input_batch: InferenceEngineInput) -> InferenceEngineOutput:
        """Generate completions of prompts or conversations. Engines get equally many requests, and equal prompts stay
        together.
        """
        prompts = self._to_prompt_token_ids(input_batch)
        name = uuid4().hex
        sessions = input_batch.get("session_ids") or [f"batch {name} {row}" for row in range(len(prompts))]
        groups: dict[tuple[int, ...], list[Session]] = {}
        for prompt, session in zip(prompts, sessions, strict=False):
            groups.setdefault(tuple(prompt), []).append(session)
        batch = {**input_batch, "prompts": None, "prompt_token_ids": prompts, "session_ids": sessions}
        self._supervisor.attach()
        await self._supervisor.wait_until_started()  # requests can be divided only over running engines
        with self.announced(list(groups.values())):
            return await super().generate_batch(InferenceEngineInput(**batch))

    def _prepare_request(self, request: GenerationRequest) -> ClientRequest:
        params, seed = request.sampling_params, request.sampling_params.get("seed")
        if isinstance(seed, int) and not isinstance(seed, bool):  # the engine reports other errors
            params = params | {"seed": [seed, 0]}
        request = replace(request, sampling_params=params, lora_name=request.lora_name or self.lora_name)
        return ClientRequest(
            request, next(self._tickets), self._runner.num_aborts, EngineCall(request.prompt_token_ids, params)
        )

    async def _run(self, request: ClientRequest) -> Completion:
        """Wait until the engines have started, and complete a request before its deadline."""
        self._supervisor.attach()
        try:
            async with asyncio.timeout(self._request_timeout) as deadline:
                await self._supervisor.wait_until_started()
                completion = await self._runner.run(request)
        except TimeoutError:
            if not deadline.expired():
                raise
            late = self._runner.describe_timeout(request, self._request_timeout)
            raise TimeoutError(late + await asyncio.to_thread(write_explanation, late)) from None
        self._num_continued += request.was_interrupted
        return completion

    @contextmanager
    def announced(self, groups: Sequence[Sequence[Session]]) -> Iterator[None]:
        """See the interface."""
        self._router.register_expected(groups)
        try:
            yield
        finally:
            self._router.remove_expected(groups)

    def _to_prompt_token_ids(self, input_batch: InferenceEngineInput) -> list[list[int]]:
        conversations, token_ids = input_batch.get("prompts"), input_batch.get("prompt_token_ids")
        if (conversations is None) == (token_ids is None):
            raise ValueError("a request needs either prompts or prompt_token_ids, not both")
        if token_ids is not None:
            return token_ids
        assert conversations is not None
        texts = [self._chat_template.text(each, add_generation_prompt=True) for each in conversations]
        return [self._chat_template.encode(text) for text in texts]

    # ---- engines

    async def describe(self) -> EngineInfo:
        """Describe the engines together: the smallest context, and every feature that one of them does not support."""
        infos = await self.infos()
        unsupported = {feature: why for info in infos for feature, why in info.unsupported.items()}
        return replace(infos[0], max_model_len=min(info.max_model_len for info in infos), unsupported=unsupported)

    async def infos(self) -> list[EngineInfo]:
        """Return the description of each engine."""
        return await self._supervisor.infos()

    async def check_health(self) -> None:
        """Raise WorkerError if no engine is running, or restarts are exhausted."""
        self._supervisor.attach()
        await self._supervisor.wait_until_started()
        if not self._supervisor.get_engines_with_health(*ROUTED):
            raise WorkerError("no engine is running; engines are being restarted")

    async def wait_until_healthy(self) -> bool:
        """Wait until every engine runs with current weights; restart engines that crashed unnoticed. `give_weights` and
        `restart` must not wait for this method, which waits for them.

        Returns: True if an engine failed since the last call.

        Raises:
            WorkerError: an engine failed once too often.
        """
        return await self._supervisor.wait_until_healthy()

    def take_metrics(self) -> dict[str, float]:
        """Return counts since the last call: failures, restarts, continued requests, and of engines that count them
        prompt tokens computed and the cached fraction, draft tokens and the accepted fraction."""
        counts = {"deaths": self._supervisor.num_deaths, "restarts": self._supervisor.num_restarts}
        metrics = {f"engines/{name}": float(count - self._reported[name]) for name, count in counts.items()}
        metrics["engines/continued_requests"] = float(self._num_continued)
        self._reported, self._num_continued = counts, 0
        if num_tokens := self._runner.num_prompt_tokens:
            num_cached = self._runner.num_cached_prompt_tokens
            metrics["engines/prompt_tokens_computed"] = float(num_tokens - num_cached)
            metrics["engines/prefix_cache_hit_rate"] = num_cached / num_tokens
            self._runner.num_prompt_tokens = self._runner.num_cached_prompt_tokens = 0
        if num_drafted := self._runner.num_drafted:
            metrics["engines/draft_tokens"] = float(num_drafted)
            metrics["engines/draft_acceptance_rate"] = self._runner.num_accepted / num_drafted
            self._runner.num_drafted = self._runner.num_accepted = 0
        return metrics

    def _update_router(self) -> None:
        if self._supervisor.lost is not None:
            self._router.fail(self._supervisor.lost)
        routed = self._supervisor.get_engines_with_health(*ROUTED)
        self._router.set_engines(routed, self._supervisor.get_engines_with_health(Health.SUSPECT))

    async def _prepare(self, index: int) -> None:
        """Bring the restarted engine `index` to the state of the others."""
        if self.give_weights is not None:
            await self.give_weights(index)
        for request in list(self._adapters.values()):
            await self.engines[index].load_lora(request)

    # ---- control of all running engines

    async def pause_generation(self, mode: PauseMode = "keep") -> None:
        """Pause every engine; new requests wait in the client. May be repeated with another mode."""
        self._router.pause_admission(_PAUSED)
        await self._supervisor.run_all(lambda engine: engine.pause_generation(mode))

    async def resume_generation(self) -> None:
        await self._supervisor.run_all(lambda engine: engine.resume_generation())
        self._router.resume_admission(_PAUSED)

    async def abort_generation(self) -> None:
        self._runner.abort()
        await self._supervisor.run_all(lambda engine: engine.abort_generation())

    async def sleep(self, level: int = 1) -> None:
        """Put every engine to sleep; new requests wait in the client until `wake_up` has restored everything."""
        was_asleep = _ASLEEP in self._router.pause_reasons
        self._router.pause_admission(_ASLEEP)
        try:
            await self._supervisor.run_all(lambda engine: engine.sleep(level))
        except EngineFailure:
            raise
        except Exception:  # refused
            if not was_asleep:
                self._router.resume_admission(_ASLEEP)
            raise

    async def wake_up(self, tags: list[str] | None = None) -> None:
        await self._supervisor.run_all(lambda engine: engine.wake_up(tags))
        if tags is None or "kv_cache" in tags:
            self._router.resume_admission(_ASLEEP)

    async def init_weight_update_communicator(self, init_info: WeightSyncInitInfo) -> None:
        """Give each engine its own rank offset, after the ranks of the previous engines."""
        infos = await self.infos()
        ranks = itertools.accumulate((info.num_weight_processes for info in infos), initial=init_info.rank)
        own = dict(zip(map(id, self.engines), ranks, strict=False))
        await self._supervisor.run_all(
            lambda engine: engine.init_weight_update_communicator(replace(init_info, rank=own[id(engine)]))
        )

    async def update_named_weights(self, request: WeightUpdateRequest) -> None:
        await self._supervisor.run_all(lambda engine: engine.update_named_weights(request))

    async def finish_weight_update(self, version: int) -> WeightReport:
        """Finish the update on every engine. Raises WeightSyncError if their weights differ."""
        return _get_common_report(await self._supervisor.run_all(lambda engine: engine.finish_weight_update(version)))

    async def load_lora(self, request: LoraLoadRequest) -> WeightReport:
        """Load an adapter on every engine, also on engines that start later. Raises WeightSyncError if they differ."""
        before = self._adapters.get(request.name)
        self._adapters[request.name] = request  # set first: an engine that starts meanwhile loads it too
        try:
            return _get_common_report(await self._supervisor.run_all(lambda engine: engine.load_lora(request)))
        except BaseException:
            if self._adapters.pop(request.name, None) and before is not None:
                self._adapters[request.name] = before
            raise

    async def unload_lora(self, name: str) -> None:
        self._adapters.pop(name, None)
        await self._supervisor.run_all(lambda engine: engine.unload_lora(name))

    async def weight_version(self) -> int:
        """Return the oldest weight version of the engines."""
        return min(await self._supervisor.run_all(lambda engine: engine.weight_version()))

    async def reset_prefix_cache(self) -> None:
        await self._supervisor.run_all(lambda engine: engine.reset_prefix_cache())

    async def teardown(self) -> None:
        await self._supervisor.close()


def _get_common_report(reports: Sequence[WeightReport]) -> WeightReport:
    """Return the common report of all engines."""
    first, *others = reports
    for index, report in enumerate(others, start=1):
        wrong = differences(first.fingerprints, report.fingerprints)
        if wrong:
            raise WeightSyncError(f"after version {first.version}, engine {index} differs from engine 0: {wrong}")
    processes = {
        name: [
            f"{process} of engine {index}"
            for index, report in enumerate(reports)
            for process in report.wrong.get(name, [])
        ]
        for report in reports
        for name in report.wrong
    }
    return replace(
        first,
        wrong=processes,
        received_only=list(dict.fromkeys(name for report in reports for name in report.received_only)),
        held_bytes=sum(report.held_bytes for report in reports),
        read_bytes=sum(report.read_bytes for report in reports),
    )

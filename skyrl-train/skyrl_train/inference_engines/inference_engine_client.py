"""One engine out of many: routes requests, carries on with those that were interrupted, and passes control to all.

Who goes where is in `routing`, a request's way to its answer in `answering`, which engines live in `supervision`.
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from skyrl_train.config import SkyRLConfig
from skyrl_train.errors import WeightSyncError, WorkerError
from skyrl_train.inference_engines.answering import Answering, Request
from skyrl_train.inference_engines.base import (
    EngineInfo,
    InferenceEngineInput,
    InferenceEngineInterface,
    InferenceEngineOutput,
    PauseMode,
)
from skyrl_train.inference_engines.continuation import Answer, Ask
from skyrl_train.inference_engines.health import ROUTED, Health
from skyrl_train.inference_engines.routing import Router, Session, Want
from skyrl_train.inference_engines.supervision import EngineFailure, Restart, Supervisor
from skyrl_train.types import ConversationType
from skyrl_train.weight_sync.base import LoraLoadRequest, WeightReport, WeightSyncInitInfo, WeightUpdateRequest
from skyrl_train.weight_sync.fingerprint import differences

_PAUSED = "generation is paused"
_ASLEEP = "the engines sleep"


class InferenceEngineClient(InferenceEngineInterface):
    """All engines as one that does not die.

    A request that ended because generation was paused with `abort`, or whose engine failed, goes on from the tokens it
    has, after the pause or on another engine; one that a caller ends by `abort_generation` returns what was written.
    Engines that fail are started again, as often as `generator.max_engine_restarts` allows; one failure more, and every
    call raises `WorkerError` with the end of that engine's log. A control call during which an engine dies raises
    `WorkerError`, after all other engines did as told; `settle()` then waits for the new one, and it may be repeated.

    Args:
        engines: at least one.
        tokenizer: turns `prompts` (conversations) into tokens, and tokens of interrupted answers into text.
        restart: starts engine i again. None: an engine that fails is the end of all.
    """

    def __init__(
        self,
        engines: Sequence[InferenceEngineInterface],
        tokenizer: PreTrainedTokenizerBase,
        full_config: SkyRLConfig,
        restart: Restart | None = None,
    ):
        if not engines:
            raise ValueError("a client needs at least one engine")
        self.tokenizer = tokenizer
        self.model_name = full_config.trainer.policy.model.path
        self.lora_name: str | None = None
        """The adapter that answers requests which name none."""
        self.give_weights: Callable[[int], Awaitable[None]] | None = None
        """Gives engine i, just started again, the present weights. None: those it started with are the present ones."""
        settings = full_config.generator
        self._chat_template_kwargs = settings.chat_template_kwargs
        self._request_timeout = settings.request_timeout_seconds
        self._router = Router(len(engines), settings.max_requests_per_engine)
        self._supervisor = Supervisor(engines, settings, restart, self._engines_changed)
        self._supervisor.prepare = self._prepare
        self._answering = Answering(self._router, self._supervisor, tokenizer)
        self._tickets = itertools.count()
        self._adapters: dict[str, LoraLoadRequest] = {}
        self._num_continued = 0
        self._reported = {"deaths": 0, "restarts": 0}

    @property
    def engines(self) -> list[InferenceEngineInterface]:
        """The present engines by their numbers; some may be dead or starting (see `settle`)."""
        return self._supervisor.engines

    @property
    def restart(self) -> Restart | None:
        """Starts engine i again; it may be wrapped by whoever must make room for it before."""
        return self._supervisor.restart

    @restart.setter
    def restart(self, restart: Restart | None) -> None:
        self._supervisor.restart = restart

    # ---- answers

    async def generate(self, input_batch: InferenceEngineInput) -> InferenceEngineOutput:
        """Continues every prompt.

        Raises:
            ValueError: a bad request.
            TimeoutError: a request was not answered within `generator.request_timeout_seconds`, waiting included.
            WorkerError: engines failed more often than they may.
        """
        requests = self._requests(input_batch)
        self._supervisor.attach()
        try:
            async with asyncio.timeout(self._request_timeout) as deadline:
                await self._supervisor.started()
                await self._answering.answer(next(self._tickets), requests)
        except TimeoutError:
            if not deadline.expired():
                raise
            raise TimeoutError(self._answering.what_is_late(requests, self._request_timeout)) from None
        self._num_continued += sum(request.was_interrupted for request in requests)
        return _output([request.answer for request in requests if request.answer is not None])

    def _requests(self, input_batch: InferenceEngineInput) -> list[Request]:
        prompts = self._prompt_token_ids(input_batch)
        sessions: Sequence[Session | None] = input_batch.get("session_ids") or [None] * len(prompts)
        if len(sessions) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts need as many session_ids; got {len(sessions)}")
        params = input_batch.get("sampling_params")
        seeds = _seeds(params, len(prompts))
        lora_name = input_batch.get("lora_name") or self.lora_name
        num_aborts = self._answering.num_aborts
        return [
            Request(prompt, params, seed, Want(session, len(prompt)), lora_name, num_aborts, Ask(prompt, params or {}))
            for prompt, session, seed in zip(prompts, sessions, seeds, strict=True)
        ]

    def _prompt_token_ids(self, input_batch: InferenceEngineInput) -> list[list[int]]:
        conversations, token_ids = input_batch.get("prompts"), input_batch.get("prompt_token_ids")
        if (conversations is None) == (token_ids is None):
            raise ValueError("a request needs either prompts or prompt_token_ids, and not both")
        if token_ids is not None:
            return token_ids
        assert conversations is not None
        return [self._templated(conversation) for conversation in conversations]

    def _templated(self, conversation: ConversationType) -> list[int]:
        encoded: Any = self.tokenizer.apply_chat_template(
            conversation, add_generation_prompt=True, tokenize=True, return_dict=True, **self._chat_template_kwargs
        )
        return encoded["input_ids"]

    # ---- engines

    async def describe(self) -> EngineInfo:
        """What all engines have in common: the smallest context, and whatever one of them lacks."""
        infos = await self.infos()
        lacks = {feature: why for info in infos for feature, why in info.lacks.items()}
        return replace(infos[0], max_model_len=min(info.max_model_len for info in infos), lacks=lacks)

    async def infos(self) -> list[EngineInfo]:
        """What each engine says of itself."""
        return await self._supervisor.infos()

    async def check_health(self) -> None:
        """Raises WorkerError if no engine is up, or none will be any more."""
        self._supervisor.attach()
        await self._supervisor.started()
        if not self._supervisor.with_health(*ROUTED):
            raise WorkerError("no engine is up; they are being started again")

    async def settle(self) -> bool:
        """Returns when every engine is up and has the present weights, starting what died unnoticed.

        Not to be awaited by what `give_weights` or the restart of an engine wait for.

        Returns: whether an engine failed since the last time.

        Raises:
            WorkerError: an engine failed once too often.
        """
        return await self._supervisor.settle()

    def take_metrics(self) -> dict[str, float]:
        """What happened since the last call."""
        counts = {"deaths": self._supervisor.num_deaths, "restarts": self._supervisor.num_restarts}
        metrics = {f"engines/{name}": float(count - self._reported[name]) for name, count in counts.items()}
        metrics["engines/continued_requests"] = float(self._num_continued)
        self._reported, self._num_continued = counts, 0
        return metrics

    def _engines_changed(self) -> None:
        if self._supervisor.lost is not None:
            self._router.fail(self._supervisor.lost)
        routed = self._supervisor.with_health(*ROUTED)
        self._router.set_engines(routed, self._supervisor.with_health(Health.SUSPECT))

    async def _prepare(self, index: int) -> None:
        """Makes engine `index`, just started again, as the others are."""
        if self.give_weights is not None:
            await self.give_weights(index)
        for request in list(self._adapters.values()):
            await self.engines[index].load_lora(request)

    # ---- control of all engines that are up

    async def pause_generation(self, mode: PauseMode = "keep") -> None:
        """As of an engine; requests that arrive wait here. May be repeated, with another mode as well."""
        self._router.hold(_PAUSED)
        await self._supervisor.run_all(lambda engine: engine.pause_generation(mode))

    async def resume_generation(self) -> None:
        await self._supervisor.run_all(lambda engine: engine.resume_generation())
        self._router.let_go(_PAUSED)

    async def abort_generation(self) -> None:
        self._answering.abort()
        await self._supervisor.run_all(lambda engine: engine.abort_generation())

    async def sleep(self, level: int = 1) -> None:
        """As of an engine; requests that arrive wait here until all of it is undone."""
        was_asleep = _ASLEEP in self._router.holds
        self._router.hold(_ASLEEP)
        try:
            await self._supervisor.run_all(lambda engine: engine.sleep(level))
        except EngineFailure:
            raise
        except Exception:  # refused
            if not was_asleep:
                self._router.let_go(_ASLEEP)
            raise

    async def wake_up(self, tags: list[str] | None = None) -> None:
        await self._supervisor.run_all(lambda engine: engine.wake_up(tags))
        if tags is None or "kv_cache" in tags:
            self._router.let_go(_ASLEEP)

    async def init_weight_update_communicator(self, init_info: WeightSyncInitInfo) -> None:
        """Each engine gets its own rank, behind those of the engines before it."""
        infos = await self.infos()
        ranks = itertools.accumulate((info.num_weight_processes for info in infos), initial=init_info.rank)
        own = dict(zip(map(id, self.engines), ranks, strict=False))
        await self._supervisor.run_all(
            lambda engine: engine.init_weight_update_communicator(replace(init_info, rank=own[id(engine)]))
        )

    async def update_named_weights(self, request: WeightUpdateRequest) -> None:
        await self._supervisor.run_all(lambda engine: engine.update_named_weights(request))

    async def finish_weight_update(self, version: int) -> WeightReport:
        """Raises WeightSyncError if the engines do not hold the same weights."""
        return _common(await self._supervisor.run_all(lambda engine: engine.finish_weight_update(version)))

    async def load_lora(self, request: LoraLoadRequest) -> WeightReport:
        """Engines that are started later load it, too. Raises WeightSyncError if the engines do not hold the same."""
        before = self._adapters.get(request.name)
        self._adapters[request.name] = request  # at once: an engine that comes up while others load it loads it as well
        try:
            return _common(await self._supervisor.run_all(lambda engine: engine.load_lora(request)))
        except BaseException:
            if self._adapters.pop(request.name, None) and before is not None:
                self._adapters[request.name] = before
            raise

    async def unload_lora(self, name: str) -> None:
        self._adapters.pop(name, None)
        await self._supervisor.run_all(lambda engine: engine.unload_lora(name))

    async def weight_version(self) -> int:
        """The oldest version among the engines."""
        return min(await self._supervisor.run_all(lambda engine: engine.weight_version()))

    async def reset_prefix_cache(self) -> None:
        await self._supervisor.run_all(lambda engine: engine.reset_prefix_cache())

    async def teardown(self) -> None:
        await self._supervisor.close()


def _seeds(params: dict[str, Any] | None, num: int) -> list[Any]:
    """For each request what its randomness is made of, whichever engine takes it; None: the engine's choice."""
    seed = (params or {}).get("seed")
    if isinstance(seed, list | tuple):
        if len(seed) != num:
            raise ValueError(
                f"sampling parameter seed must be an integer, or one [seed, index] pair for each of the {num} "
                f"requests; got {len(seed)} pairs"
            )
        return list(seed)
    if isinstance(seed, int) and not isinstance(seed, bool):
        return [[seed, index] for index in range(num)]
    return [None] * num  # what is wrong with it, the engine says


def _output(answers: list[Answer]) -> InferenceEngineOutput:
    log_probs = [answer.log_probs for answer in answers]
    of_prompts = [answer.prompt_log_probs for answer in answers]
    output = InferenceEngineOutput(
        responses=[answer.text for answer in answers],
        response_ids=[answer.token_ids for answer in answers],
        stop_reasons=[answer.stop_reason for answer in answers],
        response_logprobs=None if None in log_probs else log_probs,  # pyright: ignore[reportArgumentType]
        weight_versions=[answer.weight_versions for answer in answers],
    )
    if of_prompts and None not in of_prompts:
        output["prompt_logprobs"] = of_prompts  # pyright: ignore[reportGeneralTypeIssues]
    return output


def _common(reports: Sequence[WeightReport]) -> WeightReport:
    """The report of all engines, if it is the same."""
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

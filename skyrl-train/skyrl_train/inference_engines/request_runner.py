"""Execution of requests: each waits for a slot, is sent to an engine, and is continued on another engine after an
interruption.

`routing` selects the engine, `continuation` builds the next call of an interrupted request, `supervision` tracks the
state of engines.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

from transformers import PreTrainedTokenizerBase

from skyrl_gym.waits import waiting
from skyrl_train.errors import RolloutError
from skyrl_train.inference_engines.base import InferenceEngineInterface
from skyrl_train.inference_engines.continuation import (
    EngineCall,
    build_next_call,
    can_stop_across_border,
    depends_on_answer,
    join,
)
from skyrl_train.inference_engines.health import Health
from skyrl_train.inference_engines.request import Completion, GenerationRequest, SamplingKeywords, TokenDelta
from skyrl_train.inference_engines.routing import Interrupted, Router, SlotRequest
from skyrl_train.inference_engines.supervision import EngineFailure, Supervisor
from skyrl_train.inference_engines.token_stream import TokenStream

SLOTS = "the queue of requests"
"""Name under which waits for a slot, and requests that hold one, are recorded."""

MAX_NEW_BEGINNINGS = 8
"""Maximum number of restarts of an interrupted completion that its engine cannot continue."""

_RETRY_DELAY_SECONDS = 0.1
"""Delay before retrying a request that an engine returned without tokens although it was not aborted."""


@dataclass(eq=False)
class ClientRequest:
    """Request, until it is completed."""

    given: GenerationRequest
    ticket: int
    """Place in the queue for slots."""
    num_aborts_before: int
    call: EngineCall
    stream: TokenStream | None = None
    """Receiver of streamed tokens; None: not streamed."""
    parts: list[Completion] = field(default_factory=list)
    completion: Completion | None = None
    engine: int | None = None
    """Engine of the current slot."""
    was_interrupted: bool = False
    num_new_beginnings: int = 0

    @property
    def prompt(self) -> list[int]:
        return self.given.prompt_token_ids

    @property
    def params(self) -> SamplingKeywords:
        return self.given.sampling_params


class RequestRunner:
    """Runner of requests over many engines.

    Args:
        tokenizer: decodes interrupted completions.
    """

    def __init__(self, router: Router, supervisor: Supervisor, tokenizer: PreTrainedTokenizerBase):
        self._router = router
        self._supervisor = supervisor
        self._tokenizer = tokenizer
        self.num_aborts = 0
        """Number of calls of `abort`."""
        self.num_prompt_tokens = self.num_cached_prompt_tokens = 0
        """Prompt tokens of calls to engines that count cached tokens, and the cached ones among them."""
        self.num_drafted = self.num_accepted = 0
        """Verified draft tokens, and the accepted ones among them."""

    def abort(self) -> None:
        """End waiting requests immediately, and running ones when their engines return them."""
        self.num_aborts += 1
        self._router.interrupt()

    async def run(self, request: ClientRequest) -> Completion:
        """Complete a request: wait for a slot, call the engine, continue after interruptions.

        Raises:
            RolloutError: interrupted too often to be restarted again.
            Exception: the error of its engine, unless the engine failed.
        """
        prompt = request.prompt
        slot = SlotRequest(request.given.session_id, len(prompt), hash(tuple(prompt)))
        try:
            while not self._is_aborted(request):
                request.engine = None
                if (engine := await self._wait_for_slot(request.ticket, slot)) is None:
                    continue
                request.engine = engine
                try:
                    part = await self._call(request, engine)
                except EngineFailure:  # the caller already has the streamed tokens
                    request.was_interrupted = True
                    part = None if request.stream is None else request.stream.get_interrupted_part()
                finally:
                    self._router.release(engine, slot)
                if part is not None:
                    self._add_part(request, part)
                if request.stream is not None:
                    request.stream.end_call()
                if request.completion is None and part is not None and self._is_refusal(part):
                    await asyncio.sleep(_RETRY_DELAY_SECONDS)
        finally:
            if request.stream is not None:
                request.stream.end_call()  # the caller receives no more tokens
        assert request.completion is not None
        return request.completion

    async def _wait_for_slot(self, ticket: int, slot: SlotRequest) -> int | None:
        """Wait for a slot. Returns its engine, or None if the wait was interrupted."""
        entry = self._router.request_slot(ticket, slot)
        if not entry.granted.done():
            try:
                with waiting("a slot on an engine", on=SLOTS):
                    await asyncio.wait({entry.granted})
            except asyncio.CancelledError:
                self._router.withdraw(entry)
                raise
        try:
            return entry.granted.result()
        except Interrupted:
            return None

    async def _call(self, request: ClientRequest, engine: int) -> Completion:
        """Call an engine for the current part of a request."""
        params, stream = request.call.sampling_params, request.stream
        if "seed" in params and self._supervisor.has_no_seeds(engine):
            params = {name: value for name, value in params.items() if name != "seed"}
        if stream is not None:
            params = self._build_stream_params(request, stream, engine, params)
        sent = replace(
            request.given,
            prompt_token_ids=request.call.prompt_token_ids,
            sampling_params=params,
            count_cached_tokens=True,
        )
        deltas = [] if stream is None else stream.deltas

        def call(present: InferenceEngineInterface) -> Awaitable[Completion]:
            if stream is None:
                return present.generate(sent)
            return present.stream(sent, lambda delta: self._take_tokens(request, deltas, delta))

        with waiting("a request with a slot", who=SLOTS):
            return self._count_and_strip(request, await self._supervisor.run(engine, call))

    def _build_stream_params(
        self, request: ClientRequest, stream: TokenStream, engine: int, params: SamplingKeywords
    ) -> SamplingKeywords:
        """Build the settings of the next call of a streamed request."""
        # For any engine: the request may be continued elsewhere.
        engines = range(len(self._supervisor.engines))
        begins_anew = any(self._supervisor.is_unsupported(each, "answer_tokens") for each in engines)
        # A streamed part lacks kept tokens, so it cannot be continued with them.
        keeps = bool(params.get("return_kept_tokens"))
        stream.is_held = keeps or (begins_anew and depends_on_answer(request.params))
        return stream.build_segment_params(params) if self._supervisor.is_unsupported(engine, "streaming") else params

    def _take_tokens(self, request: ClientRequest, deltas: list[TokenDelta], delta: TokenDelta) -> None:
        """Deliver tokens of a call, unless a stop string may end the completion before them."""
        stream = request.stream
        if stream is None or deltas is not stream.deltas:  # of a call that was given up
            return
        deltas.append(delta)
        if not stream.is_border_passed and (part := stream.get_interrupted_part()) is not None:
            parts = [*request.parts, part]
            stream.is_border_passed = not can_stop_across_border(parts, request.params, self._get_decoder(request))
        if stream.is_border_passed:
            stream.send()

    def _count_and_strip(self, request: ClientRequest, part: Completion) -> Completion:
        """Count the prompt tokens and drafts of a call, and return its completion without these counts, so that it
        depends only on its request.
        """
        if part.num_cached_prompt_tokens is not None:
            self.num_prompt_tokens += len(request.call.prompt_token_ids)
            self.num_cached_prompt_tokens += part.num_cached_prompt_tokens
        if part.drafts is not None:
            self.num_drafted += part.drafts.num_drafted
            self.num_accepted += part.drafts.num_accepted
        return replace(part, num_cached_prompt_tokens=None, drafts=None)

    def _add_part(self, request: ClientRequest, part: Completion) -> None:
        """Add a part to its request, and complete the request if it was the last part.

        Raises:
            RolloutError: restarted too often.
        """
        is_piece = request.stream is not None and request.stream.is_end_of_segment(part)
        if is_piece:
            part = replace(part, stop_reason="abort")
        request.parts.append(part)
        if part.stop_reason == "abort" and self._is_aborted(request):
            return
        if part.stop_reason == "abort" and part.token_ids and self._should_restart(request):
            request.parts.clear()
            request.was_interrupted = True
            request.num_new_beginnings += 1
            if request.num_new_beginnings > MAX_NEW_BEGINNINGS:
                raise self._build_interruption_error(request)
            return
        max_model_len = None if request.engine is None else self._supervisor.max_model_len(request.engine)
        step = build_next_call(request.prompt, request.params, request.parts, self._get_decoder(request), max_model_len)
        if isinstance(step, EngineCall):
            request.call, request.was_interrupted = step, request.was_interrupted or not is_piece
            if request.stream is not None:
                request.stream.send_rest(part)
            return
        request.completion = step

    def _should_restart(self, request: ClientRequest) -> bool:
        """Return whether an interrupted completion must be restarted: its tokens depend on earlier ones, and its engine
        does not support `num_answer_tokens`.
        """
        engine = request.engine
        return (
            engine is not None
            and depends_on_answer(request.params)
            and self._supervisor.is_unsupported(engine, "answer_tokens")
        )

    def _build_interruption_error(self, request: ClientRequest) -> RolloutError:
        budget = request.params.get("max_tokens")
        return RolloutError(
            "infrastructure",
            f"a completion of at most {budget} tokens was interrupted {request.num_new_beginnings} times, and engine "
            f"{request.engine} restarts completions with a constraint or penalties each time. Set "
            "generator.weight_sync_pause=wait (or trainer.fully_async.pause=wait), so that a sync waits for them, "
            "sync less often, or lower max_tokens",
        )

    def _is_aborted(self, request: ClientRequest) -> bool:
        """Return whether a caller aborted this request; it is then completed with the tokens so far."""
        if request.completion is None and request.num_aborts_before < self.num_aborts:
            request.completion = join(request.prompt, request.parts, self._get_decoder(request), "abort")
        return request.completion is not None

    def _is_refusal(self, part: Completion) -> bool:
        """Return whether an engine rejected a request although admission was not paused."""
        return not part.token_ids and not self._router.pause_reasons

    def _get_decoder(self, request: ClientRequest) -> Callable[[list[int]], str]:
        skip = request.params.get("skip_special_tokens", True)

        def decode(token_ids: list[int]) -> str:
            text = self._tokenizer.decode(token_ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert isinstance(text, str)
            return text

        return decode

    def describe_timeout(self, request: ClientRequest, timeout_seconds: float) -> str:
        """Describe the state of a request that missed its deadline."""
        if request.engine is not None:
            where = f"running on engine {request.engine}"
        elif self._router.pause_reasons:
            where = f"waiting: {', '.join(sorted(self._router.pause_reasons))}"
        else:
            states = ", ".join(
                f"{health}: {len(ids)}"
                for health in Health
                if (ids := self._supervisor.get_engines_with_health(health))
            )
            where = f"waiting for an engine ({states})"
        return f"the request did not complete within generator.request_timeout_seconds={timeout_seconds:g}; {where}"

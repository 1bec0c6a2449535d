"""Requests from their slot to their completion: each is sent to an engine, and continued on another one where it was
interrupted.

The choice of the engine is in `routing`, the next call of an interrupted request in `continuation`, the state of the
engines in `supervision`.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

from transformers import PreTrainedTokenizerBase

from skyrl_gym.waits import waiting
from skyrl_train.errors import RolloutError
from skyrl_train.inference_engines.base import (
    InferenceEngineInput,
    InferenceEngineInterface,
    InferenceEngineOutput,
    SamplingKeywords,
    TokenDelta,
)
from skyrl_train.inference_engines.completion import (
    Completion,
    failed_completion,
    raise_if_all_failed,
    to_completions,
)
from skyrl_train.inference_engines.constraints import ConstraintFailed
from skyrl_train.inference_engines.continuation import (
    EngineCall,
    depends_on_answer,
    join,
    may_end_at_border,
    next_call,
)
from skyrl_train.inference_engines.health import Health
from skyrl_train.inference_engines.routing import Interrupted, QueueEntry, Router, SlotRequest
from skyrl_train.inference_engines.supervision import EngineFailure, Supervisor
from skyrl_train.inference_engines.token_stream import TokenStream

SLOTS = "the queue of requests"
"""Name under which waits for a slot, and requests that hold one, are recorded."""

MAX_NEW_BEGINNINGS = 8
"""Times that an answer is begun anew after interruptions, where its engine cannot go on behind its tokens."""

_RETRY_DELAY_SECONDS = 0.1
"""Delay of a request of which an engine generated nothing, though nobody here told it to abort."""


@dataclass(eq=False)
class ClientRequest:
    """One prompt of a call of `generate`, until it is completed."""

    prompt: list[int]
    params: SamplingKeywords | None
    seed: object
    """Seed of the prompt as [seed, index]; None if sampling is not seeded."""
    slot: SlotRequest
    lora_name: str | None
    num_aborts_before: int
    call: EngineCall
    stream: TokenStream | None = None
    """Where its tokens go as they come; None: nowhere. Such a request is alone in its call of `generate`."""
    parts: list[Completion] = field(default_factory=list)
    completion: Completion | None = None
    engine: int | None = None
    """Engine that computes it, on which it holds a slot."""
    last_engine: int | None = None
    """Engine that it was sent to since it last waited."""
    was_interrupted: bool = False
    num_new_beginnings: int = 0


class RequestRunner:
    """Runner of requests over many engines.

    Args:
        tokenizer: decodes completions that were interrupted.
    """

    def __init__(self, router: Router, supervisor: Supervisor, tokenizer: PreTrainedTokenizerBase):
        self._router = router
        self._supervisor = supervisor
        self._tokenizer = tokenizer
        self.num_aborts = 0
        """Number of calls of `abort`."""
        self.num_prompt_tokens = self.num_cached_prompt_tokens = 0
        """Prompt tokens of calls to engines that count cached ones, and those of them that were cached."""
        self.num_drafted = self.num_accepted = 0
        """Draft tokens that engines verified, and those of them in responses."""

    def abort(self) -> None:
        """End waiting requests now, and running ones as soon as their engines return them."""
        self.num_aborts += 1
        self._router.interrupt()

    async def run(self, ticket: int, requests: list[ClientRequest]) -> None:
        """Complete all requests: wait for slots, call engines, continue what was interrupted.

        Requests that get slots on one engine at the same time are sent there in one call. The failure of one
        answer is its completion's, raised only if all of them failed. The first other error ends all other calls.
        """
        queued: dict[QueueEntry, list[ClientRequest]] = {}
        calls: dict[asyncio.Task[InferenceEngineOutput], list[ClientRequest]] = {}
        delays: dict[asyncio.Task[None], list[ClientRequest]] = {}

        def enqueue(requests: list[ClientRequest]) -> None:
            waiting = [request for request in requests if not self._is_aborted(request)]
            if waiting:
                for request in waiting:
                    request.last_engine = None
                queued[self._router.request_slots(ticket, [request.slot for request in waiting])] = waiting

        enqueue(requests)
        try:
            while queued or calls or delays:
                futures = [*(entry.granted for entry in queued), *calls, *delays]
                if not any(future.done() for future in futures):
                    with waiting("a slot on an engine", on=SLOTS) if queued else nullcontext():
                        await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
                for entry in [entry for entry in queued if entry.granted.done()]:
                    members = queued.pop(entry)
                    try:
                        grant = entry.granted.result()
                    except Interrupted:
                        enqueue(members)
                        continue
                    if grant.rest is not None:
                        queued[grant.rest] = members
                    for engine, indices in grant.slots.items():
                        for batch in self._batches(engine, [members[index] for index in indices]):
                            calls[self._start(engine, batch)] = batch
                for call in [call for call in calls if call.done()]:
                    interrupted = self._finish(call, calls.pop(call))
                    if self._was_refused(interrupted):
                        delays[asyncio.create_task(asyncio.sleep(_RETRY_DELAY_SECONDS))] = interrupted
                    else:
                        enqueue(interrupted)
                for delay in [delay for delay in delays if delay.done()]:
                    enqueue(delays.pop(delay))
        finally:
            for entry in queued:
                self._router.withdraw(entry)
            for task in (*calls, *delays):
                task.cancel()
            for request in requests:
                self._release(request)
                if request.stream is not None:
                    request.stream.end_call()  # its caller hears no more of it
            await asyncio.gather(*calls, *delays, return_exceptions=True)
        raise_if_all_failed([request.completion for request in requests if request.completion is not None])

    def _batches(self, engine: int, requests: list[ClientRequest]) -> list[list[ClientRequest]]:
        """Place requests on an engine; return them in batches that one call can take: all that nothing interrupted
        yet, and interrupted ones with equal budgets."""
        batches: dict[tuple[object, ...], list[ClientRequest]] = {}
        for request in requests:
            request.engine = request.last_engine = engine
            params = request.call.sampling_params
            budget = (params.get("max_tokens"), params.get("min_tokens"), "prompt_logprobs" in params)
            budget += (params.get("num_answer_tokens"),)
            batches.setdefault(budget if request.parts else (), []).append(request)
        return list(batches.values())

    def _start(self, engine: int, requests: list[ClientRequest]) -> "asyncio.Task[InferenceEngineOutput]":
        """Start one call of an engine for requests that `_batches` put together."""
        first = requests[0]
        params = first.call.sampling_params
        if first.seed is not None:
            params = params | {"seed": [request.seed for request in requests]}
        if "seed" in params and self._supervisor.has_no_seeds(engine):
            params = {name: value for name, value in params.items() if name != "seed"}
        if first.stream is not None:
            params = self._params_of_stream(first, first.stream, engine, params)
        sessions = [request.slot.session for request in requests if request.slot.session is not None]
        batch = InferenceEngineInput(
            prompt_token_ids=[request.call.prompt_token_ids for request in requests],
            sampling_params=params or None,
            session_ids=sessions if len(sessions) == len(requests) else None,
            lora_name=first.lora_name,
            count_cached_tokens=True,
        )
        return asyncio.create_task(self._generate(engine, batch, first))

    async def _generate(self, engine: int, batch: InferenceEngineInput, first: ClientRequest) -> InferenceEngineOutput:
        stream = first.stream
        deltas = [] if stream is None else stream.deltas

        def call(present: InferenceEngineInterface) -> Awaitable[InferenceEngineOutput]:
            if stream is None:
                return present.generate(batch)
            return present.stream(batch, lambda delta: self._take_tokens(first, deltas, delta))

        with waiting("a request with a slot", who=SLOTS):
            return await self._supervisor.run(engine, call)

    def _params_of_stream(
        self, request: ClientRequest, stream: TokenStream, engine: int, params: SamplingKeywords
    ) -> SamplingKeywords:
        """Return the settings of the next call of a streamed request."""
        # Of any engine: the answer may be continued on another one.
        engines = range(len(self._supervisor.engines))
        begins_anew = any(self._supervisor.is_unsupported(each, "answer_tokens") for each in engines)
        # A streamed part is without the tokens that truncation kept, so it cannot be continued with them.
        keeps = bool(params.get("return_kept_tokens"))
        stream.is_held = keeps or (begins_anew and depends_on_answer(request.params or {}))
        return stream.of_piece(params) if self._supervisor.is_unsupported(engine, "streaming") else params

    def _take_tokens(self, request: ClientRequest, deltas: list[TokenDelta], delta: TokenDelta) -> None:
        """Hand out tokens of a call, unless a stop string may end the answer before them."""
        stream = request.stream
        if stream is None or deltas is not stream.deltas:  # of a call that was given up
            return
        deltas.append(delta)
        if not stream.is_border_passed and (part := stream.interrupted_part()) is not None:
            parts = [*request.parts, part]
            stream.is_border_passed = not may_end_at_border(parts, request.params or {}, self._decoder(request))
        if stream.is_border_passed:
            stream.give()

    def _finish(
        self, call: "asyncio.Task[InferenceEngineOutput]", requests: list[ClientRequest]
    ) -> list[ClientRequest]:
        """Give back the slots of a call that ended; return those of its requests that must be continued."""
        for request in requests:
            self._release(request)
        interrupted = self._interrupted(call, requests)
        for request in requests:
            if request.stream is not None:
                request.stream.end_call()
        return interrupted

    def _interrupted(
        self, call: "asyncio.Task[InferenceEngineOutput]", requests: list[ClientRequest]
    ) -> list[ClientRequest]:
        """Add the outcome of a call to its requests; return those that are not complete with it."""
        try:
            parts = to_completions(call.result())
        except EngineFailure:
            for request in requests:
                request.was_interrupted = True
            return [request for request in requests if not self._is_complete_with_streamed(request)]
        except ConstraintFailed as failure:  # of all requests of this call
            parts = [failed_completion(failure, request.params) for request in requests]
        return [
            request
            for request, part in zip(requests, parts, strict=True)
            if not self._is_complete(request, self._counted(request, part))
        ]

    def _counted(self, request: ClientRequest, part: Completion) -> Completion:
        """Count the prompt tokens and drafts of a call; return its completion without them: it depends on its request
        alone."""
        if part.num_cached_prompt_tokens is not None:
            self.num_prompt_tokens += len(request.call.prompt_token_ids)
            self.num_cached_prompt_tokens += part.num_cached_prompt_tokens
        if part.drafts is not None:
            self.num_drafted += part.drafts.num_drafted
            self.num_accepted += part.drafts.num_accepted
        return replace(part, num_cached_prompt_tokens=None, drafts=None)

    def _is_complete(self, request: ClientRequest, part: Completion) -> bool:
        """Add a part to its request; True if the completion is whole with it."""
        if part.failure is not None:
            request.completion = part
            return True
        is_piece = request.stream is not None and request.stream.is_end_of_piece(part)
        if is_piece:
            part = replace(part, stop_reason="abort")
        request.parts.append(part)
        if part.stop_reason == "abort" and self._is_aborted(request):
            return True
        engine = request.last_engine
        if part.stop_reason == "abort" and part.token_ids and self._begins_anew(request):
            request.parts.clear()
            request.was_interrupted = True
            request.num_new_beginnings += 1
            if request.num_new_beginnings > MAX_NEW_BEGINNINGS:
                request.completion = failed_completion(self._interrupted_too_often(request), request.params)
            return request.completion is not None
        max_model_len = None if engine is None else self._supervisor.max_model_len(engine)
        step = next_call(request.prompt, request.params or {}, request.parts, self._decoder(request), max_model_len)
        if isinstance(step, EngineCall):
            request.call, request.was_interrupted = step, request.was_interrupted or not is_piece
            if request.stream is not None:
                request.stream.give_rest(part)
            return False
        request.completion = step
        return True

    def _is_complete_with_streamed(self, request: ClientRequest) -> bool:
        """Add the tokens that were streamed before an engine failed to their request, whose caller has them; True if
        the completion is whole with them."""
        part = None if request.stream is None else request.stream.interrupted_part()
        return part is not None and self._is_complete(request, part)

    def _begins_anew(self, request: ClientRequest) -> bool:
        """Check whether an interrupted answer must be generated anew: its tokens depend on those before, and its engine
        cannot be told which of the prompt's are the answer's."""
        engine = request.last_engine
        return (
            engine is not None
            and depends_on_answer(request.params or {})
            and self._supervisor.is_unsupported(engine, "answer_tokens")
        )

    def _interrupted_too_often(self, request: ClientRequest) -> RolloutError:
        assert request.last_engine is not None
        params = request.params or {}
        budget = params.get("max_tokens")
        return RolloutError(
            "infrastructure",
            f"an answer of at most {budget} tokens was interrupted {request.num_new_beginnings} times, and engine "
            f"{request.last_engine} begins an answer under a constraint or penalties anew each time. Use "
            "generator.weight_sync_pause=wait (or trainer.fully_async.pause=wait), so that a sync waits for such "
            "answers, sync less often, or lower max_tokens",
        )

    def _is_aborted(self, request: ClientRequest) -> bool:
        """Check whether a caller aborted this request; it is then completed with what was generated."""
        if request.completion is None and request.num_aborts_before < self.num_aborts:
            request.completion = join(request.prompt, request.parts, self._decoder(request), "abort")
        return request.completion is not None

    def _was_refused(self, requests: list[ClientRequest]) -> bool:
        """Check whether an engine took nothing of a request though admission was not paused."""
        return any(each.parts and not each.parts[-1].token_ids for each in requests) and not self._router.pause_reasons

    def _release(self, request: ClientRequest) -> None:
        if request.engine is not None:
            self._router.release(request.engine, [request.slot])
            request.engine = None

    def _decoder(self, request: ClientRequest) -> Callable[[list[int]], str]:
        skip = (request.params or {}).get("skip_special_tokens", True)

        def decode(token_ids: list[int]) -> str:
            text = self._tokenizer.decode(token_ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert isinstance(text, str)
            return text

        return decode

    def timeout_message(self, requests: list[ClientRequest], timeout_seconds: float) -> str:
        """Describe how many of these requests are not completed, and where they are."""
        late = [request for request in requests if request.completion is None]
        engines = sorted({request.last_engine for request in late if request.last_engine is not None})
        if engines:
            where = f"under way on engine {', '.join(map(str, engines))}"
        elif self._router.pause_reasons:
            where = f"waiting: {', '.join(sorted(self._router.pause_reasons))}"
        else:
            states = ", ".join(
                f"{health}: {len(ids)}" for health in Health if (ids := self._supervisor.with_health(health))
            )
            where = f"waiting for an engine ({states})"
        number = f"{len(late)} of {len(requests)} requests were" if len(requests) > 1 else "the request was"
        return f"{number} not answered within generator.request_timeout_seconds={timeout_seconds:g}; {where}"

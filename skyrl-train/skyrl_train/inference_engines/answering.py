"""Requests on their way: each goes to an engine, and on to another one where it was interrupted, until it is answered.

Who goes where is in `routing`, how an answer goes on in `continuation`, which engines live in `supervision`.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from skyrl_train.inference_engines.base import InferenceEngineInput, InferenceEngineOutput
from skyrl_train.inference_engines.continuation import Answer, Ask, Part, joined, next_step
from skyrl_train.inference_engines.health import Health
from skyrl_train.inference_engines.routing import Interrupted, Router, Waiter, Want
from skyrl_train.inference_engines.supervision import EngineFailure, Supervisor

_SECONDS_BEFORE_ASKING_AGAIN = 0.1
"""After an engine took nothing of a request, though nobody here told it to."""


@dataclass(eq=False)
class Request:
    """One prompt of a call of `generate`, until it is answered."""

    prompt: list[int]
    params: dict[str, Any] | None
    seed: Any
    """Its [seed, index], if it has one."""
    want: Want
    lora_name: str | None
    num_aborts_before: int
    ask: Ask
    parts: list[Part] = field(default_factory=list)
    answer: Answer | None = None
    engine: int | None = None
    """Where it is under way, and holds a place of the router's."""
    last_engine: int | None = None
    """Where it was since it last waited."""
    was_interrupted: bool = False


class Answering:
    """Has requests answered.

    Args:
        tokenizer: turns interrupted answers into text.
    """

    def __init__(self, router: Router, supervisor: Supervisor, tokenizer: PreTrainedTokenizerBase):
        self._router = router
        self._supervisor = supervisor
        self._tokenizer = tokenizer
        self.num_aborts = 0
        """How often callers ended all requests there were."""

    def abort(self) -> None:
        """Requests that wait end now, and those under way as soon as their engines let them go."""
        self.num_aborts += 1
        self._router.interrupt()

    async def answer(self, ticket: int, requests: list[Request]) -> None:
        """Waits for engines, asks them, and goes on with what was interrupted."""
        requests = [request for request in requests if not self._was_aborted(request)]
        if not requests:
            return
        for request in requests:
            request.last_engine = None
        waiter: Waiter | None = self._router.ask(ticket, [request.want for request in requests])
        tasks: list[asyncio.Task[None]] = []
        try:
            while waiter is not None:
                grant = await self._router.granted_to(waiter)
                waiter = grant.rest
                groups: list[list[Request]] = []
                for engine, numbers in grant.places.items():
                    for number in numbers:
                        requests[number].engine = requests[number].last_engine = engine
                    groups += _alike(requests[number] for number in numbers)
                if waiter is None and not tasks and len(groups) == 1:
                    await self._answer_together(groups[0], ticket)
                else:
                    tasks += [asyncio.create_task(self._answer_together(group, ticket)) for group in groups]
            await _all_or_first_error(tasks)
        except Interrupted:
            await _all_or_first_error(tasks)
            for request in requests:
                self._was_aborted(request)
        finally:
            self._router.withdraw(waiter)
            for task in tasks:
                task.cancel()
            for request in requests:  # a task that was cancelled before it began gave nothing back
                self._leave(request)

    async def _answer_together(self, requests: list[Request], ticket: int) -> None:
        """One call of the engine that these requests have a place on; then they go on where they must."""
        try:
            unanswered = await self._ask(requests)
        finally:
            for request in requests:
                self._leave(request)
        await self.answer(ticket, unanswered)

    def _leave(self, request: Request) -> None:
        if request.engine is not None:
            self._router.release(request.engine, [request.want])
            request.engine = None

    def _was_aborted(self, request: Request) -> bool:
        """Whether a caller ended this request; it then has what was written as its answer."""
        if request.answer is None and request.num_aborts_before < self.num_aborts:
            request.answer = joined(request.prompt, request.parts, self._decoder(request), "abort")
        return request.answer is not None

    async def _ask(self, requests: list[Request]) -> list[Request]:
        """Asks for the next part of requests that are alike; returns those that are to go on."""
        first = requests[0]
        engine = first.engine
        assert engine is not None
        params = first.ask.sampling_params
        if first.seed is not None:
            params = params | {"seed": [request.seed for request in requests]}
        if "seed" in params and self._supervisor.has_no_seeds(engine):
            params = {name: value for name, value in params.items() if name != "seed"}
        sessions = [request.want.session for request in requests]
        batch = InferenceEngineInput(
            prompt_token_ids=[request.ask.prompt_token_ids for request in requests],
            sampling_params=params or None,
            session_ids=None if None in sessions else sessions,  # pyright: ignore[reportArgumentType]
            lora_name=first.lora_name,
        )
        try:
            output = await self._supervisor.run(engine, lambda present: present.generate(batch))
        except EngineFailure:
            for request in requests:
                request.was_interrupted = True
            return requests
        interrupted = [
            request
            for request, part in zip(requests, _parts(output), strict=True)
            if not self._take(request, part, engine)
        ]
        if any(not request.parts[-1].token_ids for request in interrupted) and not self._router.holds:
            await asyncio.sleep(_SECONDS_BEFORE_ASKING_AGAIN)
        return interrupted

    def _take(self, request: Request, part: Part, engine: int) -> bool:
        """Adds a part to its request; True if that is the whole answer."""
        request.parts.append(part)
        decode = self._decoder(request)
        if part.stop_reason == "abort" and self._was_aborted(request):
            return True
        step = next_step(
            request.prompt, request.params or {}, request.parts, decode, self._supervisor.max_model_len(engine)
        )
        if isinstance(step, Ask):
            request.ask, request.was_interrupted = step, True
            return False
        request.answer = step
        return True

    def _decoder(self, request: Request) -> Callable[[list[int]], str]:
        skip = (request.params or {}).get("skip_special_tokens", True)

        def decode(token_ids: list[int]) -> str:
            text = self._tokenizer.decode(token_ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert isinstance(text, str)
            return text

        return decode

    def what_is_late(self, requests: list[Request], timeout_seconds: float) -> str:
        """For the error of a deadline: how many of these have no answer, and where they are."""
        late = [request for request in requests if request.answer is None]
        under_way = sorted({request.last_engine for request in late if request.last_engine is not None})
        if under_way:
            where = f"under way on engine {', '.join(map(str, under_way))}"
        elif self._router.holds:
            where = f"waiting: {', '.join(sorted(self._router.holds))}"
        else:
            states = ", ".join(
                f"{health}: {len(ids)}" for health in Health if (ids := self._supervisor.with_health(health))
            )
            where = f"waiting for an engine ({states})"
        number = f"{len(late)} of {len(requests)} requests were" if len(requests) > 1 else "the request was"
        return f"{number} not answered within generator.request_timeout_seconds={timeout_seconds:g}; {where}"


def _alike(requests: Iterable[Request]) -> list[list[Request]]:
    """Requests that one call of an engine can take together: all that nothing interrupted yet."""
    groups: dict[tuple[Any, ...], list[Request]] = {}
    for request in requests:
        params = request.ask.sampling_params
        key = (params.get("max_tokens"), params.get("min_tokens"), "prompt_logprobs" in params) if request.parts else ()
        groups.setdefault(key, []).append(request)
    return list(groups.values())


async def _all_or_first_error(tasks: Sequence["asyncio.Task[None]"]) -> None:
    """Waits for all; an error ends the others."""
    if not tasks:
        return
    done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
    errors = [error for task in done if (error := task.exception()) is not None]
    if errors:
        raise errors[0]


def _parts(output: InferenceEngineOutput) -> list[Part]:
    log_probs, of_prompts = output["response_logprobs"], output.get("prompt_logprobs")
    return [
        Part(
            token_ids=token_ids,
            stop_reason=output["stop_reasons"][row],
            weight_versions=output["weight_versions"][row],
            log_probs=None if log_probs is None else log_probs[row],
            text=output["responses"][row],
            prompt_log_probs=None if of_prompts is None else of_prompts[row],
        )
        for row, token_ids in enumerate(output["response_ids"])
    ]

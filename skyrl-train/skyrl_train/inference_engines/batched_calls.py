"""Batching of many callers' requests into few calls to one engine, for transports where a call costs more than a
request. Independent of Ray.

All requests of one event loop tick share a call, and a call returns all outcomes available at that time. At least one
call is in flight while a request is:

    caller      {0: a, 1: b} ──>                     {2: c} ──>                        {} ──>
    engine                      ──> {1: outcome of b}          ──> {0: ..., 2: ...}

Tokens of all streams are returned in the same way, at intervals of at least `TOKENS_EVERY_SECONDS`.
"""

import asyncio
import itertools
from collections import deque
from collections.abc import Awaitable, Callable
from typing import NamedTuple
from uuid import uuid4

from skyrl_train.errors import WorkerError
from skyrl_train.inference_engines.request import Completion, GenerationRequest, OnTokens, TokenDelta, join_deltas

TOKENS_EVERY_SECONDS = 0.1
"""Minimum interval between calls that return only streamed tokens. Tokens are joined meanwhile, because a step of a
small model is much cheaper than a call.
"""


_FORGET_SECONDS = 600.0
"""Time without a call after which a sender counts as crashed: a sender with requests always has a call in flight."""


class SentRequest(NamedTuple):
    """Request sent to an engine."""

    request: GenerationRequest
    is_streamed: bool


class StreamedTokens(NamedTuple):
    """Tokens of an unfinished completion."""

    start: int
    """Number of tokens before them: replies of several calls may arrive out of order."""
    delta: TokenDelta


Requests = dict[int, SentRequest]
Outcomes = dict[int, Completion | Exception | StreamedTokens]
"""Outcomes by request number."""

Generate = Callable[[GenerationRequest, OnTokens | None], Awaitable[Completion]]

Exchange = Callable[[str, Requests, list[int]], Awaitable[Outcomes]]
"""`RequestServer.exchange`, local or remote."""


class _StreamReader:
    """Reader of a stream that reorders its tokens."""

    def __init__(self, on_tokens: OnTokens):
        self._on_tokens = on_tokens
        self._num_tokens = 0
        self._early: dict[int, TokenDelta] = {}

    def take(self, tokens: StreamedTokens) -> None:
        self._early[tokens.start] = tokens.delta
        while (delta := self._early.pop(self._num_tokens, None)) is not None:
            self._num_tokens += len(delta.token_ids)
            self._on_tokens(delta)


class RequestSender:
    """Sender of the requests of one event loop. A failed call or lost reply fails all sent requests, since it may have
    contained any of their outcomes.

    Args:
        exchange: starts a call at once, or raises an error if it cannot be sent.
    """

    def __init__(self, exchange: Exchange):
        self._exchange = exchange
        self._name = uuid4().hex
        self._numbers = itertools.count()
        self._pending: dict[int, asyncio.Future[Completion]] = {}
        self._streams: dict[int, _StreamReader] = {}
        self._new: Requests = {}
        self._withdrawn: list[int] = []
        self._calls: set[asyncio.Task[None]] = set()
        self._is_flush_due = False

    async def send(self, request: GenerationRequest, on_tokens: OnTokens | None = None) -> Completion:
        """Send a request and return its outcome. Cancelling the coroutine cancels the request.

        Args:
            on_tokens: receives the tokens of a stream.
        """
        number = next(self._numbers)
        outcome = self._pending[number] = asyncio.get_running_loop().create_future()
        self._new[number] = SentRequest(request, on_tokens is not None)
        if on_tokens is not None:
            self._streams[number] = _StreamReader(on_tokens)
        self._flush_soon()
        try:
            return await outcome
        finally:
            self._streams.pop(number, None)
            if self._pending.pop(number, None) is not None and self._new.pop(number, None) is None:
                self._withdrawn.append(number)
                self._flush_soon()

    def _flush_soon(self) -> None:
        if not self._is_flush_due:
            self._is_flush_due = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._is_flush_due = False
        new, self._new = self._new, {}
        withdrawn, self._withdrawn = self._withdrawn, []
        if new or withdrawn or (self._pending and not self._calls):
            self._start(new, withdrawn)

    def _start(self, new: Requests, withdrawn: list[int]) -> None:
        try:
            answer = self._exchange(self._name, new, withdrawn)
        except Exception as error:  # pickling a request may raise any error
            alone: list[tuple[Requests, list[int]]] = [({number: request}, []) for number, request in new.items()]
            alone += [({}, withdrawn)] if withdrawn else []
            if len(alone) < 2:
                return self._fail(list(new or self._pending), error)
            for part in alone:  # so that the others do not fail too
                self._start(*part)
            return
        call = asyncio.ensure_future(self._receive(answer, new))
        self._calls.add(call)
        call.add_done_callback(self._handle_end_of_call)

    async def _receive(self, answer: Awaitable[Outcomes], sent: Requests) -> None:
        try:
            outcomes = await answer
        except Exception as error:  # a crashed process, or a reply that cannot be pickled
            return self._fail_sent(error)
        if not outcomes and not sent and len(self._calls) == 1:  # the only call: nothing is in flight
            return self._fail_sent(WorkerError("the engine no longer has these requests"))
        for number, outcome in outcomes.items():
            if isinstance(outcome, StreamedTokens):
                self._take_tokens(number, outcome)
                continue
            waiting = self._pending.pop(number, None)
            if waiting is None or waiting.done():
                continue
            if isinstance(outcome, Exception):
                waiting.set_exception(outcome)
            else:
                waiting.set_result(outcome)

    def _take_tokens(self, number: int, tokens: StreamedTokens) -> None:
        stream = self._streams.get(number)
        if stream is None:
            return
        try:
            stream.take(tokens)
        except Exception as error:  # error of one reader: other streams have tokens in this reply too
            self._withdraw([number])
            self._fail([number], error)

    def _handle_end_of_call(self, call: "asyncio.Task[None]") -> None:
        self._calls.discard(call)
        if self._pending and not self._calls and not call.cancelled():  # cancelled with its loop
            self._flush_soon()

    def _fail_sent(self, error: Exception) -> None:
        sent = [number for number in self._pending if number not in self._new]
        self._withdraw(sent)
        self._fail(sent, error)

    def _withdraw(self, numbers: list[int]) -> None:
        if numbers:
            self._withdrawn += numbers
            self._flush_soon()

    def _fail(self, numbers: list[int], error: Exception) -> None:
        for number in numbers:
            waiting = self._pending.pop(number, None)
            if waiting is not None and not waiting.done():
                waiting.set_exception(error)


class RequestServer:
    """Server of requests batched in calls of many senders, all in one event loop.

    Args:
        generate: completes one request; the second argument receives the tokens of a stream.
    """

    def __init__(self, generate: Generate):
        self._generate = generate
        self._senders: dict[str, _SenderRequests] = {}

    async def exchange(self, sender: str, new: Requests, withdrawn: list[int]) -> Outcomes:
        """Start requests, cancel withdrawn ones, and wait for outcomes of the sender's requests. Returns an empty dict
        if more calls wait than requests run.

        Args:
            sender: name of the sender.
            new, withdrawn: requests by number.
        """
        requests = self._senders.setdefault(sender, _SenderRequests(self._generate))
        self._remove_dead_senders()
        try:
            return await requests.exchange(new, withdrawn)
        finally:
            # Another call of the same tick may have replaced it.
            if not requests.is_in_use and self._senders.get(sender) is requests:
                del self._senders[sender]

    def _remove_dead_senders(self) -> None:
        """Cancel the requests of senders that have exited, since their outcomes cannot be delivered."""
        for name in [name for name, requests in self._senders.items() if requests.is_abandoned]:
            self._senders.pop(name).cancel()


class _SenderRequests:
    """Requests of one sender."""

    def __init__(self, generate: Generate):
        self._generate = generate
        self._running: dict[int, asyncio.Task[None]] = {}
        self._outcomes: Outcomes = {}
        self._withdrawn: set[int] = set()
        """Withdrawn requests that have not arrived yet: small messages may overtake large ones."""
        self._tokens: dict[int, list[TokenDelta]] = {}
        self._num_returned: dict[int, int] = {}
        """Number of returned tokens of each stream."""
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._called, self._returned = asyncio.get_running_loop().time(), float("-inf")
        """Times of the last start or return of a call, and of the last return."""
        self._timer: asyncio.TimerHandle | None = None
        """Timer until tokens may be returned."""
        self._is_leaving = False
        """True while a woken call has not yet taken the outcomes."""

    @property
    def is_in_use(self) -> bool:
        return bool(self._running or self._outcomes or self._waiting or self._withdrawn)

    @property
    def is_abandoned(self) -> bool:
        """True if the sender has not called for a long time."""
        return not self._waiting and asyncio.get_running_loop().time() - self._called > _FORGET_SECONDS

    def cancel(self) -> None:
        for task in self._running.values():
            task.cancel()
        self._running.clear()

    async def exchange(self, new: Requests, withdrawn: list[int]) -> Outcomes:
        self._called = asyncio.get_running_loop().time()
        for number in withdrawn:
            self._remove_tokens(number)
            if task := self._running.pop(number, None):
                task.cancel()
            elif self._outcomes.pop(number, None) is None:
                self._withdrawn.add(number)
        for number in new.keys() & self._withdrawn:
            self._withdrawn.discard(number)
            new = {each: request for each, request in new.items() if each != number}
        for number, request in new.items():
            self._running[number] = asyncio.ensure_future(self._run(number, request))
        woken = asyncio.get_running_loop().create_future()
        self._waiting.append(woken)
        self._wake()
        try:
            await woken
        except asyncio.CancelledError:
            if woken in self._waiting:
                self._waiting.remove(woken)
            else:  # woken already: another call takes the outcomes
                self._is_leaving = False
                self._wake()
            raise
        outcomes, self._outcomes = self._outcomes, {}
        tokens, self._tokens = self._tokens, {}
        self._is_leaving = False
        self._called = self._returned = asyncio.get_running_loop().time()
        return outcomes | {number: self._build_streamed_tokens(number, deltas) for number, deltas in tokens.items()}

    def _build_streamed_tokens(self, number: int, deltas: list[TokenDelta]) -> StreamedTokens:
        delta, start = join_deltas(deltas), self._num_returned.get(number, 0)
        self._num_returned[number] = start + len(delta.token_ids)
        return StreamedTokens(start, delta)

    def _remove_tokens(self, number: int) -> None:
        self._tokens.pop(number, None)
        self._num_returned.pop(number, None)

    async def _run(self, number: int, request: SentRequest) -> None:
        on_tokens = (lambda delta: self._take_tokens(number, delta)) if request.is_streamed else None
        try:
            outcome = await self._generate(request.request, on_tokens)
        except asyncio.CancelledError:
            if number not in self._running:  # withdrawn
                raise
            outcome = WorkerError("the engine cancelled this request")
        except Exception as error:  # raised in the caller
            outcome = error
        if self._running.pop(number, None) is not None:  # else withdrawn
            self._outcomes[number] = outcome
            self._remove_tokens(number)  # the completion has them
            self._wake()

    def _take_tokens(self, number: int, delta: TokenDelta) -> None:
        if number not in self._running:
            return
        self._tokens.setdefault(number, []).append(delta)
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(max(loop.time(), self._returned + TOKENS_EVERY_SECONDS), self._return_tokens)

    def _return_tokens(self) -> None:
        self._timer = None
        self._wake()

    def _wake(self) -> None:
        """Return the oldest call if there are outcomes, and calls in excess of running requests."""
        has_news = self._outcomes or (self._tokens and self._timer is None)
        if has_news and self._waiting and not self._is_leaving:
            self._is_leaving = True
            self._wake_oldest()
        while len(self._waiting) > len(self._running):
            self._wake_oldest()

    def _wake_oldest(self) -> None:
        woken = self._waiting.popleft()
        if not woken.done():
            woken.set_result(None)

"""Requests of many callers in few calls, with an engine that answers when the test says so."""

import asyncio
from typing import Any

import pytest

from skyrl_train.errors import WorkerError
from skyrl_train.inference_engines import batched_calls
from skyrl_train.inference_engines.base import Completion, GenerationRequest, OnTokens, TokenDelta
from skyrl_train.inference_engines.batched_calls import (
    Outcomes,
    Requests,
    RequestSender,
    RequestServer,
    SentRequest,
    StreamedTokens,
    _StreamReader,
)
from skyrl_train.inference_engines.request import join_deltas


class Line:
    """A sender, a server, and the calls between them; a request is a prompt of one token, its answer that token."""

    def __init__(self) -> None:
        self.gates: dict[int, asyncio.Future[None]] = {}
        self.cancelled: list[int] = []
        self.calls: list[tuple[list[int], list[int]]] = []
        """Numbers of new requests, and of outcomes, of every call that returned."""
        self.is_dead = self.loses_replies = False
        self.held: asyncio.Event | None = None
        """Calls wait for it on their way."""
        self.server = RequestServer(self._generate)
        self.sender = RequestSender(self._exchange)

    async def _generate(self, request: GenerationRequest, on_tokens: OnTokens | None) -> Completion:
        [token] = request.prompt_token_ids
        gate = self.gates.setdefault(token, asyncio.get_running_loop().create_future())
        try:
            await gate
        except asyncio.CancelledError:
            self.cancelled.append(token)
            raise
        return Completion([token], "stop", [0])

    def _exchange(self, sender: str, new: Requests, withdrawn: list[int]) -> Any:
        if any(sent.request.lora_name == "cannot be sent" for sent in new.values()):
            raise TypeError("cannot pickle it")
        return self._call(sender, new, withdrawn)

    async def _call(self, sender: str, new: Requests, withdrawn: list[int]) -> Outcomes:
        if self.is_dead:
            raise WorkerError("engine 0 died")
        if self.held is not None:
            await self.held.wait()
        outcomes = await self.server.exchange(sender, new, withdrawn)
        self.calls.append((list(new), list(outcomes)))
        if self.loses_replies:
            raise WorkerError("the reply is lost")
        return outcomes

    def ask(self, token: int, **more: Any) -> "asyncio.Task[Any]":
        return asyncio.ensure_future(self.sender.send(GenerationRequest(prompt_token_ids=[token], **more)))

    def answer(self, *tokens: int) -> None:
        for token in tokens:
            self.gates[token].set_result(None)


async def ticks(count: int = 12) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def token_of(completion: Any) -> int:
    return completion.token_ids[0]


async def test_requests_and_replies_of_same_tick_share_calls():
    line = Line()
    asked = [line.ask(token) for token in range(6)]
    await ticks()
    line.answer(0, 2, 4)
    await ticks()
    assert [token_of(task.result()) for task in asked[::2]] == [0, 2, 4] and not asked[1].done()
    late = line.ask(6)
    await ticks()
    line.answer(6, 1)
    await ticks()
    line.answer(3, 5)
    assert [token_of(output) for output in await asyncio.gather(*asked[1::2], late)] == [1, 3, 5, 6]
    await ticks()
    assert line.calls[0] == ([0, 1, 2, 3, 4, 5], [0, 2, 4])
    assert sorted(number for _, outcomes in line.calls for number in outcomes) == list(range(7))
    assert len(line.calls) <= 5
    assert not line.server._senders  # nothing is left of senders without requests


async def test_sequential_requests_cost_single_call_each():
    line = Line()
    for token in range(3):
        task = line.ask(token)
        await ticks()
        line.answer(token)
        assert token_of(await task) == token
    assert line.calls == [([0], [0]), ([1], [1]), ([2], [2])]


async def test_calls_are_never_more_than_requests():
    line = Line()
    asked = []
    for token in range(8):
        asked.append(line.ask(token))
        await ticks()
    line.answer(*range(0, 4))
    await ticks()
    line.answer(*range(4, 8))
    assert [token_of(output) for output in await asyncio.gather(*asked)] == list(range(8))
    await ticks()
    assert len(line.calls) == 8


async def test_request_error_does_not_affect_others():
    line = Line()
    asked = [line.ask(token) for token in range(3)]
    await ticks()
    line.gates[1].set_exception(ValueError("token 1 is bad"))
    line.answer(0, 2)
    results = await asyncio.gather(*asked, return_exceptions=True)
    assert token_of(results[0]) == 0 and token_of(results[2]) == 2
    assert isinstance(results[1], ValueError) and str(results[1]) == "token 1 is bad"


async def test_unpicklable_request_fails_alone():
    line = Line()
    asked = [line.ask(0), line.ask(1, lora_name="cannot be sent"), line.ask(2)]
    await ticks()
    with pytest.raises(TypeError, match="cannot pickle it"):
        await asked[1]
    line.answer(0, 2)
    assert [token_of(await asked[index]) for index in (0, 2)] == [0, 2]


async def test_cancelled_request_ends_in_engine_and_others_continue():
    line = Line()
    unsent = line.ask(9)
    unsent.cancel()
    asked = [line.ask(token) for token in range(3)]
    await ticks()
    asked[1].cancel()
    await ticks()
    assert line.cancelled == [1] and 9 not in line.gates
    line.answer(0, 2)
    assert [token_of(await asked[index]) for index in (0, 2)] == [0, 2]
    alone = line.ask(5)
    await ticks()
    alone.cancel()
    await ticks()
    assert line.cancelled == [1, 5] and not line.server._senders


async def test_engine_crash_fails_all_pending_requests():
    line = Line()
    asked = [line.ask(token) for token in range(3)]
    await ticks()
    line.is_dead = True
    line.answer(0)  # this call still comes back; the next one, for tokens 1 and 2, finds the engine dead
    results = await asyncio.gather(*asked, return_exceptions=True)
    assert token_of(results[0]) == 0
    assert [str(error) for error in results[1:]] == ["engine 0 died"] * 2
    assert all(isinstance(error, WorkerError) for error in results[1:])


async def test_streams_share_calls_and_wait_for_slow_reader():
    on_tokens: dict[int, OnTokens] = {}
    ends = asyncio.Event()

    async def generate(request: GenerationRequest, take: OnTokens | None) -> Completion:
        [token] = request.prompt_token_ids
        assert take is not None
        on_tokens[token] = take
        await ends.wait()
        return Completion([token] * 30, "length", [0] * 30)

    server, calls = RequestServer(generate), []

    async def exchange(*request: Any) -> Outcomes:
        outcomes = await server.exchange(*request)
        calls.append(outcomes)
        return outcomes

    sender, got = RequestSender(exchange), {token: [] for token in range(3)}
    asked = [
        asyncio.ensure_future(sender.send(GenerationRequest(prompt_token_ids=[token]), got[token].append))
        for token in range(3)
    ]
    await ticks()
    for _ in range(10):
        for token, take in on_tokens.items():
            take(TokenDelta([token], [-1.0], [0]))
        await ticks(1)
    async with asyncio.timeout(20):
        while any(sum(len(delta.token_ids) for delta in deltas) < 10 for deltas in got.values()):
            await asyncio.sleep(0.001)
    for token, deltas in got.items():
        assert join_deltas(deltas) == ([token] * 10, [-1.0] * 10, [0] * 10, None)
    assert len(calls) <= 4 and all(len(outcomes) == 3 for outcomes in calls)
    asked[0].cancel()
    await ticks()
    ends.set()
    assert [token_of(await task) for task in asked[1:]] == [1, 2]
    await ticks()
    assert not server._senders and not sender._streams


async def test_cancellation_and_new_requests_share_call():
    line = Line()
    first = line.ask(0)
    await ticks()
    line.held = asyncio.Event()  # the engine's loop is busy for a moment
    first.cancel()
    await ticks()
    asked = [line.ask(1), line.ask(2)]
    await ticks()
    line.held.set()
    await ticks()
    for task, token in zip(asked, (1, 2), strict=True):
        line.answer(token)
        assert token_of(await task) == token
    await ticks()
    assert not line.server._senders


async def test_cancellation_received_before_request_cancels_it():
    line = Line()
    line.held = asyncio.Event()
    task = line.ask(0)
    await ticks()
    late, line.held = line.held, None
    task.cancel()
    await ticks()
    late.set()
    await ticks()
    assert line.gates == {} and not line.server._senders


async def test_lost_reply_fails_and_cancels_all_requests():
    line = Line()
    asked = [line.ask(0)]
    await ticks()
    asked.append(line.ask(1))
    await ticks()
    line.loses_replies = True
    line.answer(1)
    results = await asyncio.gather(*asked, return_exceptions=True)
    assert [str(result) for result in results] == ["the reply is lost"] * 2
    await ticks()
    assert line.cancelled == [0] and len(line.calls) <= 4


async def test_engine_without_known_requests_raises_error():
    line = Line()
    task = line.ask(0)
    await ticks()
    line.server._senders.clear()
    line.sender._flush_soon()
    [call] = line.sender._calls
    call.cancel()
    await ticks()
    line.sender._start({}, [])
    with pytest.raises(WorkerError, match="no longer has"):
        await task


async def test_request_cancelled_by_engine_raises_error():
    line = Line()
    task = line.ask(0)
    await ticks()
    line.gates[0].cancel()
    with pytest.raises(WorkerError, match="cancelled this request"):
        await task


async def test_tokens_stay_in_order_when_replies_are_reordered():
    got: list[TokenDelta] = []
    stream = _StreamReader(got.append)
    for start, ids in ((2, [3]), (0, [1, 2]), (5, [6]), (3, [4, 5])):
        stream.take(StreamedTokens(start, TokenDelta(ids, None, [0] * len(ids))))
    assert join_deltas(got).token_ids == [1, 2, 3, 4, 5, 6]


async def test_reader_error_ends_only_its_stream():
    line = Line()
    got: list[TokenDelta] = []

    def fail(delta: TokenDelta) -> None:
        raise RuntimeError("the reader fails")

    readers = (fail, got.append)
    asked = [
        asyncio.ensure_future(line.sender.send(GenerationRequest(prompt_token_ids=[token]), reader))
        for token, reader in enumerate(readers)
    ]
    await ticks()
    for number in range(2):
        line.server._senders[line.sender._name]._take_tokens(number, TokenDelta([7], None, [0]))
    with pytest.raises(RuntimeError, match="the reader fails"):
        await asked[0]
    await ticks()
    assert line.cancelled == [0] and join_deltas(got).token_ids == [7]
    line.answer(1)
    assert token_of(await asked[1]) == 1


async def test_requests_of_crashed_sender_are_cancelled(monkeypatch: pytest.MonkeyPatch):
    line = Line()
    sent = {number: SentRequest(GenerationRequest(prompt_token_ids=[number]), False) for number in (1, 2)}
    call = asyncio.ensure_future(line.server.exchange("dead", sent, []))
    await ticks()
    line.answer(1)
    await call
    monkeypatch.setattr(batched_calls, "_FORGET_SECONDS", 0.05)
    await asyncio.sleep(0.1)
    alive = line.ask(3)
    await ticks()
    assert line.cancelled == [2] and len(line.server._senders) == 1
    line.answer(3)
    assert token_of(await alive) == 3

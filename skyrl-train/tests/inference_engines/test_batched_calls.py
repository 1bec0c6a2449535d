"""Requests of many callers in few calls, with an engine that answers when the test says so."""

import asyncio
import pickle
from typing import Any

import pytest

from skyrl_train.errors import WorkerError
from skyrl_train.inference_engines.base import InferenceEngineInput, OnTokens, TokenDelta, join_deltas
from skyrl_train.inference_engines.batched_calls import Outcomes, Requests, RequestSender, RequestServer
from skyrl_train.inference_engines.ray_wrapped_inference_engine import RayWrappedInferenceEngine


class Line:
    """A sender, a server, and the calls between them; a request is a prompt of one token, its answer that token."""

    def __init__(self) -> None:
        self.gates: dict[int, asyncio.Future[None]] = {}
        self.cancelled: list[int] = []
        self.calls: list[tuple[list[int], list[int]]] = []
        """Numbers of new requests, and of outcomes, of every call that returned."""
        self.is_dead = False
        self.server = RequestServer(self._generate)
        self.sender = RequestSender(self._exchange)

    async def _generate(self, input_batch: InferenceEngineInput, on_tokens: OnTokens | None) -> Any:
        [[token]] = input_batch.get("prompt_token_ids") or []
        gate = self.gates.setdefault(token, asyncio.get_running_loop().create_future())
        try:
            await gate
        except asyncio.CancelledError:
            self.cancelled.append(token)
            raise
        return {"response_ids": [[token]]}

    def _exchange(self, sender: str, new: Requests, withdrawn: list[int]) -> Any:
        if any(request.input_batch.get("lora_name") == "cannot be sent" for request in new.values()):
            raise TypeError("cannot pickle it")
        return self._call(sender, new, withdrawn)

    async def _call(self, sender: str, new: Requests, withdrawn: list[int]) -> Outcomes:
        if self.is_dead:
            raise WorkerError("engine 0 died")
        outcomes = await self.server.exchange(sender, new, withdrawn)
        self.calls.append((list(new), list(outcomes)))
        return outcomes

    def ask(self, token: int, **more: Any) -> "asyncio.Task[Any]":
        return asyncio.ensure_future(self.sender.send(InferenceEngineInput(prompt_token_ids=[[token]], **more)))

    def answer(self, *tokens: int) -> None:
        for token in tokens:
            self.gates[token].set_result(None)


async def ticks(count: int = 12) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def token_of(output: Any) -> int:
    return output["response_ids"][0][0]


async def test_requests_of_one_tick_travel_together_and_so_do_their_answers():
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


async def test_requests_one_after_the_other_cost_one_call_each():
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


async def test_the_error_of_a_request_is_its_own():
    line = Line()
    asked = [line.ask(token) for token in range(3)]
    await ticks()
    line.gates[1].set_exception(ValueError("token 1 is bad"))
    line.answer(0, 2)
    results = await asyncio.gather(*asked, return_exceptions=True)
    assert token_of(results[0]) == 0 and token_of(results[2]) == 2
    assert isinstance(results[1], ValueError) and str(results[1]) == "token 1 is bad"


async def test_a_request_that_cannot_be_sent_fails_alone():
    line = Line()
    asked = [line.ask(0), line.ask(1, lora_name="cannot be sent"), line.ask(2)]
    await ticks()
    with pytest.raises(TypeError, match="cannot pickle it"):
        await asked[1]
    line.answer(0, 2)
    assert [token_of(await asked[index]) for index in (0, 2)] == [0, 2]


async def test_a_cancelled_request_ends_in_the_engine_and_the_others_go_on():
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


async def test_the_death_of_an_engine_fails_every_request_also_one_whose_call_has_returned():
    line = Line()
    asked = [line.ask(token) for token in range(3)]
    await ticks()
    line.is_dead = True
    line.answer(0)  # this call still comes back; the next one, for tokens 1 and 2, finds the engine dead
    results = await asyncio.gather(*asked, return_exceptions=True)
    assert token_of(results[0]) == 0
    assert [str(error) for error in results[1:]] == ["engine 0 died"] * 2
    assert all(isinstance(error, WorkerError) for error in results[1:])


async def test_tokens_of_all_streams_come_together_and_wait_for_a_slow_reader():
    on_tokens: dict[int, OnTokens] = {}
    ends = asyncio.Event()

    async def generate(input_batch: InferenceEngineInput, take: OnTokens | None) -> Any:
        [[token]] = input_batch.get("prompt_token_ids") or []
        assert take is not None
        on_tokens[token] = take
        await ends.wait()
        return {"response_ids": [[token] * 30]}

    server, calls = RequestServer(generate), []

    async def exchange(*request: Any) -> Outcomes:
        outcomes = await server.exchange(*request)
        calls.append(outcomes)
        return outcomes

    sender, got = RequestSender(exchange), {token: [] for token in range(3)}
    asked = [
        asyncio.ensure_future(sender.send(InferenceEngineInput(prompt_token_ids=[[token]]), got[token].append))
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
    assert not server._senders and not sender._on_tokens


def test_a_handle_travels_to_the_ranks_that_send_weights():
    """They get it in the first weight sync, when it has sent requests already."""
    handle = RayWrappedInferenceEngine(None, "engine 0", "engine.log", 300)
    loop = asyncio.new_event_loop()
    handle._senders[loop] = RequestSender(handle._exchange)
    copied = pickle.loads(pickle.dumps(handle))
    assert copied.name == "engine 0" and len(copied._senders) == 0 and len(handle._senders) == 1
    loop.close()

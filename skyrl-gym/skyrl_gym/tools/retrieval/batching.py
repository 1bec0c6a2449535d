"""Queries that arrive while others are searched are searched together next: a model reads many at the price of few.

No query waits for others: one that meets an idle index is searched at once.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, NamedTuple, TypeVar

T = TypeVar("T")


class Overloaded(Exception):
    """More queries wait than can be answered in reasonable time."""


class _Waiting(NamedTuple):
    queries: Sequence[str]
    topk: int
    answer: "asyncio.Future[Any]"


class Batcher(Generic[T]):
    """One index, asked by many tasks of one event loop, searched by one thread."""

    def __init__(
        self, search: Callable[[Sequence[str], int], list[list[T]]], batch_size: int, max_waiting: int = 4096
    ) -> None:
        """
        Args:
            search: queries and a number -> for each query at most that many answers, the best first.
            batch_size: queries worth searching together.
            max_waiting: queries that may wait.
        """
        self._search = search
        self._batch_size = batch_size
        self._max_waiting = max_waiting
        self._waiting: deque[_Waiting] = deque()
        self._num_waiting = 0
        self._arrived = asyncio.Event()

    async def search(self, queries: Sequence[str], topk: int) -> list[list[T]]:
        """Return at most `topk` answers to each query, the best first. Raises Overloaded and errors of the search."""
        if self._num_waiting + len(queries) > self._max_waiting:
            raise Overloaded(f"{self._num_waiting} queries are waiting")
        # No lock: queue and count change between two awaits, in the event loop alone; the thread only searches.
        answer = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(queries, topk, answer))
        self._num_waiting += len(queries)
        self._arrived.set()
        return await answer

    async def run(self) -> None:
        """Search, until cancelled."""
        with ThreadPoolExecutor(1, thread_name_prefix="retrieval") as thread:
            while True:
                await self._arrived.wait()
                # Cleared before the queue is read, not after: a query that arrives during a search sets it again.
                self._arrived.clear()
                while batch := self._next_batch():
                    await self._answer(batch, thread)

    def _next_batch(self) -> list[_Waiting]:
        """Requests in the order of arrival, with about as many queries as are worth it."""
        batch: list[_Waiting] = []
        num_queries = 0
        while self._waiting and (not batch or num_queries + len(self._waiting[0].queries) <= self._batch_size):
            request = self._waiting.popleft()
            self._num_waiting -= len(request.queries)
            if not request.answer.done():  # otherwise the caller has disconnected
                batch.append(request)
                num_queries += len(request.queries)
        return batch

    async def _answer(self, batch: list[_Waiting], thread: ThreadPoolExecutor) -> None:
        queries = [query for request in batch for query in request.queries]
        # One search for all: it finds as many as the greediest request wants, and each gets its own number of them.
        topk = max(request.topk for request in batch)
        loop = asyncio.get_running_loop()
        try:
            found = iter(await loop.run_in_executor(thread, self._search, queries, topk))
        except Exception as failure:  # belongs to those who asked, and the next batch may do better
            for request in batch:
                if not request.answer.done():
                    request.answer.set_exception(failure)
            return
        for request in batch:
            hits = [next(found)[: request.topk] for _ in request.queries]
            if not request.answer.done():
                request.answer.set_result(hits)

"""Fifteen tenants who make all the trouble that a tenant can make, until they are told to stop."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import numpy as np
from plain_client import Client, Failed, Model, Refused
from random_data import LOSSES, VOCABULARY, data_of

from tx.tinker.types import Datum


class Neighbour:
    """Tenant whose actions follow from its number; `num_done` counts actions with the intended result."""

    def __init__(self, client: Client, number: int):
        self._client, self._number = client, number
        self.num_done = 0

    @property
    def habit(self) -> str:
        return ("trains", "samples", "fails", "explodes", "comes and goes")[self._number % 5]

    async def live(self) -> None:
        turn = {
            "trains": self._train,
            "samples": self._sample,
            "fails": self._fail,
            "explodes": self._explode,
            "comes and goes": self._come_and_go,
        }[self.habit]
        session = await self._client.session()
        lora = {"rank": (1, 3, 8, 16, 33)[self._number % 4], "seed": self._number, "train_mlp": self._number % 2 == 0}
        models, number = [], 0
        while True:
            if not models:
                models.append(await Model.new(self._client, "tiny", session_id=session, number=number, **lora))
                number += 1
            if not await turn(models[0]):
                models.clear()
            self.num_done += 1

    def _data(self, i: int) -> tuple[str, list[Datum]]:
        draw = np.random.default_rng([self._number, i])
        loss = LOSSES[(self._number + i) % len(LOSSES)]
        lengths = draw.integers(1, 1 + (3, 30, 200)[i % 3], size=draw.integers(1, 9)).tolist()
        return loss, data_of(loss, lengths, i)

    async def _train(self, model: Model) -> bool:
        loss, data = self._data(self.num_done)
        asked = [await model.train(data, loss), await model.train(data[:1], loss), await model.step(learning_rate=0.01)]
        await asyncio.gather(*map(self._client.fetch, asked))
        return True

    async def _sample(self, model: Model) -> bool:
        saving, sampler = await model.save_for_sampler()
        await self._client.fetch(saving)
        prompts = [[7] * (1 + (self.num_done * 37 + 11 * j) % 200) for j in range(4)]
        asked = [
            await model.sample(sampler, j, prompt, 1 + j, max_tokens=10 + 20 * j, stop=[], temperature=0.5 + j)
            for j, prompt in enumerate(prompts)
        ]
        await asyncio.gather(*map(self._client.fetch, asked))
        return await self._train(model)

    async def _fail(self, model: Model) -> bool:
        """Refused at the door, all of it."""
        loss, data = self._data(self.num_done)
        nan, foreign = data_of("ppo", [5, 9], 0), data_of("cross_entropy", [5], 1)
        nan[1].inputs["advantages"][3] = np.nan
        foreign[0].tokens[0] = VOCABULARY
        for bad in (
            partial(model.train, nan, "ppo"),
            partial(model.train, foreign),
            partial(model.train, [], "cross_entropy"),
            partial(model.train, data, loss, nonsense=1.0),
            partial(model.step, learning_rate=-1.0),
            partial(model.load, "never saved", optimizer=True),
            partial(model.sample, "no such sampler", 0, [5]),
        ):
            try:
                await bad()
            except Refused:
                continue
            raise AssertionError(f"a bad request was accepted: {bad}")
        return await self._train(model)

    async def _explode(self, model: Model) -> bool:
        """A learning rate at which the weights leave what float32 can hold; its losses are its own affair."""
        for _ in range(3):
            for asked in (await model.train(data_of("cross_entropy", [20], 0)), await model.step(learning_rate=1e30)):
                try:
                    await self._client.fetch(asked)
                except Failed as error:
                    assert error.category == "user", error
        saving, sampler = await model.save_for_sampler()
        try:
            await self._client.fetch(saving)
            await self._client.fetch(await model.sample(sampler, 0, [5, 6], 2, max_tokens=8))
        except Failed as error:
            assert error.category == "user", error
        return False

    async def _come_and_go(self, model: Model) -> bool:
        loss, data = self._data(self.num_done)
        await model.train(data, loss)  # not awaited
        await model.unload()
        return False


@asynccontextmanager
async def neighbours(url: str, keys: list[str]) -> AsyncIterator[list[Neighbour]]:
    """Run other tenants, all of which have done something when the block begins. Their errors are raised at its end."""
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(Client(url, key)) for key in keys]
        crowd = [Neighbour(client, i) for i, client in enumerate(clients)]
        tasks = [asyncio.create_task(one.live(), name=f"{i} {one.habit}") for i, one in enumerate(crowd)]
        try:
            while not all(one.num_done for one in crowd) and not any(task.done() for task in tasks):
                await asyncio.sleep(0.05)
            if not any(task.done() for task in tasks):
                yield crowd
        finally:
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
    wrong = {task.get_name(): error for task, error in zip(tasks, ended, strict=True) if error is not None}
    wrong = {name: error for name, error in wrong.items() if not isinstance(error, asyncio.CancelledError)}
    assert not wrong, wrong

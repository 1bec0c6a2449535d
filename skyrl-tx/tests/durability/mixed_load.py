"""Everything a training script asks of a server, as a story that is the same each time it is told to an undisturbed
server: passes that arrive in the wrong order, steps, refusals, steps that are not finite, samplers and samples,
checkpoints saved and loaded. Several calls are under way at any time.
"""

import asyncio
import json
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from plain_client import Client, Failed, Model, Refused, present
from random_data import data_of

from tx.tinker.wire.codec import decode_pass_output, decode_sample_output

LOSSES = ("cross_entropy", "ppo", "importance_sampling")
MAX_UNDER_WAY = 8


@dataclass
class Story:
    """Responses that one user received, by request: without ids of this server, so that two servers can be compared."""

    told: dict[str, Any] = field(default_factory=dict)
    saved: list[str] = field(default_factory=list)
    """Names of checkpoints."""
    model_id: str = ""


class User:
    def __init__(self, client: Client, number: int):
        self._client, self._number = client, number
        self._loss = LOSSES[number % len(LOSSES)]
        self._under_way: list[asyncio.Task[None]] = []
        self.story = Story()

    async def live(self, rounds: int) -> Story:
        session = await self._client.session()
        async with present(self._client, session):
            lora = {"rank": 4 * (self._number + 1), "seed": self._number}
            model = await Model.new(self._client, "tiny", session_id=session, **lora)
            self.story.model_id = model.model_id
            for i in range(rounds):
                await self._round(model, i)
            await self._until_under_way(0)
            await self._read_log_tail(model)
        return self.story

    async def _round(self, model: Model, i: int) -> None:
        draw = np.random.default_rng([self._number, i])
        lengths = [[int(n) for n in draw.integers(1, 80, size=3)], [60] * 40 if i % 3 == 0 else [5, 90]]
        bodies = [model.pass_body(data_of(self._loss, each, 100 * i + j), self._loss) for j, each in enumerate(lengths)]
        for j in (1, 0):  # the SDK sends the first chunk of a batch last
            asked = await self._client.post("forward_backward", bodies[j])
            await self._later(self._pass(f"pass {i}.{j}", asked["request_id"]))
        await self._later(self._json(f"step {i}", await model.step(learning_rate=0.01, weight_decay=0.01 * i)))
        if i % 5 == 1:
            await self._refused(f"refused {i}", model.step(learning_rate=-1.0))
            await self._refused(f"no such checkpoint {i}", model.load("never", optimizer=False))
        if i % 6 == 2:  # what it would have used stays for the next round's step
            await self._later(self._pass(f"kept {i}", await model.train(data_of("cross_entropy", [30], i))))
            await self._later(self._json(f"impossible step {i}", await model.step(learning_rate=1e30)))
        if i % 6 == 3:
            data = data_of("cross_entropy", [4], i)
            data[0].inputs["weights"][:] = 3e38
            await self._later(self._pass(f"too steep {i}", await model.train(data)))
            await self._later(self._json(f"no step {i}", await model.step(learning_rate=0.1)))
        if i % 2 == 0:
            saving, sampler = await model.save_for_sampler()
            await self._later(self._samples(model, f"samples {i}", saving, sampler))
        if i % 4 == 2:
            name = f"round-{i}"
            self.story.saved.append(name)
            await self._later(self._json(f"save {i}", await model.save(name)))
        if i % 4 == 3:
            loading = await model.load(self.story.saved[-1], optimizer=i % 8 == 3)
            await self._later(self._json(f"load {i}", loading))

    async def _read_log_tail(self, model: Model) -> None:
        probe = data_of("cross_entropy", [40, 3, 17], 1)
        await self._pass("probe", await model.train(probe, forward_only=True))
        saving, sampler = await model.save_for_sampler()
        await self._samples(model, "last samples", saving, sampler)
        self.story.saved.append("last")
        await self._json("last save", await model.save("last"))

    # ---- one thing each

    async def _pass(self, name: str, request_id: str) -> None:
        output = decode_pass_output(await self._client.fetch(request_id))
        self.story.told[name] = (repr(sorted(output.metrics.items())), [array.tobytes() for array in output.logprobs])

    async def _json(self, name: str, request_id: str) -> None:
        try:
            told = json.loads(await self._client.fetch(request_id))
        except Failed as error:
            told = str(error.args[0]).removeprefix(request_id)
        self.story.told[name] = repr(told).replace(self.story.model_id, "MODEL")

    async def _refused(self, name: str, asking: Coroutine[Any, Any, str]) -> None:
        try:
            self.story.told[name] = await asking
        except Refused as error:
            self.story.told[name] = error.status

    async def _samples(self, model: Model, name: str, saving: str, sampler: str) -> None:
        told = json.loads(await self._client.fetch(saving))
        assert told["sampling_session_id"] == sampler
        prompts = [[5, 6, 7], [40] * 30, list(range(4, 90))]
        asked = [
            await model.sample(sampler, seq, prompt, 2, seed=seq, max_tokens=24, temperature=0.7 * seq)
            for seq, prompt in enumerate(prompts)
        ]
        for seq, request_id in enumerate(asked):
            output = decode_sample_output(await self._client.fetch(request_id))
            self.story.told[f"{name}.{seq}"] = repr(output.sequences)

    # ---- several under way

    async def _later(self, work: Coroutine[Any, Any, None]) -> None:
        self._under_way.append(asyncio.create_task(work))
        await self._until_under_way(MAX_UNDER_WAY)

    async def _until_under_way(self, at_most: int) -> None:
        while len(self._under_way) > at_most:
            await self._under_way.pop(0)


async def tell_all(clients: list[Client], rounds: int) -> list[Story]:
    """All users at once. The first error ends it."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(User(client, i).live(rounds)) for i, client in enumerate(clients)]
    return [task.result() for task in tasks]

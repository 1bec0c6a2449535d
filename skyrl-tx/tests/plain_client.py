"""A user of a server over plain HTTP, who tries again as the SDK does: what is lost on the way is sent once more, byte
for byte; what is refused is not."""

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

from tx.tinker.types import Datum
from tx.tinker.wire.codec import TrainingRequest, encode_training

PROTOBUF = "application/x-protobuf"
PATIENCE_SECONDS = 300.0
"""The SDK's."""
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 1.0
"""Seconds; the SDK waits longer, and tests are in a hurry."""
HEARTBEAT_SECONDS = 10.0


class Refused(Exception):
    """4xx: no use to try it again."""

    def __init__(self, path: str, status: int, text: str):
        super().__init__(f"{path}: {status} {text}")
        self.status = status


class Failed(Exception):
    """The request was accepted and could not be done."""

    def __init__(self, request_id: str, error: str, category: str):
        super().__init__(f"{request_id}: {category}: {error}")
        self.category = category


class Client:
    """Client of one tenant.

    Attributes:
        num_resent: requests that were sent once more
        results: request id -> bytes of every result that was fetched
        sampler_numbers: of all its sessions, so that none comes twice in one
    """

    def __init__(self, url: str, key: str | None = None):
        headers = {"X-API-Key": key} if key else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=20)
        self._http = httpx.AsyncClient(base_url=f"{url}/api/v1", headers=headers, timeout=60, limits=limits)
        self.num_resent = 0
        self.results: dict[str, bytes] = {}
        self.sampler_numbers = itertools.count()

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def get(self, path: str) -> httpx.Response:
        return await self._poll_until_answered("GET", path)

    async def post(self, path: str, body: dict[str, Any] | bytes) -> dict[str, Any]:
        """Raises Refused."""
        return (await self._poll_until_answered("POST", path, **_content(body))).json()

    async def fetch(self, request_id: str) -> bytes:
        """Waits for a result; passes and samples come as protobuf.

        Raises:
            Failed, Refused
        """
        while True:
            content = _content({"request_id": request_id})
            content["headers"] |= {"Accept": PROTOBUF}
            answer = await self._poll_until_answered("POST", "retrieve_future", poll=True, **content)
            if answer.status_code == 408:
                continue
            if answer.headers["content-type"] != PROTOBUF and "error" in (said := answer.json()):
                raise Failed(request_id, said["error"], said["category"])
            self.results[request_id] = answer.content
            return answer.content

    async def call(self, path: str, body: dict[str, Any] | bytes) -> bytes:
        """Asks, and waits for the result."""
        return await self.fetch((await self.post(path, body))["request_id"])

    async def session(self) -> str:
        return (await self.post("create_session", {"tags": [], "sdk_version": "0.38.0"}))["session_id"]

    async def stay(self, session_id: str) -> None:
        """Heartbeats for ever."""
        while True:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            await self.post("session_heartbeat", {"session_id": session_id})

    async def _poll_until_answered(
        self, method: str, path: str, *, poll: bool = False, **content: Any
    ) -> httpx.Response:
        deadline, pause = time.monotonic() + PATIENCE_SECONDS, FIRST_PAUSE
        while True:
            trouble = "no answer"
            try:
                answer = await self._http.request(method, path, **content)
            except httpx.TransportError as error:
                trouble = repr(error)
            else:
                status = answer.status_code
                if status < 300 or (poll and status == 408):
                    return answer
                if status not in (408, 409, 429) and status < 500:
                    raise Refused(path, status, answer.text)
                trouble = f"{status} {answer.text}"
            assert time.monotonic() < deadline, f"{path}: still {trouble} after {PATIENCE_SECONDS:g} s"
            self.num_resent += 1
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)


@asynccontextmanager
async def present(client: Client, session_id: str) -> AsyncIterator[None]:
    """Keep a session alive during the block."""
    beating = asyncio.create_task(client.stay(session_id))
    try:
        yield
    finally:
        beating.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await beating


class Model:
    """An adapter in training: its id and its counters. Every method asks and returns the request's id."""

    def __init__(self, client: Client, session_id: str, model_id: str):
        self.client, self.session_id, self.model_id = client, session_id, model_id
        self._seq = 0

    @classmethod
    async def new(cls, client: Client, base_model: str, *, number: int = 0, session_id: str = "", **lora: Any):
        """A model of a new session, if none is given."""
        session_id = session_id or await client.session()
        body = {"session_id": session_id, "model_seq_id": number, "base_model": base_model, "lora_config": lora}
        await client.call("create_model", body)
        return cls(client, session_id, f"{session_id}:train:{number}")

    def next_seq(self) -> int:
        self._seq += 1
        return self._seq

    def pass_body(
        self, data: list[Datum], loss_fn: str = "cross_entropy", *, forward_only: bool = False, **config: float
    ) -> bytes:
        """Make the body of a pass, with the next seq."""
        return encode_training(TrainingRequest(self.model_id, self.next_seq(), data, loss_fn, config, forward_only))

    async def train(self, data: list[Datum], loss_fn: str = "cross_entropy", **more: Any) -> str:
        return await self._ask("forward_backward", self.pass_body(data, loss_fn, **more))

    async def step(self, **adam: float) -> str:
        return await self._ask("optim_step", self._body(adam_params=adam))

    async def save(self, name: str) -> str:
        return await self._ask("save_weights", self._body(path=name))

    async def load(self, name: str, *, optimizer: bool) -> str:
        path = f"tinker://{self.model_id}/weights/{name}"
        return await self._ask("load_weights", self._body(path=path, optimizer=optimizer))

    async def save_for_sampler(self) -> tuple[str, str]:
        """Save weights for sampling. Returns the request's id, and that of the future sampler."""
        number = next(self.client.sampler_numbers)
        request_id = await self._ask("save_weights_for_sampler", self._body(sampling_session_seq_id=number))
        return request_id, f"{self.session_id}:sample:{number}"

    async def sample(
        self,
        sampler: str,
        seq: int,
        prompt: list[int],
        num_samples: int = 1,
        prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
        **params: Any,
    ) -> str:
        body = {"sampling_session_id": sampler, "seq_id": seq, "num_samples": num_samples}
        body |= {"prompt": {"chunks": [{"type": "encoded_text", "tokens": prompt}]}, "prompt_logprobs": prompt_logprobs}
        body["topk_prompt_logprobs"] = topk_prompt_logprobs
        return await self._ask("asample", body | {"sampling_params": params})

    async def unload(self) -> None:
        await self.client.call("unload_model", {"model_id": self.model_id})

    def _body(self, **body: Any) -> dict[str, Any]:
        return {"model_id": self.model_id, "seq_id": self.next_seq()} | body

    async def _ask(self, path: str, body: dict[str, Any] | bytes) -> str:
        return (await self.client.post(path, body))["request_id"]


def _content(body: dict[str, Any] | bytes) -> dict[str, Any]:
    if isinstance(body, bytes):
        return {"content": body, "headers": {"Content-Type": PROTOBUF}}
    return {"json": body, "headers": {}}

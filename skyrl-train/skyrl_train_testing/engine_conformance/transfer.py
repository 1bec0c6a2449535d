"""Weights into an engine by the trainer's own sender, and transfers that go wrong on purpose."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from skyrl_train.distributed.process_group import find_free_port
from skyrl_train.inference_engines.base import InferenceEngineInterface
from skyrl_train.weight_sync.base import (
    Encoding,
    EngineHandles,
    Transport,
    WeightReport,
    WeightUpdateRequest,
    WeightUpdates,
)
from skyrl_train.weight_sync.plan import Route, init_infos_for
from skyrl_train.weight_sync.sender import SyncResult, WeightSender, needs_staging

Tamper = Callable[[WeightUpdateRequest], Sequence[WeightUpdateRequest]]
"""Function from a bucket's request to those that the engine gets in its place; none: the bucket is lost."""


@dataclass
class EnginesHere(EngineHandles):
    """Engines of this process. The sender blocks, so it runs in a thread.

    Attributes:
        loop: the engines' event loop.
        tamper: see `Tamper`. None: no fault.
    """

    engines: Sequence[InferenceEngineInterface]
    loop: asyncio.AbstractEventLoop
    timeout_seconds: float
    tamper: Tamper | None = None

    def __post_init__(self) -> None:
        self.num_engines = len(self.engines)

    def call_each(self, method: Callable[..., object], args: Sequence[Any]) -> list["Future[Any]"]:
        if method is not WeightUpdates.update_named_weights or self.tamper is None:
            return super().call_each(method, args)
        return [self.start(index, method, sent) for index, arg in enumerate(args) for sent in self.tamper(arg)]

    def wait(self, calls: list["Future[Any]"]) -> list[Any]:
        return [call.result(self.timeout_seconds) for call in calls]

    def start(self, index: int, method: Callable[..., object], *args: object) -> "Future[Any]":
        call: Coroutine[Any, Any, Any] = getattr(self.engines[index], method.__name__)(*args)
        return asyncio.run_coroutine_threadsafe(call, self.loop)


class WeightPath:
    """The sender to one engine, connected when first used.

    Args:
        engine: gets the weights.
        transport, encoding: the way they take.
        dtype: what they are cast to first, as the trainer does.
        directory: for what travels by files.
        max_bucket_bytes: small enough for several buckets, so that they have an order.
    """

    def __init__(
        self,
        engine: InferenceEngineInterface,
        transport: Transport,
        encoding: Encoding,
        *,
        dtype: torch.dtype,
        directory: Path,
        timeout_seconds: float,
        max_bucket_bytes: int,
    ):
        self._transport: Transport = transport
        self._encoding: Encoding = encoding
        self._dtype = dtype
        self._directory = directory
        self._max_bucket_bytes = max_bucket_bytes
        self._timeout_seconds = timeout_seconds
        self._engine = engine
        self._is_staged = False
        self._sender: WeightSender | None = None
        self._handles: EnginesHere | None = None

    async def send(
        self, weights: Mapping[str, torch.Tensor], version: int, tamper: Tamper | None = None
    ) -> WeightReport:
        """The engine's report, which the sender has compared with what it sent.

        Raises:
            WeightSyncError: they differ, or the transfer failed.
        """
        if self._sender is None:
            self._handles = EnginesHere([self._engine], asyncio.get_running_loop(), self._timeout_seconds)
            infos = init_infos_for(
                [Route(self._transport, self._encoding)],
                [await self._engine.describe()],
                backend="gloo",
                master_address="127.0.0.1",
                master_port=find_free_port(),
                directory=str(self._directory),
                verification="sampled",
            )
            self._is_staged = needs_staging(infos[0])
            self._sender = await asyncio.to_thread(self._connect, infos)
        assert self._handles is not None
        self._handles.loop = asyncio.get_running_loop()
        self._handles.tamper = tamper
        try:
            result = await asyncio.to_thread(self._send, self._sender, weights, version)
        finally:
            self._handles.tamper = None
        [report] = result.reports
        return report

    async def close(self) -> None:
        if self._sender is not None:
            await asyncio.to_thread(self._sender.close)
            self._sender = None

    def _connect(self, infos: Sequence[Any]) -> WeightSender:
        assert self._handles is not None
        return WeightSender(
            self._handles,
            infos,
            torch.device("cpu"),
            max_bucket_bytes=self._max_bucket_bytes,
            verification="sampled",
        )

    def _send(self, sender: WeightSender, weights: Mapping[str, torch.Tensor], version: int) -> SyncResult:
        cast = ((name, tensor.detach().to(self._dtype)) for name, tensor in weights.items())
        if not self._is_staged:
            return sender.send(cast, version)
        sender.stage(cast, version)
        return sender.send(None, version)

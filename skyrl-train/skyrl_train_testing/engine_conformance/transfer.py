"""Weights into an engine by the trainer's own sender, and transfers that go wrong on purpose."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from skyrl_train.distributed.process_group import find_free_port
from skyrl_train.inference_engines.base import InferenceEngineInterface
from skyrl_train.weight_sync.base import (
    Encoding,
    Transport,
    WeightReport,
    WeightSyncInitInfo,
    WeightUpdateRequest,
    WeightUpdates,
)
from skyrl_train.weight_sync.plan import Route, init_infos_for
from skyrl_train.weight_sync.sender import WeightSender
from skyrl_train_testing.weight_sources import RanksInThreads, TensorSource

Tamper = Callable[[WeightUpdateRequest], Sequence[WeightUpdateRequest]]
"""Function from a bucket's request to those that the engine gets in its place; none: the bucket is lost."""


class TamperingEngine(WeightUpdates):
    """An engine behind a way that loses or changes buckets.

    Attributes:
        tamper: see `Tamper`. None: nothing goes wrong.
    """

    def __init__(self, engine: InferenceEngineInterface, timeout_seconds: float):
        self._engine, self._timeout_seconds = engine, timeout_seconds
        self.tamper: Tamper | None = None

    async def weight_version(self) -> int:
        return await self._engine.weight_version()

    async def init_weight_update_communicator(self, init_info: WeightSyncInitInfo) -> None:
        async with asyncio.timeout(self._timeout_seconds):
            await self._engine.init_weight_update_communicator(init_info)

    async def update_named_weights(self, request: WeightUpdateRequest) -> None:
        async with asyncio.timeout(self._timeout_seconds):
            for sent in [request] if self.tamper is None else self.tamper(request):
                await self._engine.update_named_weights(sent)

    async def finish_weight_update(self, version: int) -> WeightReport:
        async with asyncio.timeout(self._timeout_seconds):
            return await self._engine.finish_weight_update(version)


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
        self._source = TensorSource(max_bucket_bytes)
        self._describe = engine.describe
        self._engine = TamperingEngine(engine, timeout_seconds)
        self._sender: WeightSender | None = None

    async def send(
        self, weights: Mapping[str, torch.Tensor], version: int, tamper: Tamper | None = None
    ) -> WeightReport:
        """The engine's report, which the sender has compared with what it sent.

        Raises:
            WeightSyncError: they differ, or the transfer failed.
        """
        if self._sender is None:
            infos = init_infos_for(
                [Route(self._transport, self._encoding)],
                [await self._describe()],
                backend="gloo",
                master_address="127.0.0.1",
                master_port=find_free_port(),
                directory=str(self._directory),
                verification="sampled",
            )
            self._sender = WeightSender(RanksInThreads([self._source]), [self._engine], infos)
            await self._sender.connect()
        self._source.tensors = ((name, tensor.detach().to(self._dtype)) for name, tensor in weights.items())
        self._engine.tamper = tamper
        if self._sender.is_staged:
            await self._sender.stage(version)
        [report] = (await self._sender.send(version)).reports
        return report

    async def close(self) -> None:
        await asyncio.to_thread(self._source.close)
        self._sender = None

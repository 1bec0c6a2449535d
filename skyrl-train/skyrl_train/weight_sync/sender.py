"""Commander of a weight sync, in the driver: calls the policy ranks, which write buckets of parameters, and the
engines, which read them; compares what the engines hold with what was sent.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, Protocol, TypeVar, TypeVarTuple

from loguru import logger

from skyrl_train.errors import SkyRLError, WeightSyncError
from skyrl_train.weight_sync.base import (
    WeightReport,
    WeightSource,
    WeightSyncInitInfo,
    WeightUpdateRequest,
    WeightUpdates,
    WrittenBucket,
    needs_staging,
)
from skyrl_train.weight_sync.fingerprint import differences, some_of
from skyrl_train.weight_sync.payload import num_bytes_of

Args = TypeVarTuple("Args")
T = TypeVar("T")

_GRACE_SECONDS = 2.0
"""Time after an abort for engines that wait for bytes of the failed sync to end their call."""


class PolicyRanks(Protocol):
    """Ranks of the policy, each a `WeightSource` (`ActorGroup`)."""

    num_ranks: int

    async def call_all(self, method: Callable[[Any, *Args], T], *args: *Args) -> list[T]:
        """Call a method on every rank. Returns the results in rank order."""
        ...

    def reserve(self) -> AbstractAsyncContextManager[None]:
        """Delay the calls of other tasks until the block ends: no optimizer step changes parameters meanwhile."""
        ...


@dataclass(frozen=True, kw_only=True)
class SyncResult:
    """Result of a sync that every engine has verified."""

    metrics: dict[str, float]
    """`bytes` of the tensors, `payload_bytes` that travelled to each engine, `buckets`, and `<phase>_seconds`."""
    reports: list[WeightReport]
    """Report of each engine about its weights."""
    fingerprints: dict[str, int]
    """Fingerprint of each tensor that was sent; none without verification."""


class WeightSender:
    """Sender of the policy's weights to engines, with verification. A failed `send` may be repeated completely; after a
    failure that broke a process group or lost an engine, by a new sender.

    Args:
        policy: all ranks of the policy.
        engines: the engines that receive the weights.
        init_infos: connection of each engine (`skyrl_train.weight_sync.plan.init_infos_for`).
    """

    def __init__(self, policy: PolicyRanks, engines: Sequence[WeightUpdates], init_infos: Sequence[WeightSyncInitInfo]):
        self._policy = policy
        self._engines = list(engines)
        self._init_infos = list(init_infos)
        self.is_staged = needs_staging(init_infos[0])
        """Whether `stage` does part of the work before generation pauses."""
        self._stage_seconds = 0.0
        self._staged_version: int | None = None
        self._held_version: int | None = None  # the version of every engine, if known
        self._received_only: set[str] | None = None  # state of the engines' reports that was logged last

    async def connect(self) -> None:
        """Connect the ranks and the engines, replacing earlier connections. Raises WeightSyncError."""
        # First, since a group waits long for a crashed engine.
        await self._call_engines("before it began", [engine.weight_version() for engine in self._engines])
        await self._policy.call_all(WeightSource.connect_engines, self._init_infos)
        joining = zip(self._engines, self._init_infos, strict=True)
        await self._call_engines(
            "while the engines joined", [engine.init_weight_update_communicator(info) for engine, info in joining]
        )

    async def stage(self, version: int) -> None:
        """Do the work that needs no engine, if `is_staged`: write files, encode.

        Raises:
            WeightSyncError: the files cannot be written.
        """
        if not self.is_staged:
            raise ValueError("this connection has no stage: call `send` alone")
        began, index = perf_counter(), 0
        self._staged_version = None
        async with self._policy.reserve():
            while any(await self._policy.call_all(WeightSource.stage_bucket, version, index)):
                index += 1
        self._staged_version = version
        self._stage_seconds = perf_counter() - began

    async def send(self, version: int) -> SyncResult:
        """Send the parameters (the staged ones, if `is_staged`) to every engine, which then switches to `version`.

        Raises:
            WeightSyncError: an engine failed, or has other weights than the trainer; names engine and tensors.
            WorkerError: a rank failed.
        """
        if self.is_staged and self._staged_version != version:
            raise ValueError(f"version {version} is to be sent, but version {self._staged_version} was staged")
        # Unknown until the sync ends: after a failure no delta may be sent.
        held, self._held_version = self._held_version, None
        sync = _Sync(dict.fromkeys(("write", "wait", "fingerprint", "finish"), 0.0), {}, {})
        began = perf_counter()
        async with self._policy.reserve():
            try:
                await self._send_buckets(sync, version, held)
                finishing = perf_counter()
                reports = await self._call_engines(
                    f"at the end of version {version}",
                    [engine.finish_weight_update(version) for engine in self._engines],
                )
                sync.seconds["finish"] = perf_counter() - finishing
            except BaseException:
                await self._abort()
                raise
            self._check(reports, sync.fingerprints, version)
            await self._policy.call_all(WeightSource.finish_sync, version)
        self._held_version = version
        if self.is_staged:
            sync.seconds["stage"] = self._stage_seconds
        seconds = {f"{phase}_seconds": value for phase, value in sync.seconds.items()}
        is_verified = self._init_infos[0].verification != "off"
        shares = self._compute_read_shares(reports, sync.sizes) if is_verified else {}
        sums = {
            "bytes": float(sum(sync.sizes.values())),
            "payload_bytes": float(sync.payload_bytes),
            "buckets": float(sync.num_buckets),
        }
        metrics = sums | seconds | shares | {"send_seconds": perf_counter() - began}
        return SyncResult(metrics=metrics, reports=reports, fingerprints=sync.fingerprints)

    # ---- one sync

    async def _send_buckets(self, sync: "_Sync", version: int, held_version: int | None) -> None:
        """Send every bucket to every engine, one at a time, since the order of concurrent calls is undefined. While the
        engines read a bucket, the ranks write the next one."""
        written = await self._write_bucket(sync, version, 0, held_version)
        while (request := written[0].request) is not None:
            sync.count(request)
            requests = [_locate(info, written) for info in self._init_infos]
            reading = self._read_bucket(requests)
            writing = self._write_bucket(sync, version, request.index + 1, held_version)
            # Both to the end: a failed engine must not cut off a collective of the ranks.
            read_at, answers = await asyncio.gather(reading, writing, return_exceptions=True)
            if isinstance(read_at, BaseException):
                raise read_at
            if isinstance(answers, BaseException):
                raise answers
            sync.seconds["wait"] += max(0.0, read_at - sync.written_at)
            written = answers

    async def _write_bucket(
        self, sync: "_Sync", version: int, index: int, held_version: int | None
    ) -> list[WrittenBucket]:
        written = await self._policy.call_all(WeightSource.write_bucket, version, index, held_version)
        sync.written_at = perf_counter()
        sync.fingerprints |= written[0].fingerprints
        sync.seconds["write"] += max(each.write_seconds for each in written)
        sync.seconds["fingerprint"] += written[0].fingerprint_seconds
        return written

    async def _read_bucket(self, requests: list[WeightUpdateRequest]) -> float:
        """Return when all engines had read it."""
        calls = zip(self._engines, requests, strict=True)
        what = f"at {requests[0].describe()}"
        await self._call_engines(what, [engine.update_named_weights(request) for engine, request in calls])
        return perf_counter()

    async def _call_engines(self, what: str, calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
        """Return the engines' results.

        Raises:
            WeightSyncError: an engine failed; names it.
        """
        tasks = [asyncio.ensure_future(call) for call in calls]
        try:
            done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            if pending:  # members of a process group wait for bytes, which the failed one no longer receives
                await self._abort()
                await asyncio.wait(pending, timeout=_GRACE_SECONDS)
        finally:
            for task in tasks:
                task.cancel()
        for index, task in enumerate(tasks):
            if task in done and (error := task.exception()) is not None:
                # A handle's error names its engine; a server may fail with any error.
                name = "" if isinstance(error, SkyRLError) else f"engine {index}: {type(error).__name__}: "
                raise WeightSyncError(f"weight sync failed {what}: {name}{error}") from error
        return [task.result() for task in tasks]

    async def _abort(self) -> None:
        with suppress(SkyRLError):  # a rank that is gone; the error that led here is raised
            await self._policy.call_all(WeightSource.abort_sync)

    def _check(self, reports: Sequence[WeightReport], expected: dict[str, int], version: int) -> None:
        wrong = [
            f"engine {index} is at version {report.version}"
            if report.version != version
            else f"engine {index}{self._describe_source(index)}: {found}"
            for index, report in enumerate(reports)
            if (found := _describe_wrong(report, expected)) or report.version != version
        ]
        if wrong:
            raise WeightSyncError(
                f"after the sync of version {version} engines hold other weights than the trainer. {'. '.join(wrong)}. "
                "Do both load the same model, and does the engine compute in generator.model_dtype?"
            )

    def _describe_source(self, index: int) -> str:
        """Name the policy ranks that send to an engine, if the policy has several ranks."""
        if self._policy.num_ranks == 1:
            return ""
        return f" (weights of policy rank {', '.join(map(str, self._init_infos[index].sources))})"

    def _compute_read_shares(self, reports: Sequence[WeightReport], sizes: dict[str, int]) -> dict[str, float]:
        """Compute the minimum over engines of the fractions of verified bytes: `held_share` of the bytes are readable
        in their engine in the form used for computation; of these, `read_share` were read at this sync."""
        unread = [sum(sizes.get(name, 0) for name in report.received_only) for report in reports]
        read = [report.read_bytes / report.held_bytes for report in reports if report.held_bytes]
        shares = {"held_share": 1.0 - max(unread, default=0) / max(1, sum(sizes.values()))}
        shares |= {"read_share": min(read)} if read else {}
        received_only = {name for report in reports for name in report.received_only}
        if received_only != self._received_only:
            self._received_only = received_only
            logger.info(_describe_shares(shares, received_only))
        return shares


@dataclass
class _Sync:
    """Sums over the buckets of one sync."""

    seconds: dict[str, float]
    """Seconds of each phase."""
    fingerprints: dict[str, int]
    sizes: dict[str, int]
    """Bytes of each tensor."""
    payload_bytes: int = 0
    num_buckets: int = 0
    written_at: float = 0.0
    """Time when the last bucket was written."""

    def count(self, request: WeightUpdateRequest) -> None:
        self.sizes |= zip(request.names, map(num_bytes_of, request.dtypes, request.shapes), strict=True)
        self.payload_bytes += request.num_bytes
        self.num_buckets += 1


def _locate(info: WeightSyncInitInfo, written: Sequence[WrittenBucket]) -> WeightUpdateRequest:
    """Return the request to one engine, with the location of the bucket on the ranks that the engine reads from."""
    sources = [request for rank in info.sources if (request := written[rank].request) is not None]
    # An engine may have processes on several GPUs: each selects the handle of its GPU.
    handles = {gpu: handle for request in sources for gpu, handle in request.handles.items()}
    return replace(sources[0], handles=handles)


def _describe_wrong(report: WeightReport, expected: dict[str, int]) -> str:
    """Describe the errors in an engine's weights by tensor name; empty if all are correct."""
    computed = ""
    if report.wrong:
        processes = ", ".join(sorted({process for processes in report.wrong.values() for process in processes}))
        computed = (
            f"{some_of(report.wrong)} arrived, but {processes} computes with other numbers (or they are not finite)"
        )
    return "; ".join(filter(None, [differences(expected, report.fingerprints), computed]))


def _describe_shares(shares: dict[str, float], received_only: set[str]) -> str:
    text = f"verified weights: {shares['held_share']:.1%} of the bytes are read from what engines compute with"
    if shares.get("read_share", 1.0) < 1:
        text += f", {shares['read_share']:.1%} of them at this sync and the others at the next ones"
    if not received_only:
        return text
    return (
        f"{text}. {len(received_only)} tensors ({some_of(sorted(received_only))}) are kept in a form that cannot be "
        "read: they are verified as received, and by log-probs (generator.weight_sync_canary_interval)"
    )

"""Trainer side of weight sync: sends parameters to every engine and verifies them.

Parameters are gathered few at a time and sent in buckets. While the engines read one bucket, the next is written:
memory in addition to the models is one bucket being gathered, one being written, one being read.
"""

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from loguru import logger

from skyrl_train.errors import SkyRLError, WeightSyncError
from skyrl_train.weight_sync.base import EngineHandles, Place, WeightReport, WeightSyncInitInfo, WeightUpdates
from skyrl_train.weight_sync.fingerprint import Verification, differences, fingerprints_of, some_of
from skyrl_train.weight_sync.lockstep import PolicyRanks, in_lockstep
from skyrl_train.weight_sync.payload import NamedTensor, Payload, most_bytes_of, num_bytes_of, payloads_of
from skyrl_train.weight_sync.staging import CheckpointStage, DeltaStage
from skyrl_train.weight_sync.writer import RankWriter, place_for


@dataclass(frozen=True, kw_only=True)
class SyncResult:
    """Result of a sync that every engine has verified."""

    metrics: dict[str, float]
    """`bytes` of the tensors, `payload_bytes` that travelled to each engine, `buckets`, and `<phase>_seconds`."""
    reports: list[WeightReport]
    """Report of each engine about its weights."""
    fingerprints: dict[str, int]
    """Fingerprint of each tensor that was sent; none without verification."""


def needs_staging(init_info: WeightSyncInitInfo) -> bool:
    """Return True if `WeightSender.stage` can do part of the work before generation pauses: write files, encode."""
    return init_info.encoding == "delta" or init_info.transport == "checkpoint"


class WeightSender:
    """Sender of a model's weights to all engines, with verification. A failed `send` may be repeated completely; after
    a failure that broke a process group or lost an engine, by a new sender.

    Used on rank 0 of the policy. Other ranks have a `RankPart`, and make the same calls of `stage` and `send`.

    Args:
        engines: all engines that receive the weights.
        init_infos: connection of each engine (`skyrl_train.weight_sync.plan.init_infos_for`).
        device: device of the parameters.
        ranks: ranks of the policy.
        max_bucket_bytes: limit of the memory of a sync. A bucket has at most a quarter of it: one is gathered, one
            written, one read.
        verification: bytes read by the engines' fingerprints; `off`: nothing is compared.

    Raises:
        WeightSyncError: no connection to an engine.
    """

    def __init__(
        self,
        engines: EngineHandles,
        init_infos: Sequence[WeightSyncInitInfo],
        device: torch.device,
        ranks: PolicyRanks | None = None,
        *,
        max_bucket_bytes: int,
        verification: Verification,
    ):
        if verification != init_infos[0].verification:
            raise ValueError(f"verification is {verification!r} here, {init_infos[0].verification!r} to the engines")
        self._engines = engines
        self._init_infos = list(init_infos)
        self._ranks = ranks or PolicyRanks()
        self._most_bytes = most_bytes_of(init_infos[0], max_bucket_bytes)
        self._verification: Verification = verification
        # One thread: a process group must send buckets in the order expected by the engines.
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="weight-sync")
        self._receiving: list[Any] = []  # the engines' pending calls for the current bucket
        self._receiving_what = ""
        self._transmission: Future[None] | None = None
        self._seconds: dict[str, float] = {}
        self._sizes: dict[str, int] = {}  # bytes of the tensors of the last sync
        self._received_only: set[str] | None = None  # state of the engines' reports that was logged last
        self._held: int | None = None  # the version of every engine, if known
        self._stage = _stage(init_infos[0])
        self._stage_seconds = 0.0
        self._staged_version: int | None = None
        self._staged_fingerprints: dict[str, int] = {}
        self._writer: RankWriter | None = None
        try:
            self._open_connections(device)
        except WeightSyncError:
            self.close()
            raise

    def stage(self, tensors: Iterable[NamedTensor], version: int) -> None:
        """Do the work that needs no engine, if `needs_staging`: write files, encode.

        Raises:
            WeightSyncError: the files cannot be written.
        """
        stage = self._stage
        if stage is None:
            raise ValueError("this way of weights has no stage; give the tensors to `send`")
        began = perf_counter()
        self._staged_version, self._staged_fingerprints = None, {}

        def prepare(payload: Payload, index: int) -> Place:
            if index == 0:
                stage.begin(version)  # may fail, which is sent to the other ranks with the first bucket
            stage.add(payload)
            self._staged_fingerprints |= fingerprints_of(payload.bucket, version, self._verification)
            return Place()

        in_lockstep(self._ranks, payloads_of(tensors, self._most_bytes), prepare)
        stage.end(version)
        self._staged_version = version
        self._stage_seconds = perf_counter() - began

    def send(self, tensors: Iterable[NamedTensor] | None, version: int) -> SyncResult:
        """Send the tensors to every engine, which then switches to `version`.

        Args:
            tensors: parameters; None: the staged tensors.

        Raises:
            WeightSyncError: an engine failed, or has other weights than the trainer; names engine and tensors.
        """
        if self._stage is not None and tensors is not None:
            self.stage(tensors, version)
        # Unknown until the sync ends: after a failure no delta may be sent.
        held, self._held = self._held, None
        self._seconds = dict.fromkeys(("write", "wait", "fingerprint", "finish"), 0.0)
        began = perf_counter()
        sums, expected = self._send_buckets(tensors, version, held)
        with self._measure_phase("finish"):
            finishing = self._engines.call_all(WeightUpdates.finish_weight_update, version)
            reports: list[WeightReport] = self._wait(finishing, f"at the end of version {version}")
        if self._stage is not None:
            self._seconds["stage"], expected = self._stage_seconds, self._staged_fingerprints
        self._check(reports, expected, version)
        self._held = version
        if self._writer is not None:
            self._writer.finish(version)
        seconds = {f"{phase}_seconds": value for phase, value in self._seconds.items()}
        shares = {} if self._verification == "off" else self._compute_read_shares(reports)
        metrics = sums | seconds | shares | {"send_seconds": perf_counter() - began}
        return SyncResult(metrics=metrics, reports=reports, fingerprints=expected)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        if self._stage is not None:
            self._stage.close()
        self._threads.shutdown(wait=False)

    def _open_connections(self, device: torch.device) -> None:
        engines = self._engines
        # First, since a group waits long for a crashed engine.
        self._wait(engines.call_all(WeightUpdates.weight_version), "before it began")
        # Joining a group blocks both sides until the other joins: engines are called first, without waiting.
        joining = engines.call_each(WeightUpdates.init_weight_update_communicator, self._init_infos)
        meeting = self._threads.submit(RankWriter, self._init_infos, self._ranks.rank, device)
        self._wait(joining, "while the engines joined")
        self._writer = meeting.result()

    # ---- one sync

    def _send_buckets(
        self, tensors: Iterable[NamedTensor] | None, version: int, held: int | None
    ) -> tuple[dict[str, float], dict[str, int]]:
        """Send every bucket to every engine, one at a time, since the order of concurrent calls is undefined. Returns
        metrics and the fingerprints of the tensors sent."""
        writer = self._writer
        assert writer is not None
        sums = {"bytes": 0.0, "payload_bytes": 0.0, "buckets": 0.0}
        self._sizes = {}
        expected: dict[str, int] = {}

        def prepare(payload: Payload, index: int) -> Place:
            with self._measure_phase("write"):
                # Written while the engines still read the previous bucket (two slots).
                place = writer.write(payload, version, index)
            # After the following exchange, other ranks overwrite the bytes that were read.
            self._wait_for_bucket()
            return place

        def announce(payload: Payload, index: int, places: list[Place]) -> None:
            requests = [
                payload.request(version=version, index=index, **place_for(info, places)) for info in self._init_infos
            ]
            self._receiving_what = f"at {payload.name(version, index)}"
            self._receiving = self._engines.call_each(WeightUpdates.update_named_weights, requests)
            # Concurrently with the fingerprints: broadcasting is bound by the network, hashing by the processor.
            self._transmission = self._threads.submit(writer.transmit, requests[0])
            with self._measure_phase("fingerprint"):
                expected.update(fingerprints_of(payload.bucket, version, self._verification))
            self._sizes |= zip(payload.names, map(num_bytes_of, payload.dtypes, payload.shapes), strict=True)
            sums["payload_bytes"] += payload.num_bytes
            sums["buckets"] += 1

        if self._stage is None:
            if tensors is None:
                raise ValueError("nothing was staged; give the tensors to `send`")
            in_lockstep(self._ranks, payloads_of(tensors, self._most_bytes), prepare, announce)
        else:
            if self._staged_version != version:
                raise ValueError(f"version {version} is to be sent, but {self._staged_version} was staged")
            in_lockstep(PolicyRanks(), self._stage.payloads(held), prepare, announce)  # only on rank 0
        self._wait_for_bucket()
        sums["bytes"] = float(sum(self._sizes.values()))
        return sums, expected

    def _wait_for_bucket(self) -> None:
        if self._transmission is None:
            return
        with self._measure_phase("wait"):
            self._wait(self._receiving, self._receiving_what)
            transmission, self._transmission = self._transmission, None
            transmission.result()

    def _wait(self, calls: list[Any], what: str) -> list[Any]:
        """Return the engines' results.

        Raises:
            WeightSyncError: an engine failed; names it.
        """
        try:
            return self._engines.wait(calls)
        except (SkyRLError, OSError) as error:  # a TimeoutError is an OSError
            self._transmission = None
            if self._writer is not None:
                self._writer.abort()
            raise WeightSyncError(f"weight sync failed {what}: {error or type(error).__name__}") from error

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
        if self._ranks.world_size == 1:
            return ""
        return f" (weights of policy rank {', '.join(map(str, self._init_infos[index].sources))})"

    def _compute_read_shares(self, reports: Sequence[WeightReport]) -> dict[str, float]:
        """Compute the minimum over engines of the fractions of verified bytes: `held_share` of the bytes are readable
        in their engine in the form used for computation; of these, `read_share` were read at this sync."""
        total = sum(self._sizes.values())
        unread = [sum(self._sizes.get(name, 0) for name in report.received_only) for report in reports]
        read = [report.read_bytes / report.held_bytes for report in reports if report.held_bytes]
        shares = {"held_share": 1.0 - max(unread, default=0) / max(1, total)}
        shares |= {"read_share": min(read)} if read else {}
        received_only = {name for report in reports for name in report.received_only}
        if received_only != self._received_only:
            self._received_only = received_only
            logger.info(_describe_shares(shares, received_only))
        return shares

    @contextmanager
    def _measure_phase(self, phase: str) -> Iterator[None]:
        began = perf_counter()
        try:
            yield
        finally:
            self._seconds[phase] += perf_counter() - began


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
    words = f"proof of weight syncs: {shares['held_share']:.1%} of the bytes are read from what engines compute with"
    if shares.get("read_share", 1.0) < 1:
        words += f", {shares['read_share']:.1%} of them at this sync and others at the next ones"
    if not received_only:
        return words
    return (
        f"{words}. {len(received_only)} tensors ({some_of(sorted(received_only))}) are kept in a form that cannot be "
        "read: they are proven as received, and by log-probs (generator.weight_sync_canary_interval)"
    )


def _stage(init_info: WeightSyncInitInfo) -> DeltaStage | CheckpointStage | None:
    if init_info.encoding == "delta":
        return DeltaStage(init_info.directory)
    return CheckpointStage(init_info.directory) if init_info.transport == "checkpoint" else None

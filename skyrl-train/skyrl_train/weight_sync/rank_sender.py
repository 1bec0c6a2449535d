"""A policy rank's part in a weight sync: gathers the parameters with the other ranks, and writes them in buckets for
the engines that read from this rank. `sender.WeightSender` calls all ranks and the engines.

While the engines read one bucket, the next is written: memory in addition to the models is one bucket being gathered,
one whose fingerprints are computed, one being written, one being read.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from time import perf_counter

import torch

from skyrl_gym.deadline import outcome_of
from skyrl_train.weight_sync.base import WeightSyncInitInfo, WeightUpdateRequest, WrittenBucket, needs_staging
from skyrl_train.weight_sync.fingerprint import Verification, fingerprints_of
from skyrl_train.weight_sync.payload import NamedTensor, Payload, most_bytes_of, payloads_of
from skyrl_train.weight_sync.staging import CheckpointStage, DeltaStage
from skyrl_train.weight_sync.writer import RankWriter

Parameters = Callable[[], Iterable[NamedTensor]]
"""Yields every parameter, few at a time and in the same order on every rank. A collective."""


class RankSender:
    """Sender of one policy rank. Rank 0 also stages, and computes the fingerprints. Every method is called on all ranks
    at once; an error of one rank is raised after the collectives that it shares with the others.

    Args:
        init_infos: connection of each engine (`skyrl_train.weight_sync.plan.init_infos_for`).
        rank: this rank, in the driver's numbering.
        device: device of the parameters.
        max_bucket_bytes: limit of the memory of a sync. A bucket has at most a quarter of it.
    """

    def __init__(
        self,
        init_infos: Sequence[WeightSyncInitInfo],
        rank: int,
        device: torch.device,
        parameters: Parameters,
        *,
        max_bucket_bytes: int,
    ):
        self._rank = rank
        self._parameters = parameters
        self._most_bytes = most_bytes_of(init_infos[0], max_bucket_bytes)
        self._verification: Verification = init_infos[0].verification
        self._is_staged = needs_staging(init_infos[0])
        self._stage = _make_stage(init_infos[0]) if self._is_staged and rank == 0 else None
        self._staged_fingerprints: dict[str, int] = {}
        self._payloads: Iterator[Payload] = iter(())
        self._previous: tuple[Payload, WeightUpdateRequest] | None = None
        self._transmissions: deque[Future[None]] = deque()  # of the last two buckets
        self._hashes: deque[Future[tuple[dict[str, int], float]]] = deque()  # fingerprints and their seconds
        self._hashing = ThreadPoolExecutor(1, thread_name_prefix="weight-fingerprints")
        # One thread: a process group must send buckets in the order expected by the engines.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weight-sync")
        # Joining a group blocks until the engines join as well, which they do while this rank returns to the driver.
        self._writer: Future[RankWriter] = self._thread.submit(RankWriter, init_infos, rank, device)

    def stage_bucket(self, version: int, index: int) -> bool:
        """See `WeightSource.stage_bucket`."""
        if index == 0:
            self._payloads, self._staged_fingerprints = payloads_of(self._parameters(), self._most_bytes), {}
        payload = next(self._payloads, None)  # a collective, so before anything that may fail on this rank alone
        stage = self._stage
        if stage is not None:
            if index == 0:
                stage.begin(version)
            if payload is None:
                stage.end(version)
            else:
                stage.add(payload)
                self._staged_fingerprints |= fingerprints_of(payload.bucket, version, self._verification)
        return payload is not None

    def write_bucket(self, version: int, index: int, held_version: int | None) -> WrittenBucket:
        """See `WeightSource.write_bucket`."""
        if index == 0:
            self._payloads = self._begin(held_version)
        failure = outcome_of(self._transmit_previous, version)
        payload = next(self._payloads, None)  # a collective, so before errors of this rank are raised
        if isinstance(failure, Exception):
            raise failure
        began = perf_counter()
        request = None
        if payload is not None:
            while len(self._transmissions) > 1:  # the one before last: its memory is written now
                self._transmissions.popleft().result()
            place = self._writer.result().write(payload, version, index)
            request = payload.request(version=version, index=index, **place)
            self._previous = payload, request
        write_seconds = perf_counter() - began
        fingerprints, fingerprint_seconds = self._take_fingerprints(all_of_them=payload is None)
        if payload is None and self._is_staged:
            fingerprints = self._staged_fingerprints
        return WrittenBucket(
            request=request,
            fingerprints=fingerprints,
            write_seconds=write_seconds,
            fingerprint_seconds=fingerprint_seconds,
        )

    def finish(self, version: int) -> None:
        """See `WeightSource.finish_sync`."""
        while self._transmissions:
            self._transmissions.popleft().result()
        self._writer.result().finish(version)

    def abort(self) -> None:
        """End the sync: engines that wait for bytes of this rank fail. Another sync may follow, by a new sender if this
        one is a member of a process group."""
        self._payloads, self._previous = iter(()), None
        self._transmissions.clear()
        self._hashes.clear()
        if self._writer.done() and self._writer.exception() is None:
            self._writer.result().abort()

    def close(self) -> None:
        """Release memory and connections, which engines may be reading."""
        self._payloads, self._previous = iter(()), None
        self._writer.add_done_callback(_close_writer)  # it may still wait for engines to join
        if self._stage is not None:
            self._stage.close()
        self._thread.shutdown(wait=False)
        self._hashing.shutdown(wait=False)

    def _begin(self, held_version: int | None) -> Iterator[Payload]:
        self._previous = None
        self._transmissions.clear()
        self._hashes.clear()
        if not self._is_staged:
            return payloads_of(self._parameters(), self._most_bytes)
        return iter(()) if self._stage is None else self._stage.payloads(held_version)

    def _transmit_previous(self, version: int) -> None:
        """Send the previous bucket, which the engines have been notified of, and compute its fingerprints, on rank 0;
        both in threads."""
        if self._previous is None:
            return
        (payload, request), self._previous = self._previous, None
        self._transmissions.append(self._thread.submit(self._writer.result().transmit, request))
        if not self._rank:
            self._hashes.append(self._hashing.submit(self._compute_fingerprints, payload, version))

    def _compute_fingerprints(self, payload: Payload, version: int) -> tuple[dict[str, int], float]:
        began = perf_counter()
        return fingerprints_of(payload.bucket, version, self._verification), perf_counter() - began

    def _take_fingerprints(self, *, all_of_them: bool) -> tuple[dict[str, int], float]:
        """Return the fingerprints that are computed, and their seconds: all, or all but the last bucket's, so
        that no more than one bucket waits for its own."""
        fingerprints: dict[str, int] = {}
        seconds = 0.0
        while len(self._hashes) > (0 if all_of_them else 1):
            found, own_seconds = self._hashes.popleft().result()
            fingerprints |= found
            seconds += own_seconds
        return fingerprints, seconds


def _close_writer(writer: "Future[RankWriter]") -> None:
    if not writer.cancelled() and writer.exception() is None:
        writer.result().close()


def _make_stage(init_info: WeightSyncInitInfo) -> DeltaStage | CheckpointStage:
    return (DeltaStage if init_info.encoding == "delta" else CheckpointStage)(init_info.directory)

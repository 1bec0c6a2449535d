"""Every fault that is planted between the real sender and a real receiver is caught, and a clean run never alarms."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from skyrl_train.errors import WeightSyncError
from skyrl_train.weight_sync.base import WeightReport, WeightUpdateRequest
from skyrl_train.weight_sync.fingerprint import num_turns
from skyrl_train_testing.weight_holders import WeightHolder

WAYS = [
    ("shared_memory", "full"),
    ("broadcast", "full"),
    ("checkpoint", "full"),
    ("shared_memory", "delta"),
    ("broadcast", "delta"),
    ("checkpoint", "delta"),
]
every_way = pytest.mark.parametrize("ways", WAYS, ids="-".join)
# Of tensors as small as these `sampled` reads every byte, as `full` does.
every_verification = pytest.mark.parametrize("verification", ["sampled", pytest.param("full", marks=pytest.mark.full)])
TENSOR_BYTES = 40 * 40 * 2
FAULTY_VERSION = 3


def parameters() -> list[tuple[str, torch.Tensor]]:
    """Six bfloat16 matrices of 40 x 40."""
    torch.manual_seed(0)
    return [(f"p{index}", torch.randn(40, 40).bfloat16()) for index in range(6)]


def step(weights: list[tuple[str, torch.Tensor]], version: int) -> None:
    """Change a twentieth of every tensor."""
    for _, tensor in weights:
        tensor.view(-1)[version % 20 :: 20] += 1


class FaultyHolder(WeightHolder):
    """An engine at the end of a transport with a fault, from `FAULTY_VERSION` on. Subclasses say which."""

    def update_named_weights(self, request: WeightUpdateRequest) -> None:
        if request.version < FAULTY_VERSION:
            self.remember(request)
            super().update_named_weights(request)
        else:
            self.update_faulty(request)

    def remember(self, request: WeightUpdateRequest) -> None:
        """Record what precedes the fault."""

    def update_faulty(self, request: WeightUpdateRequest) -> None:
        raise NotImplementedError

    def update(self, request: WeightUpdateRequest) -> None:
        super().update_named_weights(request)

    def update_with(self, request: WeightUpdateRequest, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Receive a bucket whose bytes are altered on their way."""
        assert self.receiver is not None
        reader = self.receiver._reader
        self.receiver._reader = AlteringReader(reader, change)
        try:
            self.update(request)
        finally:
            self.receiver._reader = reader


class AlteringReader:
    def __init__(self, reader: Any, change: Callable[[torch.Tensor], torch.Tensor]):
        self._reader, self._change = reader, change

    def read(self, request: WeightUpdateRequest) -> torch.Tensor:
        return self._change(self._reader.read(request).clone())

    def close(self) -> None: ...


class Dropped(FaultyHolder):
    """A bucket comes (a broadcast needs every member), and is lost."""

    index = 1

    def update_faulty(self, request: WeightUpdateRequest) -> None:
        if request.index != self.index:
            return self.update(request)
        assert self.receiver is not None
        self.receiver._reader.read(request)


class DroppedFirst(Dropped):
    index = 0


class DroppedLast(Dropped):
    index = 2


class DroppedUnnoticed(DroppedLast):
    """The engine's own check of names is lost with the bucket."""

    def update_faulty(self, request: WeightUpdateRequest) -> None:
        assert self.receiver is not None
        self.receiver._names_before = None
        super().update_faulty(request)


class Swapped(FaultyHolder):
    """Two tensors of one shape change places."""

    def update_faulty(self, request: WeightUpdateRequest) -> None:
        self.update(request)
        if request.index == 0:
            first, second = (self.parameters[name] for name in request.names)
            kept = first.clone()
            first.copy_(second)
            second.copy_(kept)


class Renamed(FaultyHolder):
    """The request names two tensors of one shape the other way round."""

    def update_faulty(self, request: WeightUpdateRequest) -> None:
        self.update(replace(request, names=request.names[::-1]) if request.index == 0 else request)


class ReplayedBytes(FaultyHolder):
    """The bytes of the version before come once more."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.old: dict[int, torch.Tensor] = {}

    def remember(self, request: WeightUpdateRequest) -> None:
        assert self.receiver is not None
        self.receiver._reader = RecordingReader(self.receiver._reader, self.old)

    def update_faulty(self, request: WeightUpdateRequest) -> None:
        self.update_with(request, lambda flat: self.old[1] if request.index == 1 else flat)


class RecordingReader(AlteringReader):
    def __init__(self, reader: Any, store: dict[int, torch.Tensor]):
        self._reader = reader._reader if isinstance(reader, RecordingReader) else reader
        self._store = store

    def read(self, request: WeightUpdateRequest) -> torch.Tensor:
        flat = self._reader.read(request)
        if request.version < FAULTY_VERSION:
            self._store[request.index] = flat.clone()
        return flat

    def close(self) -> None:
        self._reader.close()


class ReplayedRequest(ReplayedBytes):
    """A bucket of the version before comes once more, request and all."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.requests: dict[int, WeightUpdateRequest] = {}

    def remember(self, request: WeightUpdateRequest) -> None:
        super().remember(request)
        self.requests[request.index] = request

    def update_faulty(self, request: WeightUpdateRequest) -> None:
        if request.index != 1:
            return self.update(request)
        assert self.receiver is not None
        self.receiver._reader.read(request)
        return self.update_with(self.requests[1], lambda flat: self.old[1])


class Truncated(FaultyHolder):
    def update_faulty(self, request: WeightUpdateRequest) -> None:
        self.update_with(request, lambda flat: flat[:-1] if request.index == 1 else flat)


class Announced(FaultyHolder):
    """The request announces fewer bytes than its tensors have."""

    def update_faulty(self, request: WeightUpdateRequest) -> None:
        self.update_with(
            replace(request, num_bytes=request.num_bytes - 2), lambda flat: flat
        ) if request.index == 2 else self.update(request)


class FlippedBit(FaultyHolder):
    def update_faulty(self, request: WeightUpdateRequest) -> None:
        def flip(flat: torch.Tensor) -> torch.Tensor:
            flat[len(flat) // 2] ^= 4
            return flat

        self.update_with(request, flip if request.index == 2 else lambda flat: flat)


class FlippedInPlace(FaultyHolder):
    """The bytes arrive as they were; the engine's memory does not keep them."""

    def update_faulty(self, request: WeightUpdateRequest) -> None:
        self.update(request)
        self.parameters[request.names[0]].view(torch.int16)[7, 7] ^= 1


class WrongDtype(FaultyHolder):
    """Numbers of the right size, read as another format."""

    def update_faulty(self, request: WeightUpdateRequest) -> None:
        self.update(replace(request, dtypes=["float16"] * len(request)) if request.index == 1 else request)


class Converted(FaultyHolder):
    """The engine holds another format than it was sent."""

    def update_faulty(self, request: WeightUpdateRequest) -> None:
        self.parameters = {name: tensor.float() for name, tensor in self.parameters.items()}
        self.update(request)


class Transposed(FaultyHolder):
    def update_faulty(self, request: WeightUpdateRequest) -> None:
        self.update(request)
        self.parameters[request.names[0]].copy_(self.parameters[request.names[0]].t().clone())


class Stale(FaultyHolder):
    """One tensor keeps its old values, as where a loader does not know what to do with it."""

    def update_faulty(self, request: WeightUpdateRequest) -> None:
        kept = self.parameters["p3"].clone()
        self.update(request)
        self.parameters["p3"].copy_(kept)


class Repeated(FaultyHolder):
    """A bucket comes twice."""

    def update_faulty(self, request: WeightUpdateRequest) -> None:
        self.update(request)
        if request.index == 1:
            self.update(request)


class FinishedEarly(FaultyHolder):
    """The engine takes the update for complete after two of three buckets."""

    def update_faulty(self, request: WeightUpdateRequest) -> None:
        if request.index == 2:
            super().finish_weight_update(request.version)
        self.update(request)


class OtherVersion(FaultyHolder):
    """All tensors are right, but the engine says that they are another version."""

    def update_faulty(self, request: WeightUpdateRequest) -> None:
        self.update(request)

    def finish_weight_update(self, version: int) -> WeightReport:
        report = super().finish_weight_update(version)
        return replace(report, version=version - (version == FAULTY_VERSION))


FAULTS: dict[type[FaultyHolder], str] = {
    DroppedFirst: "bucket 1 of version 3 came, but no update is open",
    Dropped: "bucket 2 of version 3 came, but the update to version 3 is open and waits for bucket 1",
    DroppedLast: "ended without 2 tensors of the update before, such as 'p4'",
    DroppedUnnoticed: "2 are missing: p4, p5",
    Swapped: "2 differ: p0, p1",
    Renamed: "2 differ: p0, p1",
    ReplayedBytes: "(2 differ: p2, p3|altered on their way|altered)",
    ReplayedRequest: "bucket 1 of version 2 came, but the update to version 3 is open",
    Truncated: r"(announces 6400 bytes, but 6399 came|bucket 1 of version 3 \(p2 to p3\) were altered on their way)",
    Announced: "bucket 2 of version 3.*(announces|altered on their way)",
    FlippedBit: r"(1 differ: p[45]|bucket 2 of version 3 \(p4 to p5\) were altered on their way)",
    FlippedInPlace: "3 differ: p0, p2, p4",
    WrongDtype: "(2 differ: p2, p3|holds version 2)",
    Converted: "6 differ: p0, p1, p2 and 3 more",
    Transposed: "3 differ: p0, p2, p4",
    Stale: "1 differ: p3",
    Repeated: "bucket 1 of version 3 came, but the update to version 3 is open and waits for bucket 2",
    FinishedEarly: "(ended without 2 tensors|no update is open)",
    OtherVersion: "engine 1 is at version 2",
}


@every_verification
@every_way
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_caught_and_names_engine_and_tensors(fault, ways, verification, connect):
    weights = parameters()
    good, bad = (kind((name, torch.zeros_like(tensor)) for name, tensor in weights) for kind in (WeightHolder, fault))
    most = 2 * TENSOR_BYTES * (1 if ways[0] == "checkpoint" else 4)
    sender = connect(ways, good, bad, verification=verification, max_bucket_bytes=most, timeout_seconds=10.0)
    for version in range(1, FAULTY_VERSION):
        step(weights, version)
        assert sender.send([weights[:2], weights[2:4], weights[4:]], version).metrics["buckets"] == 3
    step(weights, FAULTY_VERSION)
    with pytest.raises(WeightSyncError, match=FAULTS[fault]) as raised:
        sender.send([weights[:2], weights[2:4], weights[4:]], FAULTY_VERSION)
    assert "engine 1" in str(raised.value) and "engine 0" not in str(raised.value)


@every_verification
@every_way
def test_a_clean_run_never_alarms(ways, verification, connect):
    weights = parameters()
    engine = WeightHolder((name, torch.zeros_like(tensor)) for name, tensor in weights)
    sender = connect(ways, engine, verification=verification, max_bucket_bytes=8 * TENSOR_BYTES)
    for version in range(1, 21):
        step(weights, version)
        sender.send([weights[:3], weights[3:]], version)
        assert all(torch.equal(engine.parameters[name], tensor) for name, tensor in weights)


class WrongBitForEver(WeightHolder):
    """One bit of a large tensor is wrong after every update."""

    def finish_weight_update(self, version: int) -> WeightReport:
        self.parameters["large"].view(torch.int16).view(-1)[123_456] ^= 1
        return super().finish_weight_update(version)


def test_a_wrong_bit_in_a_large_tensor_is_caught_within_the_rotation_by_sampled_and_at_once_by_full(connect):
    large = torch.ones(1024, 512).bfloat16()
    turns = num_turns(large.nbytes)
    assert turns == 32
    sender = connect(("shared_memory", "full"), WrongBitForEver([("large", torch.zeros_like(large))]))
    caught = []
    for version in range(turns):
        try:
            sender.send([[("large", large)]], version)
        except WeightSyncError as error:
            assert "engine 0: 1 differ: large" in str(error)
            caught.append(version)
    assert len(caught) == 1
    sender = connect(
        ("shared_memory", "full"), WrongBitForEver([("large", torch.zeros_like(large))]), verification="full"
    )
    with pytest.raises(WeightSyncError, match="engine 0: 1 differ: large"):
        sender.send([[("large", large)]], 1)


def test_order_of_buckets_is_checked_even_with_verification_off(connect):
    weights = parameters()
    stale = Stale((name, torch.zeros_like(tensor)) for name, tensor in weights)
    sender = connect(("shared_memory", "full"), stale, verification="off")
    for version in range(1, FAULTY_VERSION + 1):
        step(weights, version)
        assert sender.send([weights], version).reports == [WeightReport(version=version, fingerprints={})]
    assert not torch.equal(stale.parameters["p3"], dict(weights)["p3"])

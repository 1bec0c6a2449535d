"""Every fault that is planted between the real sender and a real receiver is caught, and a clean run never alarms."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from skyrl_train.errors import WeightSyncError
from skyrl_train.weight_sync.base import WeightReport, WeightSyncInitInfo, WeightUpdateRequest
from skyrl_train.weight_sync.fingerprint import num_turns
from skyrl_train_testing.weight_holders import WeightHolder

WAYS = [(way, encoding) for encoding in ("full", "delta") for way in ("shared_memory", "broadcast", "checkpoint")]
every_way = pytest.mark.parametrize("ways", WAYS, ids="-".join)
# Of tensors as small as these `sampled` reads every byte, as `full` does.
every_verification = pytest.mark.parametrize("verification", ["sampled", pytest.param("full", marks=pytest.mark.full)])
TENSOR_BYTES = 40 * 40 * 2
FAULTY_VERSION = 3


def parameters() -> list[tuple[str, torch.Tensor]]:
    """Six bfloat16 matrices of 40 x 40."""
    torch.manual_seed(0)
    return [(f"p{index}", torch.randn(40, 40).bfloat16()) for index in range(6)]


def zeros_like(weights: list[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    return [(name, torch.zeros_like(tensor)) for name, tensor in weights]


def step(weights: list[tuple[str, torch.Tensor]], version: int) -> None:
    """Change a twentieth of every tensor."""
    for _, tensor in weights:
        tensor.view(-1)[version % 20 :: 20] += 1


Change = Callable[[torch.Tensor], torch.Tensor]


class AlteringReader:
    """A transport that alters bytes on their way, and keeps those of the last version without a fault by bucket."""

    def __init__(self, reader: Any):
        self._reader, self.change = reader, None
        self.old: dict[int, torch.Tensor] = {}

    def read(self, request: WeightUpdateRequest) -> torch.Tensor:
        flat = self._reader.read(request).clone()
        if request.version < FAULTY_VERSION:
            self.old[request.index] = flat
        return flat if self.change is None else self.change(flat.clone())

    def close(self) -> None:
        self._reader.close()


class FaultyHolder(WeightHolder):
    """An engine at the end of a transport with a fault, from `FAULTY_VERSION` on."""

    told_version: int | None = None

    def __init__(self, parameters: Any, fault: "Fault"):
        super().__init__(parameters)
        self._fault = fault
        self.requests: dict[int, WeightUpdateRequest] = {}

    def init_weight_update_communicator(self, init_info: WeightSyncInitInfo) -> None:
        super().init_weight_update_communicator(init_info)
        assert self.receiver is not None
        self.reader: Any = AlteringReader(self.receiver._reader)
        self.receiver._reader = self.reader

    def update_named_weights(self, request: WeightUpdateRequest) -> None:
        if request.version < FAULTY_VERSION:
            self.requests[request.index] = request
            self.update(request)
        else:
            self._fault(self, request)

    def update(self, request: WeightUpdateRequest, change: Change | None = None) -> None:
        """Receive a bucket; `change` alters its bytes on their way."""
        self.reader.change = change
        super().update_named_weights(request)

    def finish_weight_update(self, version: int) -> WeightReport:
        report = super().finish_weight_update(version)
        return report if self.told_version is None else replace(report, version=self.told_version)


Fault = Callable[[FaultyHolder, WeightUpdateRequest], None]


def dropped(index: int) -> Fault:
    """A bucket comes (a broadcast needs every member), and is lost."""
    return lambda holder, request: holder.reader.read(request) if request.index == index else holder.update(request)


def dropped_unnoticed(holder: FaultyHolder, request: WeightUpdateRequest) -> None:
    """The engine's own check of names is lost with the bucket."""
    assert holder.receiver is not None
    holder.receiver._names_before = None
    dropped(2)(holder, request)


def altered(index: int, change: Callable[[FaultyHolder, torch.Tensor], torch.Tensor]) -> Fault:
    """Other bytes come than were sent."""
    return lambda holder, request: holder.update(
        request, (lambda flat: change(holder, flat)) if request.index == index else None
    )


def announced(index: int, change: Callable[[WeightUpdateRequest], dict[str, Any]]) -> Fault:
    """The request says something else of the bytes than is true."""
    return lambda holder, request: holder.update(
        replace(request, **change(request)) if request.index == index else request
    )


def flipped(holder: FaultyHolder, flat: torch.Tensor) -> torch.Tensor:
    flat[len(flat) // 2] ^= 4
    return flat


def replayed_request(holder: FaultyHolder, request: WeightUpdateRequest) -> None:
    """A bucket of the version before comes once more, request and all."""
    if request.index != 1:
        return holder.update(request)
    holder.reader.read(request)
    return holder.update(holder.requests[1], lambda flat: holder.reader.old[1])


def swapped(holder: FaultyHolder, request: WeightUpdateRequest) -> None:
    """Two tensors of one shape change places."""
    holder.update(request)
    if request.index == 0:
        first, second = (holder.parameters[name] for name in request.names)
        kept = first.clone()
        first.copy_(second)
        second.copy_(kept)


def flipped_in_place(holder: FaultyHolder, request: WeightUpdateRequest) -> None:
    """The bytes arrive as they were; the engine's memory does not keep them."""
    holder.update(request)
    holder.parameters[request.names[0]].view(torch.int16)[7, 7] ^= 1


def converted(holder: FaultyHolder, request: WeightUpdateRequest) -> None:
    """The engine holds another format than it was sent."""
    holder.parameters = {name: tensor.float() for name, tensor in holder.parameters.items()}
    holder.update(request)


def transposed(holder: FaultyHolder, request: WeightUpdateRequest) -> None:
    holder.update(request)
    holder.parameters[request.names[0]].copy_(holder.parameters[request.names[0]].t().clone())


def stale(holder: FaultyHolder, request: WeightUpdateRequest) -> None:
    """One tensor keeps its old values, as where a loader does not know what to do with it."""
    kept = holder.parameters["p3"].clone()
    holder.update(request)
    holder.parameters["p3"].copy_(kept)


def repeated(holder: FaultyHolder, request: WeightUpdateRequest) -> None:
    for _ in range(2 if request.index == 1 else 1):
        holder.update(request)


def finished_early(holder: FaultyHolder, request: WeightUpdateRequest) -> None:
    """The engine takes the update for complete after two of three buckets."""
    if request.index == 2:
        holder.finish_weight_update(request.version)
    holder.update(request)


def other_version(holder: FaultyHolder, request: WeightUpdateRequest) -> None:
    """All tensors are right, but the engine says that they are another version."""
    holder.update(request)
    holder.told_version = FAULTY_VERSION - 1


FAULTS: dict[str, tuple[Fault, str]] = {
    "first dropped": (dropped(0), "bucket 1 of version 3 came, but no update is open"),
    "dropped": (dropped(1), "bucket 2 of version 3 came, but the update to version 3 is open and waits for bucket 1"),
    "last dropped": (dropped(2), "ended without 2 tensors of the update before, such as 'p4'"),
    "dropped unnoticed": (dropped_unnoticed, "2 are missing: p4, p5"),
    "swapped": (swapped, "2 differ: p0, p1"),
    "renamed": (announced(0, lambda request: {"names": request.names[::-1]}), "2 differ: p0, p1"),
    "replayed bytes": (
        altered(1, lambda holder, flat: holder.reader.old[1]),
        "(2 differ: p2, p3|altered on their way|altered)",
    ),
    "replayed request": (replayed_request, "bucket 1 of version 2 came, but the update to version 3 is open"),
    "truncated": (
        altered(1, lambda holder, flat: flat[:-1]),
        r"(announces 6400 bytes, but 6399 came|bucket 1 of version 3 \(p2 to p3\) were altered on their way)",
    ),
    "fewer bytes announced": (
        announced(2, lambda request: {"num_bytes": request.num_bytes - 2}),
        "bucket 2 of version 3.*(announces|altered on their way)",
    ),
    "flipped bit": (
        altered(2, flipped),
        r"(1 differ: p[45]|bucket 2 of version 3 \(p4 to p5\) were altered on their way)",
    ),
    "flipped in place": (flipped_in_place, "3 differ: p0, p2, p4"),
    "wrong dtype": (
        announced(1, lambda request: {"dtypes": ["float16"] * len(request)}),
        "(2 differ: p2, p3|holds version 2)",
    ),
    "converted": (converted, "6 differ: p0, p1, p2 and 3 more"),
    "transposed": (transposed, "3 differ: p0, p2, p4"),
    "stale": (stale, "1 differ: p3"),
    "repeated": (repeated, "bucket 1 of version 3 came, but the update to version 3 is open and waits for bucket 2"),
    "finished early": (finished_early, "(ended without 2 tensors|no update is open)"),
    "other version": (other_version, "engine 1 is at version 2"),
}


@every_verification
@every_way
@pytest.mark.parametrize("name", FAULTS)
def test_planted_fault_is_detected_and_names_engine_and_tensors(name, ways, verification, connect):
    weights, (fault, message) = parameters(), FAULTS[name]
    good, bad = WeightHolder(zeros_like(weights)), FaultyHolder(zeros_like(weights), fault)
    most = 2 * TENSOR_BYTES * (1 if ways[0] == "checkpoint" else 4)
    sender = connect(ways, good, bad, verification=verification, max_bucket_bytes=most, timeout_seconds=10.0)
    for version in range(1, FAULTY_VERSION):
        step(weights, version)
        assert sender.send(weights, version).metrics["buckets"] == 3
    step(weights, FAULTY_VERSION)
    with pytest.raises(WeightSyncError, match=message) as raised:
        sender.send(weights, FAULTY_VERSION)
    assert "engine 1" in str(raised.value) and "engine 0" not in str(raised.value)


@every_verification
@every_way
def test_clean_run_raises_no_alarm(ways, verification, connect):
    weights = parameters()
    engine = WeightHolder(zeros_like(weights))
    sender = connect(ways, engine, verification=verification, max_bucket_bytes=8 * TENSOR_BYTES)
    for version in range(1, 21):
        step(weights, version)
        sender.send(weights, version)
        assert all(torch.equal(engine.parameters[name], tensor) for name, tensor in weights)


class WrongBitForEver(WeightHolder):
    """One bit of a large tensor is wrong after every update."""

    def finish_weight_update(self, version: int) -> WeightReport:
        self.parameters["large"].view(torch.int16).view(-1)[123_456] ^= 1
        return super().finish_weight_update(version)


def test_wrong_bit_in_large_tensor_is_detected_within_rotation(connect):
    large = torch.ones(1024, 512).bfloat16()
    turns = num_turns(large.nbytes)
    assert turns == 32
    sender = connect(("shared_memory", "full"), WrongBitForEver([("large", torch.zeros_like(large))]))
    caught = []
    for version in range(turns):
        try:
            sender.send([("large", large)], version)
        except WeightSyncError as error:
            assert "engine 0: 1 differ: large" in str(error)
            caught.append(version)
    assert len(caught) == 1
    sender = connect(
        ("shared_memory", "full"), WrongBitForEver([("large", torch.zeros_like(large))]), verification="full"
    )
    with pytest.raises(WeightSyncError, match=r"engine 0: .*large"):
        sender.send([("large", large)], 1)


def test_bucket_order_is_checked_with_verification_off(connect):
    weights = parameters()
    engine = FaultyHolder(zeros_like(weights), stale)
    sender = connect(("shared_memory", "full"), engine, verification="off")
    for version in range(1, FAULTY_VERSION + 1):
        step(weights, version)
        assert sender.send(weights, version).reports == [WeightReport(version=version, fingerprints={})]
    assert not torch.equal(engine.parameters["p3"], dict(weights)["p3"])

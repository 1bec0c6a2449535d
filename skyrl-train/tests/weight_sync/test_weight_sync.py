"""Weights leave the trainer in buckets and arrive as they were, or somebody says so in time."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from skyrl_train.distributed.process_group import free_port
from skyrl_train.errors import WeightSyncError, WorkerError
from skyrl_train.weight_sync.base import WeightSyncInitInfo, WeightUpdateRequest
from skyrl_train.weight_sync.broadcast import BroadcastGroup
from skyrl_train.weight_sync.checksum import checksum_of
from skyrl_train.weight_sync.receiver import WeightReceiver, num_bytes_of, split_bytes
from skyrl_train.weight_sync.sender import WeightSender, buckets_of, flatten

CPU = torch.device("cpu")
SHARED_MEMORY = WeightSyncInitInfo(strategy="shared_memory")


def parameters() -> list[tuple[str, torch.Tensor]]:
    """40, 4 and 24 bytes in float32."""
    return [("first", torch.arange(10.0)), ("scalar", torch.tensor(0.5)), ("last", -torch.arange(6.0).view(2, 3))]


# ---- buckets


@pytest.mark.parametrize(
    "max_bytes, expected",
    [
        (1000, [["first", "scalar", "last"]]),
        (44, [["first", "scalar"], ["last"]]),
        (43, [["first"], ["scalar", "last"]]),
        (1, [["first"], ["scalar"], ["last"]]),  # one that is larger than the limit travels alone
    ],
)
def test_buckets_are_filled_up_to_the_limit(max_bytes: int, expected: list[list[str]]):
    buckets = list(buckets_of(parameters(), torch.float32, max_bytes))
    assert [[name for name, _ in bucket] for bucket in buckets] == expected


def test_buckets_are_in_the_engines_number_format():
    [bucket] = buckets_of(parameters(), torch.bfloat16, 1000)
    assert {tensor.dtype for _, tensor in bucket} == {torch.bfloat16}
    assert flatten(bucket).numel() == 2 * (10 + 1 + 6)


def test_only_one_bucket_is_in_memory_at_a_time():
    taken = []

    def parameters_one_by_one():
        for name, tensor in parameters():
            taken.append(name)
            yield name, tensor

    buckets = buckets_of(parameters_one_by_one(), torch.float32, 1)
    next(buckets)
    assert taken == ["first", "scalar"]  # the second had to be seen to know that the first bucket is full


# ---- the receiving end


def request_of(bucket: list[tuple[str, torch.Tensor]], **changes: Any) -> WeightUpdateRequest:
    fields = {
        "names": [name for name, _ in bucket],
        "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
        "shapes": [tuple(tensor.shape) for _, tensor in bucket],
        "buffer": flatten(bucket).numpy(),
    }
    return WeightUpdateRequest(**fields | changes)


def test_what_was_flattened_arrives_with_names_types_and_shapes():
    mixed = [("byte", torch.tensor([7], dtype=torch.uint8)), *parameters(), ("half", torch.ones(3).bfloat16())]
    request = request_of(mixed)  # the byte in front leaves everything after it unaligned
    assert num_bytes_of(request) == 1 + 40 + 4 + 24 + 6
    received = WeightReceiver(SHARED_MEMORY, CPU).receive(request)
    assert [name for name, _ in received] == ["byte", "first", "scalar", "last", "half"]
    for (_, sent), (_, got) in zip(mixed, received, strict=True):
        assert got.dtype == sent.dtype and got.shape == sent.shape and torch.equal(got, sent)


def test_read_only_memory_is_read_without_a_warning():
    request = request_of(parameters())
    assert request.buffer is not None
    request.buffer.setflags(write=False)
    assert checksum_of(WeightReceiver(SHARED_MEMORY, CPU).receive(request)) == checksum_of(parameters())


@pytest.mark.parametrize("num_bytes", [0, 67, 69])
def test_a_chunk_of_the_wrong_length_is_refused(num_bytes: int):
    request = request_of(parameters(), buffer=np.zeros(num_bytes, dtype=np.uint8))
    with pytest.raises(WeightSyncError, match=f"a weight chunk of 3 parameters needs 68 bytes; got {num_bytes}"):
        WeightReceiver(SHARED_MEMORY, CPU).receive(request)


def test_a_chunk_without_bytes_is_refused():
    with pytest.raises(WeightSyncError, match="without bytes"):
        WeightReceiver(SHARED_MEMORY, CPU).receive(request_of(parameters(), buffer=None))


def test_a_request_names_as_many_shapes_as_parameters():
    with pytest.raises(ValueError, match="3 names, 3 dtypes, 1 shapes"):
        request_of(parameters(), shapes=[(10,)])


def test_an_empty_chunk_is_an_empty_list():
    assert split_bytes(WeightUpdateRequest(names=[], dtypes=[], shapes=[]), torch.empty(0, dtype=torch.uint8)) == []


# ---- both ends together


class Engine:
    """The receiving end of an engine, and a model of its own."""

    def __init__(self) -> None:
        self.model = {name: torch.zeros_like(tensor) for name, tensor in parameters()}
        self.version = -1

    def weight_version(self) -> int:
        return self.version

    def init_weight_update_communicator(self, info: WeightSyncInitInfo) -> None:
        self.receiver = WeightReceiver(info, CPU)

    def update_named_weights(self, request: WeightUpdateRequest) -> None:
        for name, tensor in self.receiver.receive(request):
            self.model[name].copy_(tensor)

    def finish_weight_update(self, version: int) -> int:
        self.version = version
        return checksum_of(self.model.items())


class ForgetfulEngine(Engine):
    """Loses the second parameter."""

    def update_named_weights(self, request: WeightUpdateRequest) -> None:
        super().update_named_weights(request)
        self.model["scalar"].zero_()


class DyingEngine(Engine):
    """Ends when the first chunk comes, and takes its place in the group with it."""

    def update_named_weights(self, request: WeightUpdateRequest) -> None:
        self.receiver.close()
        raise WorkerError("engine 1 died")


class Threads:
    """Engines in threads of this process: the same calls as to Ray actors."""

    def __init__(self, engines: Sequence[Engine]):
        self.engines = engines
        self._threads = ThreadPoolExecutor(8)

    def call_all(self, method: str, *args: Any) -> list[Any]:
        return [self._threads.submit(getattr(engine, method), *args) for engine in self.engines]

    def call_each(self, method: str, args: Sequence[Any]) -> list[Any]:
        calls = zip(self.engines, args, strict=True)
        return [self._threads.submit(getattr(engine, method), arg) for engine, arg in calls]

    def wait(self, calls: list[Any]) -> list[Any]:
        return [call.result(timeout=20) for call in calls]

    def share(self, value: Any) -> Any:
        return value


def broadcast_infos(num_engines: int, timeout_seconds: float = 10.0) -> list[WeightSyncInitInfo]:
    port = free_port()
    return [
        WeightSyncInitInfo(
            strategy="broadcast",
            master_address="127.0.0.1",
            master_port=port,
            rank=rank,
            world_size=num_engines + 1,
            timeout_seconds=timeout_seconds,
        )
        for rank in range(num_engines + 1)
    ]


def shared_memory_infos(num_engines: int) -> list[WeightSyncInitInfo]:
    return [SHARED_MEMORY] * (num_engines + 1)


both_ways = pytest.mark.parametrize("infos", [shared_memory_infos, broadcast_infos])


@both_ways
@pytest.mark.parametrize("max_bytes", [1, 44, 1000])
def test_two_engines_hold_the_trainers_weights(infos: Callable[[int], list[WeightSyncInitInfo]], max_bytes: int):
    engines = [Engine(), Engine()]
    sender = WeightSender(Threads(engines), infos(2), CPU)
    for version in (1, 2):
        weights = [(name, tensor + version) for name, tensor in parameters()]
        sent = sender.send(buckets_of(weights, torch.float32, max_bytes), version)
        assert sent == {"bytes": 68.0, "chunks": {1: 3.0, 44: 2.0, 1000: 1.0}[max_bytes]}
        for engine in engines:
            assert engine.version == version
            assert all(torch.equal(engine.model[name], tensor) for name, tensor in weights)
    sender.close()


@both_ways
def test_the_engine_with_other_weights_is_named(infos: Callable[[int], list[WeightSyncInitInfo]]):
    sender = WeightSender(Threads([Engine(), ForgetfulEngine()]), infos(2), CPU)
    with pytest.raises(WeightSyncError, match=r"after the sync of version 5, engine\(s\) \[1\] hold other weights"):
        sender.send(buckets_of(parameters(), torch.float32, 1000), 5)
    sender.close()


@both_ways
def test_an_engine_that_dies_on_the_way_is_named(infos: Callable[[int], list[WeightSyncInitInfo]]):
    sender = WeightSender(Threads([Engine(), DyingEngine()]), infos(2), CPU)
    with pytest.raises((WorkerError, WeightSyncError), match=r"engine 1 died|a member of the weight-sync group died"):
        sender.send(buckets_of(parameters(), torch.float32, 1000), 1)
    sender.close()


def test_a_group_that_one_member_does_not_join_is_an_error_in_time():
    began = time.monotonic()
    with pytest.raises(WeightSyncError, match=r"rank 0 of 2 could not join .* at 127.0.0.1:\d+ within 2 s"):
        BroadcastGroup(broadcast_infos(1, timeout_seconds=2.0)[0], CPU)
    assert time.monotonic() - began < 15


def test_a_member_that_falls_silent_is_an_error_in_time():
    infos = broadcast_infos(1, timeout_seconds=2.0)
    joined: list[BroadcastGroup] = []
    thread = threading.Thread(target=lambda: joined.append(BroadcastGroup(infos[1], CPU)))
    thread.start()
    group = BroadcastGroup(infos[0], CPU)
    thread.join(10)
    began = time.monotonic()
    with pytest.raises(WeightSyncError, match="died or did not answer in time"):
        joined[0].receive_bytes(16)  # the sender never sends
    assert time.monotonic() - began < 15
    group.close()

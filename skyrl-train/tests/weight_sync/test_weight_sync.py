"""Weights leave the trainer in buckets and arrive as they were, or somebody says so in time."""

import threading
import time
import tracemalloc
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from skyrl_train.distributed.process_group import find_free_port
from skyrl_train.errors import WeightSyncError, WorkerError
from skyrl_train.weight_sync.base import WeightReport, WeightSyncInitInfo, WeightUpdateRequest, needs_staging
from skyrl_train.weight_sync.broadcast import BroadcastGroup
from skyrl_train.weight_sync.payload import Payload, in_buckets, split_bytes
from skyrl_train.weight_sync.plan import Route, init_infos_for
from skyrl_train.weight_sync.receiver import WeightReceiver
from skyrl_train.weight_sync.shared_memory import Segment, SharedMemoryWriter
from skyrl_train_testing.weight_holders import CPU, HolderInfo, WeightHolder

WAYS = [(way, encoding) for encoding in ("full", "delta") for way in ("shared_memory", "broadcast", "checkpoint")]
every_way = pytest.mark.parametrize("ways", WAYS, ids="-".join)


def parameters() -> list[tuple[str, torch.Tensor]]:
    """40, 4 and 24 bytes in float32."""
    return [("first", torch.arange(10.0)), ("scalar", torch.tensor(0.5)), ("last", -torch.arange(6.0).view(2, 3))]


def holder() -> WeightHolder:
    return WeightHolder((name, torch.zeros_like(tensor)) for name, tensor in parameters())


def at_version(version: int) -> list[tuple[str, torch.Tensor]]:
    return [(name, tensor + version) for name, tensor in parameters()]


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
def test_buckets_are_filled_up_to_limit(max_bytes: int, expected: list[list[str]]):
    buckets = list(in_buckets(parameters(), max_bytes))
    assert [[name for name, _ in bucket] for bucket in buckets] == expected


def test_single_bucket_is_in_memory_at_any_time():
    taken = []

    def parameters_one_by_one() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in parameters():
            taken.append(name)
            yield name, tensor

    next(in_buckets(parameters_one_by_one(), 1))
    assert taken == ["first", "scalar"]  # the second had to be seen to know that the first bucket is full


def test_bucket_request_round_trips_through_json():
    request = Payload.of(parameters()).request(version=3, index=0, location="/somewhere")
    assert WeightUpdateRequest.from_json_dict(request.to_json_dict()) == request


def test_unaligned_bytes_are_split_into_original_tensors():
    mixed = [("byte", torch.tensor([7], dtype=torch.uint8)), *parameters(), ("half", torch.ones(3).bfloat16())]
    payload = Payload.of(mixed)
    assert payload.num_bytes == 1 + 40 + 4 + 24 + 6
    flat = torch.empty(payload.num_bytes, dtype=torch.uint8)
    payload.copy_to(flat)
    for (_, sent), (_, got) in zip(mixed, split_bytes(payload.request(version=1, index=0), flat), strict=True):
        assert got.dtype == sent.dtype and got.shape == sent.shape and torch.equal(got, sent)


@pytest.mark.parametrize("num_bytes", [0, 67, 69])
def test_bucket_with_wrong_length_is_refused(num_bytes: int):
    request = Payload.of(parameters()).request(version=1, index=0)
    with pytest.raises(WeightSyncError, match=f"announces 68 bytes, but {num_bytes} came"):
        split_bytes(request, torch.zeros(num_bytes, dtype=torch.uint8))


def test_request_with_missing_shapes_is_refused():
    with pytest.raises(ValueError, match="3 names, 3 dtypes, 1 shapes"):
        WeightUpdateRequest(
            names=["a", "b", "c"], dtypes=["float32"] * 3, shapes=[(1,)], version=1, index=0, num_bytes=4
        )


# ---- the receiving end


class Bench:
    """The writer and the receiver of shared memory, with nobody between them."""

    def __init__(self) -> None:
        [self.info] = init_infos_for([Route("shared_memory")], [HolderInfo()])
        self.writer, self.receiver = SharedMemoryWriter(), WeightReceiver(self.info, CPU)

    def receive(self, name: str, version: int, index: int) -> None:
        payload = Payload.of([(name, torch.ones(3))])
        self.receiver.receive(payload.request(version=version, index=index, **self.writer.write(payload, 1, 0)))


def test_duplicate_tensor_is_refused():
    """(Buckets out of turn, lost or from another version: `test_planted_faults.py`.)"""
    bench = Bench()
    bench.receive("a", 1, 0)
    with pytest.raises(WeightSyncError, match=r"'a' .*version 1"):
        bench.receive("a", 1, 1)


def test_abandoned_update_is_restarted():
    bench = Bench()
    bench.receive("a", 1, 0)
    bench.receive("a", 2, 0)
    bench.receive("b", 2, 1)
    bench.receiver.finish(2)


def test_only_open_update_can_be_finished():
    bench = Bench()
    with pytest.raises(WeightSyncError, match="version 1"):
        bench.receiver.finish(1)
    bench.receive("a", 1, 0)
    with pytest.raises(WeightSyncError, match=r"version 2 .*version 1"):
        bench.receiver.finish(2)


def test_shared_memory_of_exited_trainer_is_named():
    bench = Bench()
    request = Payload.of(parameters()).request(version=1, index=0, location="/proc/self/fd/987654")
    refused = r"shared memory of policy rank 0, /proc/self/fd/987654, cannot be opened here .*broadcast"
    with pytest.raises(WeightSyncError, match=refused):
        bench.receiver.receive(request)


def test_memory_shorter_than_declared_is_not_read():
    bench, segment = Bench(), Segment()
    segment.first(67)
    request = Payload.of(parameters()).request(version=1, index=0, location=segment.name)
    with pytest.raises(WeightSyncError, match=r"67 bytes.*bucket 0 of version 1 .*68"):
        bench.receiver.receive(request)


# ---- both ends together


@every_way
@pytest.mark.parametrize("max_bucket_bytes, num_buckets", [(4, 3), (4 * 44, 2), (4000, 1)])
def test_two_engines_have_trainer_weights(ways, max_bucket_bytes: int, num_buckets: int, connect):
    engines = [holder(), holder()]
    sender = connect(ways, *engines, max_bucket_bytes=max_bucket_bytes)
    for version in (1, 2, 4):
        weights = at_version(version)
        result = sender.send(weights, version)
        assert result.metrics["bytes"] == 68
        if ways[0] != "checkpoint":  # its files have up to `max_bucket_bytes`
            assert result.metrics["buckets"] == num_buckets
        assert [report.version for report in result.reports] == [version, version]
        for engine in engines:
            assert engine.version == version
            assert all(torch.equal(engine.parameters[name], tensor) for name, tensor in weights)


@every_way
def test_tensor_larger_than_bucket_is_sent_alone(ways, connect):
    engine = holder()
    sender = connect(ways, engine, max_bucket_bytes=1)
    sender.send(at_version(1), 1)
    assert torch.equal(engine.parameters["last"], at_version(1)[2][1])


@pytest.mark.parametrize("ways", WAYS[2:], ids="-".join)
def test_staged_weights_are_sent(ways, connect):
    engine = holder()
    sender = connect(ways, engine)
    weights = at_version(1)
    sender.stage(weights, 1)
    for _, tensor in weights:
        tensor.zero_()  # the trainer may go on
    sender.send(None, 1)
    assert all(torch.equal(engine.parameters[name], tensor) for name, tensor in at_version(1))


def test_staging_is_needed_for_checkpoint_and_delta(connect):
    stages = [needs_staging(init_infos_for([Route(*ways)], [HolderInfo()])[0]) for ways in WAYS]  # type: ignore[arg-type]
    assert stages == [False, False, True, True, True, True]


def test_send_of_unstaged_version_raises(connect):
    sender = connect(WAYS[2], holder())
    with pytest.raises(ValueError, match="version None was staged"):
        sender.send(None, 1)
    sender.stage(at_version(1), 1)
    with pytest.raises(ValueError, match="version 2 is to be sent, but version 1 was staged"):
        sender.send(None, 2)


def test_metrics_report_time_per_phase(connect):
    sender = connect(("checkpoint", "full"), holder())
    sender.stage(at_version(1), 1)
    metrics = sender.send(None, 1).metrics
    phases = {name for name in metrics if name.endswith("_seconds")}
    assert phases == {f"{p}_seconds" for p in ("stage", "write", "wait", "fingerprint", "finish", "send")}
    assert metrics["stage_seconds"] > 0 and metrics["send_seconds"] > metrics["finish_seconds"] > 0


class PartlyRead(WeightHolder):
    """An engine that reads `read_bytes` of the `held_bytes` of its weights, and nothing of `received_only`."""

    def __init__(self, held_bytes: int, read_bytes: int, received_only: Sequence[str] = ()):
        super().__init__((name, torch.zeros_like(tensor)) for name, tensor in parameters())
        self._read = {"held_bytes": held_bytes, "read_bytes": read_bytes, "received_only": list(received_only)}

    def finish_weight_update(self, version: int) -> WeightReport:
        return replace(super().finish_weight_update(version), **self._read)


def shares_of(connect: Any, *engines: WeightHolder, verification: str = "sampled") -> dict[str, Any]:
    metrics = connect(WAYS[0], *engines, verification=verification).send(at_version(1), 1).metrics
    return {name: pytest.approx(value) for name, value in metrics.items() if name.endswith("_share")}


def test_read_share_is_minimum_over_engines(connect):
    """The second engine cannot read the 24 bytes of `last` of 68, and reads 11 of the other 44 at this sync."""
    engines = PartlyRead(68, 34), PartlyRead(44, 11, ["last"])
    assert shares_of(connect, *engines) == {"held_share": 44 / 68, "read_share": 0.25}


def test_engine_without_readable_tensors_has_no_read_share(connect):
    nothing = PartlyRead(0, 0, ["first", "scalar", "last"])
    assert shares_of(connect, nothing) == {"held_share": 0.0}
    assert shares_of(connect, nothing, PartlyRead(68, 68)) == {"held_share": 0.0, "read_share": 1.0}
    assert shares_of(connect, nothing, verification="off") == {}


def test_multi_process_engine_has_several_ranks(tmp_path):
    """Each process of an engine makes a receiver of its own."""
    [info] = init_infos_for(
        [Route("broadcast")],
        [HolderInfo(num_weight_processes=2)],
        master_address="127.0.0.1",
        master_port=find_free_port(),
        timeout_seconds=20.0,
    )
    received: dict[int, Any] = {}

    def process(index: int) -> None:
        receiver = WeightReceiver(info, CPU, process_index=index)
        request = Payload.of(parameters()).request(version=1, index=0)
        received[index] = [tensor.clone() for _, tensor in receiver.receive(request)]
        receiver.close()

    threads = [threading.Thread(target=process, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    group = BroadcastGroup(info, CPU, rank=0)
    flat = torch.empty(68, dtype=torch.uint8)
    Payload.of(parameters()).copy_to(flat)
    group.broadcast(torch.tensor([1, 0, 68]))
    group.broadcast(flat)
    for thread in threads:
        thread.join(20)
    group.close()
    assert all(torch.equal(received[index][2], parameters()[2][1]) for index in (0, 1))


# ---- changes alone


def large_weights() -> list[tuple[str, torch.Tensor]]:
    torch.manual_seed(0)
    return [(f"layer.{i}", torch.randn(200, 100).bfloat16()) for i in range(4)]


def test_only_deltas_are_sent_when_engine_has_previous_version(connect):
    weights = large_weights()
    engine = WeightHolder((name, torch.zeros_like(tensor)) for name, tensor in weights)
    sender = connect(("shared_memory", "delta"), engine)
    assert sender.send(weights, 1).metrics["payload_bytes"] == 4 * 200 * 100 * 2
    weights[2][1][0, ::10] += 1  # ten numbers
    metrics = sender.send(weights, 2).metrics
    assert metrics["bytes"] == 4 * 200 * 100 * 2 and metrics["payload_bytes"] < 200
    assert torch.equal(engine.parameters["layer.2"], weights[2][1])


@pytest.mark.parametrize("ways", WAYS[3:], ids="-".join)
def test_engines_receive_full_tensors_after_failure(ways, connect):
    """A receiver that lost its base refuses changes by name; the same send again brings everything."""
    weights = large_weights()
    engines = [WeightHolder((name, torch.zeros_like(tensor)) for name, tensor in weights) for _ in range(2)]
    sender = connect(ways, *engines, timeout_seconds=3.0)
    sender.send(weights, 1)
    weights[0][1].zero_()
    assert engines[1].receiver is not None and engines[1].receiver._changes is not None
    engines[1].receiver._changes._last.version = None  # as after an update that did not end
    sender.stage(weights, 2)
    with pytest.raises(WeightSyncError, match=r"engine 1: .*version 1"):
        sender.send(None, 2)
    if ways[0] == "broadcast":
        sender = connect(ways, *engines)  # a broken group is met anew
        sender.stage(weights, 2)
    metrics = sender.send(None, 2).metrics
    assert metrics["payload_bytes"] == metrics["bytes"]
    for engine in engines:
        assert all(torch.equal(engine.parameters[name], tensor) for name, tensor in weights)


def test_new_tensor_forces_full_send(connect):
    engine = WeightHolder([("a", torch.zeros(6)), ("b", torch.zeros(6))])
    sender = connect(("shared_memory", "delta"), engine)
    sender.send([("a", torch.ones(6))], 1)
    metrics = sender.send([("a", torch.ones(6)), ("b", torch.ones(6))], 2).metrics
    assert metrics["payload_bytes"] == metrics["bytes"]


def test_unwritable_directory_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("in the way")
    route = Route("shared_memory", "delta")
    [info] = init_infos_for([route], [HolderInfo()], directory=str(tmp_path / "file" / "below"))
    with pytest.raises(WeightSyncError, match=r"generator\.weight_sync_directory"):
        WeightReceiver(info, CPU)


# ---- memory


@pytest.mark.parametrize("ways", [("shared_memory", "full"), ("shared_memory", "delta")], ids="-".join)
def test_sender_keeps_no_second_model_in_memory(ways, connect):
    """64 tensors of 1 MB in buckets of 4 MB: what Python and numpy allocate stays below two buckets. (What torch
    allocates is measured in processes, `test_processes.py`.)"""
    weights = [(f"layer.{i}", torch.randn(500, 1000).bfloat16()) for i in range(64)]
    engine = WeightHolder((name, torch.zeros_like(tensor)) for name, tensor in weights)
    sender = connect(ways, engine, max_bucket_bytes=4_000_000)
    sender.send(weights, 1)
    tracemalloc.start()
    for _, tensor in weights:
        tensor[::7] += 1
    sender.send(weights, 2)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8_000_000


# ---- deadlines


class DyingHolder(WeightHolder):
    """Ends when the first bucket comes, and takes its place in the group with it."""

    def update_named_weights(self, request: WeightUpdateRequest) -> None:
        assert self.receiver is not None
        self.receiver.close()
        raise WorkerError("it died")


@every_way
def test_engine_crash_during_send_is_named_with_bucket_and_tensors(ways, connect):
    engines = [holder(), DyingHolder([])]
    sender = connect(ways, *engines, timeout_seconds=5.0)
    began = time.monotonic()
    with pytest.raises(WeightSyncError, match=r"bucket 0 of version 1 \(first to last\): .*engine [01]"):
        sender.send(at_version(1), 1)
    assert time.monotonic() - began < 15


def test_missing_group_member_raises_before_deadline():
    info = WeightSyncInitInfo(
        transport="broadcast",
        master_address="127.0.0.1",
        master_port=find_free_port(),
        world_size=2,
        timeout_seconds=2.0,
    )
    began = time.monotonic()
    with pytest.raises(WeightSyncError, match=r"rank 0 of 2 .* 127.0.0.1:\d+"):
        BroadcastGroup(info, CPU, rank=0)
    assert time.monotonic() - began < 15


class SilentHolder(WeightHolder):
    """Is told of buckets and never takes them."""

    def update_named_weights(self, request: WeightUpdateRequest) -> None:
        time.sleep(4)


@pytest.mark.slow
def test_silent_engine_raises_on_both_sides_before_deadline(connect):
    """The other engine, which waits for bytes that never come, is freed as well."""
    waiting = holder()
    sender = connect(("broadcast", "full"), SilentHolder([]), waiting, timeout_seconds=2.0)
    began = time.monotonic()
    with pytest.raises(WeightSyncError, match=r"at bucket 0 of version 1 .*(engine . did not answer|group died)"):
        sender.send(at_version(1), 1)
    assert time.monotonic() - began < 10
    assert waiting.version == 0

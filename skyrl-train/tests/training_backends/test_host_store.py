"""Tensors in host memory and back: equal bits, freed storages, buffers that are reused."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from skyrl_train.training_backends.host_store import HostStore
from skyrl_train.training_backends.optimizer import iter_moments

CPU = torch.device("cpu")


def some_tensors(device: torch.device) -> dict[str, torch.Tensor]:
    """Tensors of many kinds, some of which share a storage."""
    weight = nn.Parameter(torch.randn(5, 7, device=device))
    flat = torch.arange(20, dtype=torch.bfloat16, device=device)
    return {
        "weight": weight,
        "tied weight": nn.Parameter(weight.data),
        "same object": weight,
        "transposed": torch.randn(3, 4, device=device).t(),
        "strided": torch.randn(8, 6, device=device)[::2, 1::3],
        "first part of a buffer": flat[:9],
        "other part of a buffer": flat[9:].view(11, 1),
        "bytes": torch.arange(3, dtype=torch.uint8, device=device),
        "double": torch.randn(1, dtype=torch.float64, device=device),
        "scalar": torch.tensor(2.5, device=device),
        "not a number": torch.tensor([torch.nan, -0.0, torch.inf], device=device),
        "empty": torch.empty(0, device=device),
        "expanded": torch.randn(1, 3, device=device).expand(4, 3),
    }


def get_bits(tensor: torch.Tensor) -> bytes:
    # A clone: a storage that numpy has seen cannot be resized.
    return tensor.detach().clone().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def check_round_trip(device: torch.device) -> HostStore:
    tensors = some_tensors(device)
    bits = {name: get_bits(tensor) for name, tensor in tensors.items()}
    layouts = {name: (tensor.stride(), tensor.storage_offset(), tensor.device) for name, tensor in tensors.items()}
    view = tensors["first part of a buffer"].view(3, 3)  # a reference that the store does not know
    storages = {tensor.untyped_storage() for tensor in tensors.values()}
    size = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
    store = HostStore(device)
    taken = 0
    for _ in range(3):
        moved = store.offload(tensors.values())
        assert moved.num_bytes == size and moved.seconds > 0
        assert all(storage.nbytes() == 0 for storage in storages), "device memory is free, whoever holds a view of it"
        assert {name: get_bits(tensor) for name, tensor in tensors.items()} == bits, "readable meanwhile"
        assert {tensor.device.type for name, tensor in tensors.items() if name != "empty"} == {"cpu"}
        assert store.offload(tensors.values()).num_bytes == 0
        assert taken in (0, store.num_bytes), "buffers are reused"
        taken = store.num_bytes
        assert size <= taken < size + 64 * len(tensors)
        assert store.onload().num_bytes == size
        assert {name: get_bits(tensor) for name, tensor in tensors.items()} == bits
        assert layouts == {
            name: (tensor.stride(), tensor.storage_offset(), tensor.device) for name, tensor in tensors.items()
        }
        assert get_bits(view) == bits["first part of a buffer"]
    with torch.no_grad():
        tensors["weight"].fill_(3)
    assert torch.equal(tensors["tied weight"], tensors["weight"])
    return store


def test_tensors_return_with_bits_strides_and_shared_storages():
    check_round_trip(CPU)


def test_writes_to_offloaded_tensors_reach_device():
    """A checkpoint may be loaded meanwhile."""
    weight = nn.Parameter(torch.zeros(4))
    alias, store = weight.data, HostStore(CPU)
    store.offload([weight])
    with torch.no_grad():
        weight.copy_(torch.arange(4.0))
    store.onload()
    assert alias.tolist() == [0, 1, 2, 3] and alias.data_ptr() == weight.data_ptr()


def test_state_created_later_gets_memory_of_its_own():
    layer = nn.Linear(64, 64)
    optimizer, store = torch.optim.AdamW(layer.parameters()), HostStore(CPU)

    def move() -> int:
        return store.offload([*layer.parameters(), *iter_moments(optimizer)]).num_bytes

    weights = move()
    store.onload()
    layer(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    expected = [get_bits(tensor) for tensor in (*layer.parameters(), *iter_moments(optimizer))]
    assert move() == 3 * weights
    store.onload()
    assert [get_bits(tensor) for tensor in (*layer.parameters(), *iter_moments(optimizer))] == expected
    held = store.num_bytes
    assert move() == 3 * weights and store.num_bytes == held
    store.onload()
    layer(torch.ones(1, 64)).sum().backward()
    optimizer.step()


def test_partial_moves_add_up():
    first, second, store = torch.ones(100), torch.full((100,), 2.0), HostStore(CPU)
    assert store.offload([first]).num_bytes == 400
    assert store.offload([first, second]).num_bytes == 400
    assert first.sum() == 100 and second.sum() == 200
    assert store.onload().num_bytes == 800
    assert first.sum() == 100 and second.sum() == 200
    assert store.onload().num_bytes == 0, "nothing is left to move"


def test_mapped_file_stays(tmp_path):
    torch.save(torch.ones(10), tmp_path / "weights.pt")
    mapped = torch.load(tmp_path / "weights.pt", mmap=True)
    assert HostStore(CPU).offload([mapped]).num_bytes == 0 and mapped.sum() == 10


@pytest.mark.usefixtures("group_of_one")
def test_local_part_of_sharded_tensor_moves():
    mesh, store = init_device_mesh("cpu", (1,)), HostStore(CPU)
    sharded = nn.Parameter(distribute_tensor(torch.arange(12.0).view(4, 3), mesh, [Shard(0)]))
    storage = sharded.to_local().untyped_storage()
    assert store.offload([sharded]).num_bytes == 48 and storage.nbytes() == 0
    assert sharded.full_tensor().sum() == 66
    store.onload()
    assert storage.nbytes() == 48 and sharded.full_tensor().sum() == 66


@pytest.mark.gpu
def test_gpu_memory_is_freed_through_pinned_buffers():
    device = torch.device("cuda:0")
    store = check_round_trip(device)
    assert all(buffer.is_pinned() for buffer in store._buffers)
    before = torch.cuda.memory_allocated(device)
    large = torch.randn(64 << 20, device=device)
    bits = large.cpu()
    moves = [store.offload([large])]
    assert torch.cuda.memory_allocated(device) == before and large.is_pinned()
    for _ in range(3):  # the first move allocated the buffer
        store.onload()
        assert torch.equal(large.cpu(), bits)
        moves.append(store.offload([large]))
    back = store.onload()
    assert torch.equal(large.cpu(), bits)
    rates = [move.num_bytes / 1e9 / move.seconds for move in (moves[-1], back)]
    assert min(rates) > 5, f"{rates} GB/s out and back: slower than a pageable copy over PCIe 4"

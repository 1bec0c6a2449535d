"""A fingerprint sees what a broken weight sync does."""

import pytest
import torch
import xxhash

from skyrl_train.weight_sync.fingerprint import (
    BLOCK_BYTES,
    MOST_TURNS,
    WHOLE_BYTES,
    Verification,
    differences,
    fingerprint_of,
    fingerprints_of,
    num_bytes_read,
    num_turns,
)


def large_tensor() -> torch.Tensor:
    """A square of 1,024 x 1,024 bfloat16 numbers: 2 MiB, 512 blocks."""
    return torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0)).bfloat16()


def flip_bit(tensor: torch.Tensor, byte: int) -> torch.Tensor:
    flipped = tensor.clone()
    flipped.view(-1).view(torch.uint8)[byte] ^= 1
    return flipped


def test_small_tensor_hash_covers_all_bytes_dtype_and_shape():
    tensor = torch.tensor([[1, 0, 2]], dtype=torch.uint8)
    expected = xxhash.xxh3_64_intdigest(b"torch.uint8 (1, 3)" + bytes([1, 0, 2])) >> 1
    assert fingerprint_of(tensor, 1, "sampled") == fingerprint_of(tensor, 2, "full") == expected


@pytest.mark.parametrize(
    "num_bytes, turns",
    [
        (0, 1),
        (WHOLE_BYTES, 1),
        (WHOLE_BYTES + 1, 2),  # 16 blocks, at least 8 of them at a time
        (100 * BLOCK_BYTES, 12),
        (MOST_TURNS * 8 * BLOCK_BYTES, MOST_TURNS),
        (1_000_000_000, MOST_TURNS),
    ],
)
def test_rotation_length_depends_on_tensor_size(num_bytes: int, turns: int):
    assert num_turns(num_bytes) == turns


@pytest.mark.parametrize(
    "num_bytes, verification, read",
    [
        (100 * BLOCK_BYTES, "full", 100 * BLOCK_BYTES),
        (100 * BLOCK_BYTES, "sampled", 34_133),  # a twelfth, rounded down
        (WHOLE_BYTES, "sampled", WHOLE_BYTES),
    ],
)
def test_num_bytes_read_counts_single_version(num_bytes: int, verification: Verification, read: int):
    found = num_bytes_read(num_bytes, verification)
    assert found == read and isinstance(found, int)


@pytest.mark.parametrize("byte", [0, 1, BLOCK_BYTES, 777_777, 2 * 1024 * 1024 - 1])
def test_flipped_bit_is_detected_at_once_by_full_and_later_by_sampled(byte: int):
    tensor = large_tensor()
    flipped = flip_bit(tensor, byte)
    assert fingerprint_of(tensor, 5, "full") != fingerprint_of(flipped, 5, "full")
    turns = num_turns(tensor.nbytes)
    assert turns == 64
    seen = [fingerprint_of(tensor, v, "sampled") != fingerprint_of(flipped, v, "sampled") for v in range(turns)]
    assert sum(seen) == 1


def test_bytes_after_last_full_block_are_read_in_every_version():
    tensor = torch.zeros(WHOLE_BYTES + 10, dtype=torch.uint8)
    flipped = flip_bit(tensor, WHOLE_BYTES + 9)
    for version in range(num_turns(tensor.nbytes)):
        assert fingerprint_of(tensor, version, "sampled") != fingerprint_of(flipped, version, "sampled")


@pytest.mark.parametrize("verification", ["sampled", "full"])
def test_different_tensors_have_different_fingerprints(verification):
    tensor = large_tensor()
    others = {
        "transposed": tensor.t(),
        "another shape": tensor.view(512, 2048),
        "another dtype": tensor.view(torch.float16),
        "the one before": tensor * 1.01,
        "rolled by a block": tensor.view(-1).roll(BLOCK_BYTES // 2).view(1024, 1024),
        "cut off": tensor[:-1],
    }
    expected = fingerprint_of(tensor, 3, verification)
    assert [name for name, other in others.items() if fingerprint_of(other, 3, verification) == expected] == []


def test_fingerprint_is_independent_of_memory_layout():
    tensor = large_tensor()
    column_major = tensor.t().contiguous().t()
    assert column_major.stride() != tensor.stride()
    assert fingerprint_of(column_major, 1, "sampled") == fingerprint_of(tensor, 1, "sampled")


def test_fingerprint_fits_signed_64_bit_integer():
    values = fingerprints_of(((str(i), torch.tensor(float(i))) for i in range(100)), 1, "full").values()
    assert len(set(values)) == 100 and all(0 <= value < 1 << 63 for value in values)


def test_disabled_verification_reads_no_bytes():
    assert fingerprints_of([("a", torch.zeros(3))], 1, "off") == {}


@pytest.mark.parametrize(
    "report, text",
    [
        ({"a": 1, "b": 2}, ""),
        ({"b": 2, "a": 1}, ""),
        ({"a": 1}, "1 are missing: b"),
        ({"a": 2, "b": 1}, "2 differ: a, b"),
        ({"a": 1, "b": 3, "c": 4}, "1 differ: b; 1 are not the trainer's: c"),
        ({"a": 1, "b": 2, "v": 0, "w": 0, "x": 0, "y": 0}, "4 are not the trainer's: v, w, x and 1 more"),
    ],
)
def test_differences_name_tensors(report: dict[str, int], text: str):
    assert differences({"a": 1, "b": 2}, report) == text


@pytest.mark.gpu
@pytest.mark.parametrize("verification", ["sampled", "full"])
def test_gpu_and_cpu_fingerprints_are_equal(verification):
    named = [("large", large_tensor()), ("small", torch.ones(3)), ("other", -large_tensor())]
    on_gpu = [(name, tensor.cuda()) for name, tensor in named]
    assert fingerprints_of(on_gpu, 7, verification) == fingerprints_of(named, 7, verification)

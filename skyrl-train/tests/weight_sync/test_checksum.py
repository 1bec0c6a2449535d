"""The checksum sees what a broken weight sync does."""

import torch

from skyrl_train.weight_sync.checksum import MODULUS, checksum_of, tensor_checksum


def test_checksum_of_three_bytes_by_hand():
    # 3 bytes; weights (i * 2654435761 + 40503) mod 2147483647 of positions 0, 1, 2
    weights = [40503, 506992617, 1013944731]
    assert tensor_checksum(torch.tensor([1, 0, 2], dtype=torch.uint8)) == 3 + 1 * weights[0] + 2 * weights[2]


def test_checksum_sees_a_flipped_bit_a_swap_and_a_lost_zero():
    values = torch.arange(2_500_000, dtype=torch.float32).sin()  # ten million bytes: more than one chunk
    flipped, swapped = values.clone(), values.clone()
    flipped.view(torch.int32)[2_300_000] ^= 1
    swapped[[7, 2_000_000]] = values[[2_000_000, 7]]
    far = torch.roll(values, 1 << 18)  # by exactly a chunk: the same bytes at the same places of other chunks
    sums = {tensor_checksum(tensor) for tensor in (values, flipped, swapped, far)}
    assert len(sums) == 4
    assert tensor_checksum(torch.zeros(3)) != tensor_checksum(torch.zeros(4))
    assert all(0 <= value < MODULUS for value in sums)


def test_names_belong_to_values_and_their_order_does_not_matter():
    a, b = torch.tensor([1.0]), torch.tensor([2.0])
    assert checksum_of([("a", a), ("b", b)]) == checksum_of([("b", b), ("a", a)])
    assert checksum_of([("a", a), ("b", b)]) != checksum_of([("a", b), ("b", a)])


def test_the_number_format_is_part_of_the_checksum():
    assert tensor_checksum(torch.ones(8)) != tensor_checksum(torch.ones(8, dtype=torch.bfloat16))

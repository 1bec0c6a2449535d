"""Columns of a matrix by products with one-hot rows."""

import pytest
import torch

from skyrl_train.weight_sync.one_hot import columns_by_products

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_one_hot_products_equal_columns_bitwise(dtype: torch.dtype):
    weight = torch.randn(50, 70, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = columns_by_products(lambda rows: rows @ weight.t(), (50, 70), slice(3, None, 8), dtype, CPU)
    assert torch.equal(found, weight[:, 3::8].t())


def test_signed_zeros_and_subnormals_count_as_zero():
    weight = torch.tensor([[-0.0, 1e-40], [2.0, -3.0]])
    found = columns_by_products(lambda rows: rows @ weight.t(), (2, 2), slice(None), torch.float32, CPU)
    assert found.tolist() == [[0.0, 2.0], [0.0, -3.0]] and not found.signbit()[0, 0]


def test_many_columns_are_read_in_bounded_chunks():
    weight = torch.randn(3, 5000)
    sizes = []

    def multiply(rows: torch.Tensor) -> torch.Tensor:
        sizes.append(rows.numel())
        return rows @ weight.t()

    assert torch.equal(columns_by_products(multiply, (3, 5000), slice(None), torch.float32, CPU), weight.t())
    assert len(sizes) > 1 and max(sizes) <= 1 << 24

"""Devices have an index."""

import pytest
import torch

from skyrl_train.training_backends.base import RankInfo
from skyrl_train.utils.gpus import get_indexed_device


@pytest.mark.parametrize("name, device", [("cuda", "cuda:0"), ("cuda:1", "cuda:1"), ("cpu", "cpu")])
def test_cuda_device_has_index(name: str, device: str):
    assert get_indexed_device(name) == get_indexed_device(torch.device(name)) == torch.device(device)
    assert RankInfo(device=name).torch_device == torch.device(device)

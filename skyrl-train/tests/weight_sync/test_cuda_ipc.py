"""Weights through memory of a GPU, from one process to another on the same device."""

from functools import partial

import pytest
import torch

from skyrl_train.weight_sync.plan import Route, init_infos_for
from skyrl_train_testing.weight_holders import HolderInfo, HolderProcesses, WeightHolder
from skyrl_train_testing.weight_sources import BlockingSender

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
]
SHAPES = [(f"p{index}", (1000, 1000)) for index in range(8)]


@pytest.mark.parametrize("most", [4_000_000, 64_000_000])
def test_engine_on_same_gpu_has_trainer_weights(most: int):
    """`send` compares fingerprints of every byte; two tensors a bucket, then all in one."""
    device = torch.device("cuda", 0)
    infos = init_infos_for([Route("cuda_ipc")], [HolderInfo()], verification="full")
    with HolderProcesses(1, partial(WeightHolder.of_shapes, SHAPES, torch.float32, device)) as engines:
        engines.wait_for_start()
        sender = BlockingSender(engines.engines, infos, device, max_bucket_bytes=most)
        for version in (1, 2, 3):
            weights = [(name, torch.randn(shape, device=device)) for name, shape in SHAPES]
            assert sender.send(weights, version).metrics["bytes"] == 32_000_000
        sender.close()

"""A bench on which settings are tried."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # importlib mode does not add this folder


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator["Bench"]:  # noqa: F821
    import torch.distributed as dist
    from effects import ENVIRONMENTS, Bench

    import skyrl_gym
    from skyrl_train.config import SkyRLConfig
    from skyrl_train.testing.learning import one_process_group
    from skyrl_train.workers.model_worker import ModelWorker, RankInfo

    for name, env in ENVIRONMENTS.items():
        skyrl_gym.register(id=name, entry_point=env)
    with one_process_group():  # before any worker: those of a group of two could not meet
        ModelWorker(SkyRLConfig()).join(RankInfo())
    yield Bench(tmp_path_factory.mktemp("bench"))
    for name in ENVIRONMENTS:
        skyrl_gym.deregister(name)
    if dist.is_initialized():
        dist.destroy_process_group()

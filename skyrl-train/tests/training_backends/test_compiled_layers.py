"""Layers compiled by `trainer.compile_layers`."""

import shutil
from typing import Any

import pytest
import torch.distributed as dist
from torch.testing import assert_close

from skyrl_train.errors import ConfigError
from skyrl_train.training_backends.base import RankInfo
from skyrl_train.training_backends.fsdp2.backend import FSDP2Backend
from skyrl_train.training_backends.fsdp2.sharding import compile_layers
from skyrl_train.training_batch import MicroBatch
from skyrl_train_testing.backend_checks import make_backend_batch, make_settings, run_step
from skyrl_train_testing.tiny_models import build_tiny_mixture


@pytest.mark.full  # minutes of compiling on a CPU
@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.skipif(shutil.which("c++") is None, reason="torch.compile needs a C++ compiler: c++ is not installed")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_compiled_layers_give_same_steps(tiny_model: str, device: str):
    def run_steps(compiled: bool) -> list[Any]:
        settings = {"compile_layers": compiled, "gradient_checkpointing": True, "use_shared_prefixes": True}
        backend = FSDP2Backend(make_settings(tiny_model, settings, device=device), "policy", 10)
        backend.join(RankInfo(device="cuda:0" if device == "cuda" else device))
        try:
            backend.load_model()
            divisions = [((0, 1, 2), (3, 4, 5, 6)), ((0, 1, 2, 3, 4, 5, 6),)]  # other numbers of tokens
            batch = make_backend_batch()
            return [run_step(backend, batch, [MicroBatch(rows) for rows in division]) for division in divisions]
        finally:
            dist.destroy_process_group()

    for plain, compiled in zip(run_steps(False), run_steps(True), strict=True):
        assert_close(compiled.outputs, plain.outputs, rtol=1e-5, atol=1e-5)
        assert_close(compiled.weights, plain.weights, rtol=0, atol=1e-4)  # 1 % of the learning rate


def test_mixture_with_compiled_layers_is_refused():
    with pytest.raises(ConfigError, match="compile_layers"):
        compile_layers(build_tiny_mixture())

"""An SGLang server for all tests of this folder; on a machine without its kernels, with stand-ins for them."""

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from skyrl_train_testing.engine_conformance import make_tiny_model

_STAND_INS = Path(__file__).parent / "cpu_support"


@pytest.fixture(scope="session")
def tiny_folder(sglang_starts: None, tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_tiny_model(tmp_path_factory.mktemp("sglang") / "tiny", tied=True)


@pytest.fixture(scope="session")
def sglang_starts() -> Iterator[None]:
    """Skips where SGLang is not installed."""
    if importlib.util.find_spec("sglang") is None:
        pytest.skip("sglang is not installed; on a CPU: scripts/setup_sglang_cpu.sh makes an environment that has it")
    before = os.environ.get("PYTHONPATH")
    if not torch.cuda.is_available():
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_STAND_INS), before]))
    yield
    if before is None:
        os.environ.pop("PYTHONPATH", None)
    else:
        os.environ["PYTHONPATH"] = before

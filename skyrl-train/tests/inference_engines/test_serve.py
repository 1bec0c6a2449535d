"""`python -m skyrl_train.entrypoints.serve`, as a person starts it."""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from openai import OpenAI

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

_START_SECONDS = 240
_END_SECONDS = 60


@contextmanager
def serving(model: str, folder: Path, *settings: str) -> Iterator[subprocess.Popen]:
    command = [
        *(sys.executable, "-m", "skyrl_train.entrypoints.serve"),
        *(f"trainer.policy.model.path={model}", "trainer.placement.device=cpu", f"trainer.run_dir={folder / 'run'}"),
        *("generator.backend=native", "generator.model_dtype=float32", "generator.served_model_name=tiny"),
        *settings,
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with open(folder / "errors", "w") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=folder, env=environment
        )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.communicate(timeout=_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            raise


def first_line(process: subprocess.Popen) -> str:
    """Return the line that it prints when it serves; empty if it ended before."""
    too_long = threading.Timer(_START_SECONDS, process.kill)
    too_long.start()
    try:
        return process.stdout.readline()
    finally:
        too_long.cancel()


@pytest.mark.parametrize("launcher", ["ray", pytest.param("inline", marks=pytest.mark.full)])
def test_serve_runs_engines_and_endpoint_until_stopped(launcher, chat_model, tmp_path):
    settings = "generator.http_endpoint_port=0", f"trainer.placement.launcher={launcher}"
    with serving(chat_model, tmp_path, *settings) as process:
        line = first_line(process)
        assert line.startswith("serving tiny at http://127.0.0.1:"), (tmp_path / "errors").read_text()
        with OpenAI(base_url=line.split()[-1], api_key="any") as client:
            answer = client.chat.completions.create(
                model="tiny",
                messages=[{"role": "user", "content": "Hi"}],
                max_tokens=5,
                extra_body={"ignore_eos": True},
            )
        assert answer.usage.completion_tokens == 5
    assert process.returncode == 0


@pytest.mark.full  # the error itself: endpoint/test_errors.py
def test_port_in_use_error_names_setting(chat_model, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with serving(chat_model, tmp_path, f"generator.http_endpoint_port={port}") as process:
            assert first_line(process) == ""
            assert process.wait(_END_SECONDS) == 1
    assert f"ConfigError: generator.http_endpoint_port={port} is in use" in (tmp_path / "errors").read_text()

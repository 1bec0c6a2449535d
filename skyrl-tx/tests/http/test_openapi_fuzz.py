"""A real server keeps to its own OpenAPI description, whatever it is sent (https://schemathesis.io)."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plain_client import Client, Model
from tx_server import ServerProcess

from tx.tinker.types import Datum

HOOKS = Path(__file__).with_name("fuzz_hooks.py")
SEED, EXAMPLES, SECONDS = 1, 10, 270
NOT_CHECKED = "negative_data_rejection,positive_data_acceptance"
"""Rules between fields are not in a schema, and what asks for nothing is let through."""
SHORT_POLLS = """
import runpy
from tx.tinker.http.routes import futures
futures.POLL_SECONDS = 0.2
runpy.run_module("tx.tinker.api", run_name="__main__", alter_sys=True)
"""


async def create_existing_objects(client: Client) -> dict[str, Any]:
    """Return existing objects by the names that bodies and addresses have for them."""
    model = await Model.new(client, "tiny", rank=4, train_unembed=False)
    data = [Datum(np.arange(4, 9), {"target_tokens": np.arange(5, 10), "weights": np.ones(5, np.float32)})]
    request_id = await model.train(data)
    await client.fetch(request_id)
    await client.fetch(await model.save("there"))
    saving, sampler = await model.save_for_sampler()
    await client.fetch(saving)
    path = f"tinker://{model.model_id}/weights/there"
    return {
        "session_id": model.session_id,
        "model_id": model.model_id,
        "run_id": model.model_id,
        "request_id": request_id,
        "sampling_session_id": sampler,
        "sampler_id": sampler,
        "base_model": "tiny",
        "model": "tiny",
        "tinker_path": path,
        "kind": "weights",
        "name": "there",
    }


@pytest.mark.parametrize(
    "phase",
    [
        pytest.param("fuzzing", marks=pytest.mark.slow),
        pytest.param("coverage", marks=pytest.mark.full),  # each bound of each field: 2,500 requests
    ],
)
async def test_every_answer_is_as_described(phase: str, tmp_path: Path, tiny_model: Path):
    options = ["--base-model", str(tiny_model), "--served-model-name", "tiny", "--no-standby-engine"]
    with ServerProcess(tmp_path / "server", *options, tenants=["anna"], program=["-c", SHORT_POLLS]) as server:
        async with Client(server.url, server.key("anna")) as client:
            real = await create_existing_objects(client)
        command = [sys.executable, "-m", "schemathesis.cli", "--no-color", "run", f"{server.url}/openapi.json"]
        command += ["--header", f"X-API-Key:{server.key('anna')}", "--seed", str(SEED), "--max-examples", str(EXAMPLES)]
        command += ["--exclude-checks", NOT_CHECKED, "--phases", phase, "--continue-on-failure"]
        command += ["--generation-database", "none", "--request-timeout", "60", "--warnings", "off", "--no-shrink"]
        fuzzing = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=tmp_path,
            env=os.environ | {"SCHEMATHESIS_HOOKS": str(HOOKS), "FUZZ_REAL": json.dumps(real)},
            timeout=SECONDS,
        )
        print(fuzzing.stdout)
        assert server.is_running, server.tail()
    assert fuzzing.returncode == 0, fuzzing.stdout[-8000:]

"""The real SDK waits when its key has used its tokens of a minute; another key's client does not."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from sdk_environment import sdk_environment
from tx_server import ServerProcess

PROGRAM = """
import json, os, sys, time
import tinker
from tinker import types

began = time.monotonic()
service = tinker.ServiceClient(base_url=sys.argv[1], api_key=sys.argv[2])
training = service.create_lora_training_client(base_model="tiny", rank=4).result()
inputs = {"target_tokens": [5] * 100, "weights": [1.0] * 100}
datum = types.Datum(model_input=types.ModelInput.from_ints([4] * 100), loss_fn_inputs=inputs)
passes = [training.forward_backward([datum] * int(sys.argv[3]), "cross_entropy") for _ in range(3)]
losses = [each.result().metrics["loss:sum"] for each in passes]
sampler = service.create_sampling_client(base_model="tiny")
params = types.SamplingParams(max_tokens=8, stop=[])
lengths = [len(s.tokens) for s in sampler.sample(types.ModelInput.from_ints([4, 5]), 2, params).result().sequences]
print(json.dumps({"losses": losses, "lengths": lengths, "seconds": time.monotonic() - began}), flush=True)
os._exit(0)
"""


@pytest.mark.process
@pytest.mark.slow
def test_sdk_waits_for_its_quota_and_harms_nobody(tiny_model: Path, tmp_path: Path):
    python = sdk_environment("0.38.0")
    options = ["--base-model", str(tiny_model), "--served-model-name", "tiny", "--no-standby-engine"]
    options += ["--max-tokens-per-minute-per-tenant", "6000"]
    with ServerProcess(tmp_path / "server", *options, tenants=["greedy", "modest"]) as server:
        environment = os.environ | {"TINKER_TELEMETRY": "0"}

        def start(tenant: str, copies: int) -> subprocess.Popen[str]:
            command = [python, "-c", PROGRAM, server.url, server.key(tenant), str(copies)]
            return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)

        clients = [start("greedy", 27), start("modest", 1)]  # 8,100 tokens, 300 tokens
        greedy, modest = (json.loads(client.communicate(timeout=240)[0].splitlines()[-1]) for client in clients)
    assert greedy["losses"][0] == greedy["losses"][2] and greedy["lengths"] == modest["lengths"] == [8, 8]
    assert greedy["seconds"] > modest["seconds"] + 10, "2,100 tokens too many take 21 seconds to come back"

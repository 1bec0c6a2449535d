"""The real SDK waits when its key has used its tokens of a minute; another key's client does not."""

import json
import os
import re
import subprocess
from pathlib import Path

import httpx
import pytest
from sdk_environment import sdk_environment
from tx_server import ServerProcess

PROGRAM = """
import json, os, sys
import tinker
from tinker import types

service = tinker.ServiceClient(base_url=sys.argv[1], api_key=sys.argv[2])
training = service.create_lora_training_client(base_model="tiny", rank=4).result()
inputs = {"target_tokens": [5] * 100, "weights": [1.0] * 100}
datum = types.Datum(model_input=types.ModelInput.from_ints([4] * 100), loss_fn_inputs=inputs)
passes = [training.forward_backward([datum] * int(sys.argv[3]), "cross_entropy") for _ in range(3)]
losses = [each.result().metrics["loss:sum"] for each in passes]
sampler = service.create_sampling_client(base_model="tiny")
params = types.SamplingParams(max_tokens=8, stop=[])
lengths = [len(s.tokens) for s in sampler.sample(types.ModelInput.from_ints([4, 5]), 2, params).result().sequences]
print(json.dumps({"losses": losses, "lengths": lengths}), flush=True)
os._exit(0)
"""


@pytest.mark.process
@pytest.mark.slow
def test_sdk_waits_for_quota_without_harming_other_tenants(tiny_model: Path, tmp_path: Path):
    python = sdk_environment("0.38.0")
    options = ["--base-model", str(tiny_model), "--served-model-name", "tiny", "--no-standby-engine"]
    options += ["--max-tokens-per-minute-per-tenant", "6000"]
    with ServerProcess(tmp_path / "server", *options, tenants=["greedy", "modest"]) as server:
        environment = os.environ | {"TINKER_TELEMETRY": "0"}

        def start(tenant: str, copies: int) -> subprocess.Popen[str]:
            command = [python, "-c", PROGRAM, server.url, server.key(tenant), str(copies)]
            return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)

        clients = [start("greedy", 22), start("modest", 1)]  # 6,600 tokens: 6 seconds' too many; 300 tokens
        greedy, modest = (json.loads(client.communicate(timeout=240)[0].splitlines()[-1]) for client in clients)
        refusals = [refused_for_quota(server, tenant) for tenant in ("greedy", "modest")]
    assert greedy["losses"][0] == greedy["losses"][2] and greedy["lengths"] == modest["lengths"] == [8, 8]
    assert refusals[0] > 0 == refusals[1]


def refused_for_quota(server: ServerProcess, tenant: str) -> float:
    text = httpx.get(f"{server.url}/metrics", headers={"X-API-Key": server.key(tenant)}, timeout=60).text
    found = re.findall(r"^tx_refused_for_quota_total\S* (\S+)$", text, re.MULTILINE)
    return sum(map(float, found))

"""Weights that the tools of the SDK and of tinker-cookbook take out compute what the server's sampler computes."""

import json
import os
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from skyrl_train.inference_engines.base import GenerationRequest
from skyrl_train.weight_sync.base import LoraLoadRequest
from skyrl_train_testing.engine_conformance import make_tiny_model

SCRIPT = Path(__file__).parent / "cookbook" / "weights_out.py"
TOKENS = [5, 9, 13, 20, 7, 8, 30, 2]


def log_probs_of(model: torch.nn.Module) -> list[float]:
    tokens = torch.tensor([TOKENS])
    with torch.no_grad():
        scores = model(tokens).logits[0, :-1].log_softmax(-1)
    return scores.gather(1, tokens[0, 1:, None])[:, 0].tolist()


async def log_probs_of_vllm(model: Path, adapter: str) -> list[float]:
    from skyrl_train.inference_engines.vllm.engine import VLLMInferenceEngine

    engine = VLLMInferenceEngine(str(model), device="cpu", dtype="float32", max_lora_rank=8)
    try:
        await engine.load_lora(LoraLoadRequest(name="served", path=adapter, version=1))
        params = {"max_tokens": 1, "prompt_logprobs": 0}
        asked = GenerationRequest(prompt_token_ids=TOKENS, sampling_params=params, lora_name="served")
        return (await engine.generate(asked)).prompt_log_probs or []
    finally:
        await engine.teardown()


@pytest.mark.full
@pytest.mark.timeout(900)
async def test_exported_weights_match_sampler(sdk_python, start_server, tmp_path: Path):
    python = sdk_python("cookbook-0.6.1")
    tiny_model = Path(make_tiny_model(tmp_path / "tiny", tied=False))
    server = start_server(tiny_model, served=["tiny"])
    variables = {"TINKER_BASE_URL": server.url, "TINKER_API_KEY": server.keys[0], "TINKER_TELEMETRY": "0"}
    command = [python, SCRIPT, tiny_model, tmp_path, *map(str, TOKENS)]
    run = subprocess.run(command, capture_output=True, text=True, env=os.environ | variables, timeout=600)
    assert run.returncode == 0, run.stdout + run.stderr
    said = json.loads(run.stdout.splitlines()[-1])
    expected = pytest.approx(said["log_probs"][1:], abs=1e-5)

    def base() -> torch.nn.Module:
        return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)

    assert log_probs_of(base()) != expected, "the adapter changes nothing: no proof"
    found = {name: log_probs_of(PeftModel.from_pretrained(base(), path)) for name, path in said["adapters"].items()}
    found["merged"] = log_probs_of(AutoModelForCausalLM.from_pretrained(said["merged"], dtype=torch.float32))
    assert found == dict.fromkeys(found, expected)
    assert len(found) == 6
    # Intermediate files of the tools were removed.
    assert said["checkpoints"] == ["external_weights/external", "external_weights/served", "weights/state"]

    if find_spec("vllm") is not None:
        served = said["for_engines"]
        found = await log_probs_of_vllm(tiny_model, served["adapter"])
        assert found == pytest.approx(served["log_probs"][1:], abs=1e-4)

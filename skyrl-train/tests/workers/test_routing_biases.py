"""Biases that choose experts are buffers, which no optimizer trains: exports hold them, and engines get them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Glm4MoeConfig, Glm4MoeForCausalLM

from skyrl_train.algorithms.losses import PolicyLossRegistry
from skyrl_train.inference_engines.base import InferenceEngineInput
from skyrl_train.inference_engines.native.engine import NativeInferenceEngine
from skyrl_train.training_backends.base import RankInfo
from skyrl_train.weight_sync.base import WeightSyncInitInfo
from skyrl_train.workers.policy_worker import PolicyWorker
from skyrl_train_testing.tiny_models import build_character_tokenizer
from skyrl_train_testing.weight_holders import WeightHolder, engines_in_threads
from skyrl_train_testing.weight_sources import send_once

BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"
PROMPT = list(range(5, 25))
INFOS = [WeightSyncInitInfo(transport="shared_memory")]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose routing is decided by its bias: it prefers experts 2, 5, 6 and 7 of 8."""
    torch.manual_seed(0)
    tokenizer = build_character_tokenizer()
    config = Glm4MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=8,
        max_position_embeddings=64,
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        initializer_range=0.3,
        pad_token_id=0,
        eos_token_id=1,
    )
    model = Glm4MoeForCausalLM(config)
    model.get_buffer(BIAS).copy_(torch.tensor([0, 0, 1.01, 0, 0, 1.02, 1.03, 1.04]))  # none of these is a bfloat16
    folder = str(tmp_path_factory.mktemp("mixture"))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def policy(config: Any, mixture: str) -> Any:
    cfg = config(policy={"model": {"path": mixture}})
    worker = PolicyWorker(cfg, PolicyLossRegistry.get("regular"), 10)
    worker.init_model(RankInfo())
    yield worker
    worker.teardown()


def test_export_has_every_checkpoint_tensor(policy: PolicyWorker, mixture: str, tmp_path: Path):
    policy.save_hf_model(str(tmp_path / "export"), build_character_tokenizer())
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float32).state_dict()
    expected = AutoModelForCausalLM.from_pretrained(mixture, dtype=torch.float32).state_dict()
    assert list(exported) == list(expected)
    assert all(torch.equal(exported[name], tensor) for name, tensor in expected.items())


async def test_engines_receive_float32_bias_with_bfloat16_weights(policy: PolicyWorker, mixture: str):
    policy.cfg.generator.model_dtype = "bfloat16"
    expected = AutoModelForCausalLM.from_pretrained(mixture, dtype=torch.bfloat16).state_dict()
    holder = WeightHolder((name, torch.zeros_like(tensor)) for name, tensor in expected.items())
    await send_once(policy, engines_in_threads([holder]), INFOS)
    assert expected[BIAS].dtype == torch.float32 and expected["lm_head.weight"].dtype == torch.bfloat16
    assert all(torch.equal(holder.parameters[name], tensor) for name, tensor in expected.items())


async def test_native_engine_with_dummy_weights_routes_as_policy_after_sync(policy: PolicyWorker, mixture: str):
    policy.cfg.generator.model_dtype = "float32"
    engine = NativeInferenceEngine(mixture, dummy_weights=True)
    try:
        await send_once(policy, [engine], INFOS)
        params = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        output = await engine.generate_batch(InferenceEngineInput(prompt_token_ids=[PROMPT], sampling_params=params))
        given = output.get("prompt_logprobs")
        torch.testing.assert_close(given, policy.log_probs_of_tokens([PROMPT]), atol=1e-4, rtol=0)
    finally:
        await engine.teardown()

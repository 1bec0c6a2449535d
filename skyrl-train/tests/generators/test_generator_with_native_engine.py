"""The whole way with nothing scripted: a real small model, the native engine, real environments."""

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from skyrl_train.config import GeneratorConfig, SamplingParams, SkyRLGymConfig
from skyrl_train.generators.inputs import prepare_generator_input
from skyrl_train.generators.skyrl_gym_generator import SkyRLGymGenerator
from skyrl_train.inference_engines.native.engine import NativeInferenceEngine


@pytest.fixture(scope="module")
def stories(test_data) -> str:
    return str(test_data / "tiny_lm" / "stories260K")


async def generate(stories: str) -> tuple[Any, Any]:
    tokenizer = AutoTokenizer.from_pretrained(stories)
    sampling = SamplingParams(max_generate_length=12, temperature=1.0)
    config = GeneratorConfig(sampling_params=sampling, max_turns=2, max_input_length=128, seed=5)
    rows = [
        {
            "prompt": [{"role": "user", "content": "Once upon a time, Tom had 2 + 2 cakes. He"}],
            "env_class": "calculator",
            "env_extras": {"reward_spec": {"method": "rule", "ground_truth": "4"}},
            "uid": "0",
        }
    ]
    batch, _ = prepare_generator_input(rows, 3, None, "calculator", "train", 1)
    engine = NativeInferenceEngine(stories, device="cpu", dtype="float32")
    try:
        generator = SkyRLGymGenerator(config, SkyRLGymConfig(), engine, tokenizer, "stories260K")
        return await generator.generate(batch, disable_tqdm=True), tokenizer
    finally:
        await engine.teardown()


async def test_real_model_generates_two_turns(stories):
    output, tokenizer = await generate(stories)
    assert output["failures"] == [None] * 3
    assert output["rollout_metrics"]["environment/turns"] == 2.0
    assert len({tuple(ids) for ids in output["response_ids"]}) == 3  # every sample has a seed of its own
    for ids, mask, versions in zip(
        output["response_ids"], output["loss_masks"], output["weight_versions"], strict=True
    ):
        assert 2 <= sum(mask) <= 24
        assert [version == -1 for version in versions] == [m == 0 for m in mask]
        between = tokenizer.decode([token for token, m in zip(ids, mask, strict=True) if not m])
        assert "Write an expression inside <calculator> tags" in between
    again, _ = await generate(stories)
    assert again["response_ids"] == output["response_ids"]


async def test_log_probs_match_model_on_trajectory_tokens(stories):
    """One forward pass over prompt + response gives each written token the log-prob that the engine reported: so the
    trajectory is, token for token, what the model read and wrote."""
    output, _ = await generate(stories)
    model = AutoModelForCausalLM.from_pretrained(stories, dtype=torch.float32)
    for prompt, response, mask, logprobs in zip(
        output["prompt_token_ids"],
        output["response_ids"],
        output["loss_masks"],
        output["rollout_logprobs"],
        strict=True,
    ):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        trained = logits.log_softmax(-1).gather(-1, torch.tensor(response)[:, None])[:, 0]
        written = torch.tensor(mask, dtype=torch.bool)
        assert torch.allclose(trained[written], torch.tensor(logprobs)[written], atol=1e-4)

"""Tiny models of each architecture in the table, in the Tinker server's backends: an adapter that is trained is sampled
and read by peft with the same log-probs, goes on bit for bit after a restart, and does not depend on its neighbours."""

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from skyrl_train_testing.architectures import ARCHITECTURES
from tx.tinker.backends.torch.sampling import NativeSampling
from tx.tinker.backends.torch.training import TorchTraining
from tx.tinker.types import AdamParams, Datum, LoraSpec, PassOutput, SampleParams, SampleSpec, TrainingPass

DAILY = {"gpt_oss", "qwen3_5"}
EACH = [pytest.param(name, marks=[] if name in DAILY else pytest.mark.slow) for name in ARCHITECTURES]
LENGTHS = (40, 3, 17)


def make_data(seed: int) -> list[Datum]:
    random = np.random.default_rng(seed)
    data = []
    for length in LENGTHS:
        tokens = random.integers(3, 99, size=length + 1)
        weights = random.normal(size=length).astype(np.float32)
        data.append(Datum(tokens[:-1], {"target_tokens": tokens[1:], "weights": weights}))
    return data


def outputs(backend: TorchTraining, *passes: TrainingPass) -> list[PassOutput]:
    results = backend.run(passes)
    for result in results:
        if not isinstance(result, PassOutput):
            raise result.error
    return [result for result in results if isinstance(result, PassOutput)]


def step(backend: TorchTraining, *seeds: int) -> list[bytes]:
    """Train "m" on the data of a seed, and "n" beside it on those of another, if any; return the bits of "m"'s
    log-probs."""
    outcomes = outputs(
        backend,
        *(TrainingPass(name, make_data(seed), "cross_entropy") for name, seed in zip(("m", "n"), seeds, strict=False)),
    )
    for name, _ in zip(("m", "n"), seeds, strict=False):
        backend.optim_step(name, AdamParams(learning_rate=0.03))
    return [each.tobytes() for each in outcomes[0].logprobs]


def log_probs_of_peft(folder: str, adapter: Path, tokens: np.ndarray) -> torch.Tensor:
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    if any(hasattr(module, "_is_expert_parallel") for module in base.modules()):
        base.set_experts_implementation("eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it speaks of tied embeddings, which our adapters leave alone
        model = PeftModel.from_pretrained(base, adapter)
    with torch.no_grad():
        log_probs = model(input_ids=torch.from_numpy(tokens)[None], use_cache=False).logits[0, :-1].log_softmax(-1)
    return log_probs.gather(1, torch.from_numpy(tokens)[1:, None])[:, 0]


@pytest.mark.first_case
@pytest.mark.parametrize("name", EACH)
async def test_adapter_is_trained_sampled_and_resumed_exactly(name: str, tmp_path: Path) -> None:
    folder = ARCHITECTURES[name].save(tmp_path / "base")
    lora = LoraSpec(rank=4, seed=3)
    backend, alone = TorchTraining(folder), TorchTraining(folder)
    for each in (backend, alone):
        each.create("m", lora)
    backend.create("n", LoraSpec(rank=2, seed=8))
    sites = {site.kind for site in backend._base.sites if site.name != backend._base.head_name}
    of_experts = any(site.num_experts for site in backend._base.sites)
    adapters = ARCHITECTURES[name].adapters
    assert sites == ({"attn", "mlp"} if adapters.startswith("attention, MLP") or of_experts else {"attn"})
    assert of_experts == adapters.endswith("Tinker: experts")
    for seed in range(3):
        assert step(backend, seed, 50 + seed) == step(alone, seed)

    # A restart from disk, between two steps.
    backend.save("m", tmp_path / "m", state=True)
    again = TorchTraining(folder)
    again.restore("m", lora, tmp_path / "m")
    assert step(again, 3) == step(backend, 3, 53)
    again.save("m", tmp_path / "one", state=True)
    backend.save("m", tmp_path / "other", state=True)
    for file in (tmp_path / "one").iterdir():
        assert file.read_bytes() == (tmp_path / "other" / file.name).read_bytes(), file.name

    sampling = NativeSampling(folder, max_context=256)
    await sampling.start()
    try:
        prompt = make_data(7)[0].tokens.tolist()
        params = SampleParams(max_tokens=20, temperature=1.0, seed=1, stop_at_eos=False)
        spec = SampleSpec(prompt=prompt, num_samples=2, params=params, prompt_logprobs=True)
        sampled = await sampling.sample(spec, tmp_path / "other")
    finally:
        await sampling.close()
    assert sampled.prompt_logprobs is not None
    # The delta rule in float32 magnifies rounding of weights that have grown.
    atol = 2e-5 if ARCHITECTURES[name].bit_exact else 2e-4
    for sequence in sampled.sequences:
        tokens = np.array([*prompt, *sequence.tokens])
        datum = Datum(tokens[:-1], {"target_tokens": tokens[1:], "weights": np.ones(len(tokens) - 1, np.float32)})
        [scored] = outputs(backend, TrainingPass("m", [datum], "cross_entropy", forward_only=True))
        expected = log_probs_of_peft(folder, tmp_path / "other", tokens)
        torch.testing.assert_close(torch.from_numpy(scored.logprobs[0]), expected, atol=atol, rtol=1e-5)
        reported = torch.tensor([*sampled.prompt_logprobs[1:], *sequence.logprobs])
        torch.testing.assert_close(reported, expected, atol=atol, rtol=1e-5)

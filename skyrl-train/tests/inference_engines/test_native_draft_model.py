"""Draft model of the native engine: answers are the same bits as without it, drawn from the engine's distribution."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from native_runs import batch, engine_of, make_core, random_prompts, run, same_bits
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from skyrl_train.errors import ConfigError
from skyrl_train.inference_engines.native.core import NativeEngineCore
from skyrl_train.inference_engines.native.draft_model import DraftModel
from skyrl_train.inference_engines.native.engine import NativeInferenceEngine
from skyrl_train.inference_engines.native.loading import load_model
from skyrl_train.inference_engines.native.requests import EngineSamplingParams, Request
from skyrl_train.inference_engines.request import Completion

SAMPLED = EngineSamplingParams(max_tokens=40)
GREEDY = replace(SAMPLED, temperature=0.0)


def load(path: str, noise: float = 0.0) -> Any:
    model = load_model(
        path, device=torch.device("cpu"), dtype="float32", model_config_kwargs=None, trust_remote_code=False
    )
    torch.manual_seed(1)
    with torch.no_grad():
        model.lm_head.weight.add_(noise * torch.randn_like(model.lm_head.weight))
    return model


def core_with_draft(path: str, draft: Any, num: int = 3, max_drafting: int = 16, **settings: Any) -> NativeEngineCore:
    draft_model = DraftModel(draft, max_rows=max_drafting, max_length=512)
    return make_core(path, num_draft_tokens=num, max_drafting=max_drafting, draft_model=draft_model, **settings)


def requests_of(*params: EngineSamplingParams) -> list[Request]:
    prompts = random_prompts([2 + 13 * index for index in range(len(params))])
    return [Request(prompt, own, (5, index)) for index, (prompt, own) in enumerate(zip(prompts, params, strict=True))]


def answers(core: NativeEngineCore, requests: list[Request]) -> list[Completion]:
    fresh = [replace(request) for request in requests]
    return run(core, fresh, late=fresh[1::2])


def shares(answers: list[Completion]) -> float:
    drafted, accepted = np.sum([answer.drafts for answer in answers if answer.drafts is not None], 0)
    return accepted / drafted


@pytest.mark.first_case
@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", "qwen2_window"])
def test_draft_model_keeps_completions_bit_exact(tiny_models, name):
    """Requests come and go beside each other, of other settings; more than may be drafted run at first."""
    params = [SAMPLED, GREEDY, replace(SAMPLED, max_tokens=7), replace(SAMPLED, top_p=0.8, top_k=20)]
    params += [
        replace(SAMPLED, repetition_penalty=1.3),
        replace(SAMPLED, temperature=0.5),
        replace(GREEDY, max_tokens=90),
    ]
    requests = requests_of(*params)
    plain_core = make_core(tiny_models(name))
    plain = answers(plain_core, requests)
    core = core_with_draft(tiny_models(name), load(tiny_models(name), noise=0.05), max_drafting=5)
    drafted = answers(core, requests)
    for answer, expected in zip(drafted, plain, strict=True):
        assert same_bits(answer, expected) and answer.stop_reason == expected.stop_reason
    assert core.num_forwards < plain_core.num_forwards
    assert 0.1 < shares(drafted) < 1
    assert drafted[4].drafts == (0, 0)  # a penalty looks at the tokens before


def test_model_as_own_draft_has_no_rejected_drafts(tiny_models):
    """Its numbers depend neither on the width of a pass nor on rows that moved meanwhile: no draft is rejected."""
    path = tiny_models("qwen3")
    params = [replace(own, max_tokens=5 + 9 * index) for index, own in enumerate([SAMPLED, GREEDY, SAMPLED, SAMPLED])]
    drafted = answers(core_with_draft(path, load(path), num=4), requests_of(*params))
    assert shares(drafted) == 1.0
    [alone] = answers(core_with_draft(path, load(path), num=4), requests_of(replace(SAMPLED, max_tokens=41)))
    assert alone.drafts == (32, 32)  # a token of the prompt's pass, then 8 passes of 4 drafts and one more token


def test_different_draft_model_keeps_completions(tiny_models):
    """And where it has fallen behind, it computes what it lacks in parts."""
    path, other = tiny_models("qwen3"), tiny_models("llama")
    requests = requests_of(SAMPLED, GREEDY, SAMPLED)
    for expected, answer in zip(
        answers(make_core(path), requests), answers(core_with_draft(path, load(other)), requests), strict=True
    ):
        assert same_bits(answer, expected)


def test_ids_beyond_draft_vocabulary_do_not_end_completion(tiny_models, tmp_path):
    """Models of a family fill up the same tokens to vocabularies of different sizes."""
    path = tiny_models("qwen3")
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path, vocab_size=40)).save_pretrained(tmp_path)
    requests = requests_of(SAMPLED, GREEDY, SAMPLED)
    assert max(request.prompt.max() for request in requests) > 40
    drafted = answers(core_with_draft(path, load(str(tmp_path))), requests)
    assert all(same_bits(*pair) for pair in zip(drafted, answers(make_core(path), requests), strict=True))
    assert sum(answer.drafts.num_drafted for answer in drafted if answer.drafts is not None) > 0


@pytest.mark.slow
def test_tokens_after_drafts_follow_model_distribution(tiny_models):
    """Chi-squared test of second tokens after one first token, against exact probabilities."""
    path = tiny_models("qwen3")
    core = core_with_draft(path, load(path, noise=0.3), num=1, max_drafting=64)
    prompt = np.array([5, 9, 12])
    # Three tokens: of the prompt's pass, a drafted one, and the one behind it.
    params = EngineSamplingParams(max_tokens=3, temperature=0.3)
    done = run(core, [Request(prompt, params, (7, index)) for index in range(900)])
    assert 0.2 < shares(done) < 0.95
    pairs = np.array([answer.token_ids[:2] for answer in done])
    first = int(np.bincount(pairs[:, 0]).argmax())
    seconds = pairs[pairs[:, 0] == first, 1]
    with torch.no_grad():
        logits = core_logits(path, [*prompt.tolist(), first])
    expected = (logits / 0.3).softmax(-1).numpy() * len(seconds)
    found = np.bincount(seconds, minlength=len(expected))
    often = expected > 5
    cells = [*zip(found[often], expected[often], strict=True), (found[~often].sum(), expected[~often].sum())]
    statistic = sum((one - other) ** 2 / other for one, other in cells if other > 0)
    degrees = len(cells) - 1
    assert len(seconds) > 100 and degrees >= 3
    assert statistic < degrees + 4 * np.sqrt(2 * degrees)


def core_logits(path: str, ids: list[int]) -> torch.Tensor:
    return AutoModelForCausalLM.from_pretrained(path)(torch.tensor([ids])).logits[0, -1]


async def test_engine_counts_drafts_and_keeps_draft_model_over_sleep(tiny_models):
    path = tiny_models("qwen3")
    asked = batch([5, 9, 12], max_tokens=20, temperature=1.0, seed=3) | {"count_cached_tokens": True}
    async with engine_of(path) as engine:
        expected = await engine.generate_batch(asked)  # pyright: ignore
    async with engine_of(path, num_speculative_tokens=2, speculative_model=path) as engine:
        for _ in range(2):
            output: Any = await engine.generate_batch(asked)  # pyright: ignore
            assert output["response_ids"] == expected["response_ids"]
            assert output["response_logprobs"] == expected["response_logprobs"]
            [(drafted, accepted)] = output["draft_counts"]
            assert drafted == accepted > 10
            await engine.sleep()
            await engine.wake_up()


def test_unsuitable_draft_models_are_rejected(tiny_models, tmp_path):
    path = tiny_models("qwen3")
    short = AutoConfig.from_pretrained(path, max_position_embeddings=64)
    AutoModelForCausalLM.from_config(short).save_pretrained(tmp_path / "short")
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.save_pretrained(tmp_path / "short")
    tokenizer.add_tokens(["<new>"])
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path)).save_pretrained(tmp_path / "other")
    tokenizer.save_pretrained(tmp_path / "other")
    for settings, error in (
        (dict(speculative_model=path), "num_speculative_tokens=0"),
        (
            dict(speculative_model=str(tmp_path / "other"), num_speculative_tokens=2),
            r"must have the vocabulary of .*: 1 tokens differ, such as '<new>' \(62 and None\)",
        ),
        (dict(speculative_model=str(tmp_path / "short"), num_speculative_tokens=2), "has a context of 64 tokens"),
    ):
        with pytest.raises(ConfigError, match=error):
            NativeInferenceEngine(path, **settings)  # pyright: ignore[reportArgumentType]

"""Kept tokens of the native engine: what truncation left in the vocabulary when each token was drawn."""

from typing import Any

import numpy as np
import pytest
import torch
from native_runs import PROMPT, interrupted, make_core, random_prompts, run, same_bits
from transformers import AutoModelForCausalLM

from skyrl_train.errors import UnsupportedByEngine
from skyrl_train.inference_engines.continuation import join
from skyrl_train.inference_engines.native.requests import EngineSamplingParams, Request
from skyrl_train.inference_engines.native.sampling import SamplingBatch, compute_random_key, compute_uniforms, sample
from skyrl_train.inference_engines.request import Completion
from skyrl_train.inference_engines.vllm.sampling import check_and_split_seed
from skyrl_train.kept_tokens import KeptTokens, pad_kept_tokens
from skyrl_train.models.scoring import ScoringModel

FOUR = [0.5, 0.25, 0.15, 0.1]
RECORDED: dict[str, Any] = dict(top_p=0.7, top_k=20, temperature=0.8, return_kept_tokens=True)


@pytest.mark.parametrize(
    "columns, forbidden, kept",
    [
        ({"top_k": 4}, [], [0, 1, 2, 3]),
        ({"top_k": 2}, [], [0, 1]),
        ({"top_k": 4, "top_p": 0.8}, [], [0, 1, 2]),
        ({"top_k": 2, "top_p": 0.6}, [], [0]),
        ({"top_k": 4, "min_p": 0.4}, [], [0, 1]),
        ({"top_k": 2}, [0], [1, 2]),  # a stop token before `min_tokens` is not among them
    ],
)
def test_sampled_token_is_among_kept_tokens(columns: Any, forbidden: list[int], kept: list[int]):
    draws = 2_000
    tensors = {
        name: torch.full((draws,), value, dtype=torch.long if name == "top_k" else torch.float32)
        for name, value in columns.items()
    }
    rows = torch.arange(1, draws, 2)  # every other one
    settings = SamplingBatch(
        temperature=torch.ones(draws), all_greedy=False, any_greedy=False, recorded=rows, **tensors
    )
    uniform = torch.from_numpy(compute_uniforms(np.full(draws, compute_random_key(7, 0)), np.arange(draws)))
    mask = torch.zeros(draws, 4, dtype=torch.bool)
    mask[:, forbidden] = True
    logits = torch.tensor([FOUR]).log().expand(draws, -1)
    draw = sample(logits, settings, uniform, forbidden=mask if forbidden else None)
    assert draw.kept is not None
    assert draw.kept.shape == (len(rows), 4)
    assert (draw.kept == torch.tensor([token in kept for token in range(4)])).all()
    assert set(draw.tokens.tolist()) == set(kept)
    total = sum(FOUR[token] for token in kept)
    expected = torch.tensor(FOUR)[draw.tokens].log()
    torch.testing.assert_close(draw.log_probs[::2], expected[::2])
    torch.testing.assert_close(draw.log_probs[rows], expected[rows] - np.log(total), atol=1e-6, rtol=0)


@pytest.fixture(scope="module")
def trainer(tiny_models: Any) -> ScoringModel:
    """The trainer's model of the same weights."""
    return ScoringModel(AutoModelForCausalLM.from_pretrained(tiny_models("qwen3")))


def assert_replayed(completion: Completion, prompt: list[int], trainer: ScoringModel, most: int = 20) -> None:
    """The trainer's log-probs over the kept tokens are the engine's; over the vocabulary they are not."""
    kept, tokens = completion.kept_tokens, completion.token_ids
    assert kept is not None and len(kept) == len(tokens)
    assert kept.first_without(tokens) is None
    assert kept.counts.min() >= 1 and kept.counts.max() <= most
    ids = torch.tensor([[*prompt, *tokens]])
    with torch.no_grad():
        columns = pad_kept_tokens([kept], len(tokens))
        replayed = trainer(ids, torch.ones_like(ids), len(tokens), 0.8, kept=columns).log_probs[0]
        whole = trainer(ids, torch.ones_like(ids), len(tokens), 0.8).log_probs[0]
    torch.testing.assert_close(replayed, torch.tensor(completion.log_probs), atol=1e-5, rtol=0)
    if len(tokens) > 8:  # 0.7 of the mass is kept at most steps: log 1/0.7 = 0.36
        assert (replayed - whole).mean() > 0.1


def test_kept_tokens_are_independent_of_batch_composition(tiny_models: Any, trainer: ScoringModel):
    """Late joiners, rows that move when others leave, and requests that record none beside those that do."""
    core = make_core(tiny_models("qwen3"), max_num_seqs=5)
    prompts = random_prompts([1, 5, 33, 40, 64, 12])
    prompts += [prompts[3], prompts[5]]
    budgets = [3, 30, 12, 25, 7, 9, 4, 18]
    plain = {name: value for name, value in RECORDED.items() if name != "return_kept_tokens"}
    requests = [
        Request(prompt, EngineSamplingParams(max_tokens=budget, **(RECORDED if index % 3 else plain)), (5, index))
        for index, (prompt, budget) in enumerate(zip(prompts, budgets, strict=True))
    ]
    completions = run(core, requests, late=requests[4:])
    for index, completion in enumerate(completions):
        if index % 3:
            assert_replayed(completion, prompts[index].tolist(), trainer)
            [alone] = run(make_core(tiny_models("qwen3"), max_num_seqs=5), [requests[index]])
            assert same_bits(alone, completion) and alone.kept_tokens == completion.kept_tokens
        else:
            assert completion.kept_tokens is None


async def test_kept_tokens_are_contiguous_after_aborting_pause(tiny_models: Any, trainer: ScoringModel):
    prompts = [PROMPT, PROMPT[:2], [*PROMPT, 11]]
    params: dict[str, Any] = dict(max_tokens=120, seed=3, ignore_eos=True, **RECORDED)
    completions = await interrupted(tiny_models("qwen3"), prompts, params)
    for prompt, completion in zip(prompts, completions, strict=True):
        assert len(completion.token_ids) == 120
        assert_replayed(completion, prompt, trainer)


def test_joined_parts_concatenate_kept_tokens():
    one, two = (KeptTokens.of([np.array(ids) for ids in sets]) for sets in ([[7], [3, 8]], [[4, 5, 9]]))
    parts = [
        Completion([7, 8], "abort", [0] * 2, kept_tokens=one),
        Completion([], "abort", []),
        Completion([5], "length", [1], kept_tokens=two),
    ]
    joined = join([1, 2, 3], parts, lambda ids: "", "length").kept_tokens
    assert joined == KeptTokens.of([np.array(ids) for ids in ([7], [3, 8], [4, 5, 9])])
    assert join([1, 2, 3], parts, lambda ids: "", "stop", num_tokens=1).kept_tokens == one.first(1)
    unknown = [parts[0], Completion([5], "length", [1])]
    assert join([1, 2, 3], unknown, lambda ids: "", "length").kept_tokens is None


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"top_k": -1}, "top_k"),
        ({"temperature": 0}, "return_kept_tokens"),
        ({"repetition_penalty": 1.2}, "repetition_penalty"),
        ({"return_kept_tokens": 1}, "return_kept_tokens"),
    ],
)
def test_settings_incompatible_with_kept_tokens_are_rejected(changes: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        EngineSamplingParams.from_dict(RECORDED | changes)


def test_vllm_and_servers_reject_kept_tokens():
    with pytest.raises(UnsupportedByEngine, match="return_kept_tokens"):
        check_and_split_seed(RECORDED)

"""Speculative decoding of the native engine: answers are the same bits as without, from fewer passes."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from native_runs import batch, engine_of, make_core, random_prompts, run, same_bits

from skyrl_train.errors import ConfigError
from skyrl_train.inference_engines.native.core import NativeEngineCore
from skyrl_train.inference_engines.native.engine import NativeInferenceEngine
from skyrl_train.inference_engines.native.requests import EngineSamplingParams, Request
from skyrl_train.inference_engines.native.speculation import MAX_NGRAM, MIN_NGRAM, SamplingPositions, find_drafts
from skyrl_train.inference_engines.request import Completion
from skyrl_train.models.routing_replay import RoutingReplay

GREEDY = EngineSamplingParams(max_tokens=60, temperature=0.0)
"""A random model's greedy answers soon repeat themselves."""


@pytest.mark.parametrize(
    ("tokens", "num", "drafts"),
    [
        ([1, 2, 3, 4, 9, 1, 2], 2, [3, 4]),
        ([1, 2, 3, 4, 9, 1, 2], 9, [3, 4, 9, 1, 2, 3, 4, 9, 1]),  # goes on periodically
        ([7, 1, 2, 3, 8, 1, 2, 4, 7, 1, 2], 1, [3]),  # the longest suffix, not the last
        ([1, 2, 3, 1, 2, 4, 1, 2], 1, [4]),  # of equal ones the last
        ([5, 5, 5], 3, [5, 5, 5]),
        ([1, 2, 3, 2], 3, []),  # one token is no evidence
        ([1], 3, []),
        ([1, 2, 1, 2], 0, []),
    ],
)
def test_look_up_proposes_tokens_after_last_match(tokens, num, drafts):
    assert find_drafts(np.array(tokens), num).tolist() == drafts


@given(st.lists(st.integers(0, 2), min_size=1, max_size=40), st.integers(0, 6))
def test_look_up_finds_longest_matching_suffix(tokens, num):
    def ends(size: int) -> list[int]:
        return [end for end in range(size, len(tokens)) if tokens[end - size : end] == tokens[-size:]]

    found = next((ends(size) for size in range(MAX_NGRAM, MIN_NGRAM - 1, -1) if ends(size)), [])
    sequence = list(tokens)
    for index in range(num if found else 0):
        sequence.append(sequence[found[-1] + index])
    assert find_drafts(np.array(tokens), num).tolist() == sequence[len(tokens) :]


def test_drafts_are_accepted_up_to_first_mismatch():
    drafts = [np.array(own, np.int64) for own in ([5, 6], [], [7, 8, 9], [4])]
    places = SamplingPositions.from_drafts(drafts)
    assert places.rows.tolist() == [0, 0, 0, 1, 2, 2, 2, 2, 3, 3]
    assert places.offsets.tolist() == [0, 1, 2, 0, 0, 1, 2, 3, 0, 1]
    drawn = np.array([5, 6, 1, 3, 7, 0, 9, 2, 0, 4])
    assert places.compute_accepted(drafts, drawn).tolist() == [True] * 6 + [False] * 2 + [True, False]


def answers(
    path: str, requests: list[Request], num_draft_tokens: int, **settings: Any
) -> tuple[list[Completion], NativeEngineCore]:
    core = make_core(path, num_draft_tokens=num_draft_tokens, **settings)
    if core.model.config.model_type == "qwen3_moe":
        routing = RoutingReplay(core.model, "trainer.policy.routing_replay")
        own: dict[str, Any] = {"max_num_seqs": 8, "eos_ids": (), "decode": str, "num_draft_tokens": num_draft_tokens}
        core = NativeEngineCore(core.model, max_model_len=512, routing=routing, **own)
    fresh = [replace(request) for request in requests]
    return run(core, fresh, late=fresh[1::3]), core


def check_same(path: str, requests: list[Request], num_draft_tokens: int = 4, **settings: Any) -> list[Completion]:
    """Check that answers are the same bits with and without drafts; return those with drafts."""
    plain, core = answers(path, requests, 0, **settings)
    drafted, faster = answers(path, requests, num_draft_tokens, **settings)
    for expected, answer in zip(plain, drafted, strict=True):
        assert same_bits(answer, expected) and answer.stop_reason == expected.stop_reason
        assert answer.kept_tokens == expected.kept_tokens
        assert answer.routes == expected.routes
    assert faster.num_forwards < core.num_forwards
    return drafted


def requests_of(*params: EngineSamplingParams, repeats: int = 6) -> list[Request]:
    """Prompts that repeat themselves, of many lengths, one for each of `params`."""
    prompts = [np.tile(prompt, repeats) for prompt in random_prompts([3 + 5 * index for index in range(len(params))])]
    return [Request(prompt, own, (3, index)) for index, (prompt, own) in enumerate(zip(prompts, params, strict=True))]


@pytest.mark.first_case
@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3_moe", "qwen2_window"])
def test_drafts_keep_completions_bit_exact(tiny_models, name):
    sampled = EngineSamplingParams(max_tokens=50, temperature=0.2)
    params = [GREEDY, sampled, replace(GREEDY, max_tokens=9), replace(sampled, top_p=0.7), GREEDY, sampled]
    drafted = check_same(tiny_models(name), requests_of(*params))
    counts = [answer.drafts for answer in drafted if answer.drafts is not None]
    assert len(counts) == len(params)
    assert 0 < sum(own.num_accepted for own in counts) <= sum(own.num_drafted for own in counts)


def test_per_token_settings_apply_to_drafts(tiny_models):
    path = tiny_models("qwen3")
    [plain], _ = answers(path, requests_of(GREEDY), 0)
    loop = plain.token_ids[-1]
    kept = EngineSamplingParams(max_tokens=30, temperature=0.3, top_k=5, top_p=0.9, return_kept_tokens=True)
    params = [
        replace(GREEDY, stop=(chr(loop) * 3,)),
        replace(GREEDY, stop_token_ids=(loop,), min_tokens=30),
        replace(GREEDY, stop_token_ids=(loop,)),
        replace(GREEDY, repetition_penalty=1.3),
        kept,
        replace(kept, return_kept_tokens=False),
        GREEDY,
        GREEDY,
        GREEDY,
    ]
    requests = [replace(request, prompt=requests_of(GREEDY)[0].prompt) for request in requests_of(*params)]
    drafted = check_same(path, requests)
    assert drafted[2].stop_reason == "stop" and drafted[2].token_ids[-1] == loop
    assert drafted[3].drafts == (0, 0) and drafted[4].drafts == (0, 0)


@pytest.mark.slow
def test_drafts_respect_context_and_cache_limits(tiny_models):
    """Drafts never take more places in the cache than answers may."""
    requests = requests_of(*[replace(GREEDY, max_tokens=None)] * 3, repeats=20)
    drafted = check_same(tiny_models("qwen3"), requests, num_draft_tokens=7, max_cache_tokens=4 * 512)
    assert [len(answer.token_ids) + len(request.prompt) for request, answer in zip(requests, drafted, strict=True)] == [
        512
    ] * 3


def test_no_drafts_above_running_request_limit(tiny_models):
    requests = requests_of(GREEDY, GREEDY, replace(GREEDY, max_tokens=5))
    drafted, _ = answers(tiny_models("qwen3"), requests, 4, max_drafting=2)
    assert sum(answer.drafts.num_drafted for answer in drafted if answer.drafts) > 0  # once one has ended
    some, _ = answers(tiny_models("qwen3"), requests, 4, max_drafting=0)
    assert [answer.drafts for answer in some] == [(0, 0)] * 3


def test_new_weights_apply_from_next_pass(tiny_models):
    """Drafts are made and verified within a step, between two updates."""

    def answer(num_draft_tokens: int) -> Completion:
        core = make_core(tiny_models("qwen3"), num_draft_tokens=num_draft_tokens)
        [request] = requests_of(replace(GREEDY, max_tokens=200))
        core.add_request(request)
        done: dict[Request, Any] = {}
        while not done and core._rows.length[: len(core._rows)].max(initial=0) < len(request.prompt) + 50:
            done = core.step()
        with torch.no_grad():
            core.model.lm_head.weight.neg_()  # pyright: ignore
        core.update_version(1)
        while not done:
            done = core.step()
        return done[request]

    plain, drafted = answer(0), answer(4)
    first_new = drafted.weight_versions.index(1)
    assert plain.weight_versions[:50] == [0] * 50 and 50 <= first_new < 55
    assert drafted.weight_versions == [0] * first_new + [1] * (200 - first_new)
    assert drafted.token_ids[:50] == plain.token_ids[:50]


def test_nan_weights_fail_drafted_request_and_leave_no_state(tiny_models):
    [request] = requests_of(GREEDY)
    [expected], core = answers(tiny_models("qwen3"), [request], 4)
    core.add_request(request)
    for _ in range(10):
        assert not core.step()
    weight = next(p for name, p in core.model.named_parameters() if name.endswith("v_proj.weight"))
    kept = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(torch.nan)
    assert isinstance(core.step()[request], FloatingPointError)
    with torch.no_grad():
        weight.copy_(kept)
    assert same_bits(run(core, [replace(request)])[0], expected)


@pytest.mark.parametrize("setting", ["num_speculative_tokens", "speculative_max_seqs"])
def test_negative_settings_are_rejected(setting: str):
    given: dict[str, Any] = {setting: -1}
    with pytest.raises(ConfigError, match=f"{setting}.* must not be negative; got .*-1"):
        NativeInferenceEngine("never read", **given)


async def test_engine_stops_drafting_above_request_limit(tiny_models):
    [request] = requests_of(GREEDY)
    asked = batch(request.prompt.tolist(), max_tokens=60, temperature=0.0) | {"count_cached_tokens": True}
    drafted = []
    for max_seqs in (0, 1):
        settings: dict[str, Any] = {"num_speculative_tokens": 3, "speculative_max_seqs": max_seqs}
        async with engine_of(tiny_models("qwen3"), **settings) as engine:
            drafted.append((await engine.generate_batch(asked))["draft_counts"][0].num_drafted)  # pyright: ignore
    assert drafted[0] == 0 < drafted[1]

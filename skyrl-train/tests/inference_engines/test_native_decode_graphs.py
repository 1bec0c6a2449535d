"""Decoding by replay over fixed buffers: the same completions as decoding kernel by kernel, in float32 with the same
bits. On a CPU the replay is a direct call, which fails where a graph could not be captured or would be stale
(`check_captures`)."""

from typing import Any

import numpy as np
import pytest
import torch
from native_runs import (
    PROMPT,
    check_captures,
    completions_of,
    engine_of,
    make_core,
    random_prompts,
    run,
    same_bits,
    way_to,
)

from skyrl_train.inference_engines.native import loading
from skyrl_train.inference_engines.native.core import NativeEngineCore
from skyrl_train.inference_engines.native.decode_graphs import pad_size
from skyrl_train.inference_engines.native.device_copies import _join_columns, _split_columns, upload
from skyrl_train.inference_engines.native.requests import EngineSamplingParams, Request

PARAMS: list[dict[str, Any]] = [
    dict(temperature=0.0),
    dict(top_p=0.8),
    dict(top_k=5, temperature=0.7),
    dict(repetition_penalty=1.3, logprobs=2),
]


def requests_of(lengths: list[int], seed: int = 5) -> list[Request]:
    """Requests of these prompts that end at different times, with different settings."""
    budgets = np.random.default_rng(1).integers(3, 40, len(lengths)).tolist()
    return [
        Request(prompt, EngineSamplingParams(max_tokens=budget, **PARAMS[index % len(PARAMS)]), (seed, index))
        for index, (prompt, budget) in enumerate(zip(random_prompts(lengths), budgets, strict=True))
    ]


def num_captured(core: NativeEngineCore) -> int:
    graphs = core._runner.graphs
    return 0 if graphs is None else graphs.num_captured


def peak_captured(core: NativeEngineCore, requests: list[Request], late: list[Request]) -> tuple[list[Any], int]:
    """Return completions, and the largest number of passes captured at a time."""
    peaks = [0]
    step = core.step

    def counted(**keywords: bool) -> Any:
        outcomes = step(**keywords)
        peaks.append(num_captured(core))
        return outcomes

    core.step = counted  # pyright: ignore[reportAttributeAccessIssue]
    return run(core, requests, late), max(peaks)


@pytest.mark.parametrize(
    ("size", "smallest", "padded"),
    [(1, 4, 4), (5, 4, 6), (7, 4, 8), (9, 4, 12), (13, 4, 16), (17, 4, 24), (100, 4, 128), (300, 256, 384)],
)
def test_padded_size_is_next_of_two_per_octave(size: int, smallest: int, padded: int):
    assert pad_size(size, smallest) == padded


@pytest.mark.parametrize(
    "lengths",
    [
        pytest.param([9], id="one"),
        pytest.param([1, 2, 5, 31, 32], id="few"),
        pytest.param([1, 2, 5, 31, 32, 33, 40, 64, 65, 120, 127, 129, 200, 250, 310, 12, 17], id="many"),
    ],
)
@pytest.mark.parametrize("name", ["qwen3", "qwen2_window"])
def test_replay_keeps_bits_while_requests_join_and_leave(tiny_models, name, lengths):
    requests = requests_of(lengths)
    expected = run(make_core(tiny_models(name)), requests, late=requests[1::2])
    core = make_core(tiny_models(name), use_graphs=True)
    again, peak = peak_captured(core, requests, requests[1::2])
    assert all(map(same_bits, again, expected))
    for one, other in zip(again, expected, strict=True):
        np.testing.assert_equal(one.top, other.top)
    assert peak > 0


def test_growing_cache_drops_captured_passes(tiny_models):
    """Three long requests are decoded alone, then among others, then alone again, in passes of the same shape."""
    params, own = EngineSamplingParams(max_tokens=30), EngineSamplingParams(max_tokens=3)
    long = [Request(prompt, params, (1, i)) for i, prompt in enumerate(random_prompts([300] * 3))]
    short = [Request(prompt, own, (2, i)) for i, prompt in enumerate(random_prompts([9] * 6))]
    completions = []
    for use_graphs in (False, True):
        core, done = make_core(tiny_models("qwen3"), use_graphs=use_graphs), {}
        for request in long:
            core.add_request(request)
        for _ in range(5):
            done |= core.step()
        assert (num_captured(core) > 0) == use_graphs
        for request in short:
            core.add_request(request)
        while core.num_running or core.num_waiting:
            done |= core.step()
        completions.append([done[request] for request in (*long, *short)])
    assert all(map(same_bits, *completions))


def test_replay_is_limited_to_the_rows_of_the_cache(tiny_models):
    requests = requests_of([20, 30, 40, 50, 60, 70, 80])
    expected = run(make_core(tiny_models("qwen3")), requests)
    core = make_core(tiny_models("qwen3"), use_graphs=True, max_num_seqs=5, max_cache_tokens=8 * 128)
    assert all(map(same_bits, run(core, requests), expected))


def test_replay_continues_cached_prefixes(tiny_models):
    """Of completions too: the second turn begins with the first one's prompt and completion."""
    outcomes = []
    for use_graphs in (False, True):
        core = make_core(tiny_models("qwen3"), use_graphs=use_graphs)
        first = requests_of([40, 90, 150, 33])
        turns = run(core, first)
        second = [
            Request(
                np.concatenate([request.prompt, turn.token_ids, [7, 8]]), EngineSamplingParams(max_tokens=9), (3, i)
            )
            for i, (request, turn) in enumerate(zip(first, turns, strict=True))
        ]
        outcomes.append([*turns, *run(core, second)])
        assert all(turn.num_cached_prompt_tokens for turn in outcomes[-1][len(first) :])
    assert all(map(same_bits, *outcomes))


def test_replay_keeps_half_precision_results(tiny_models):
    """In bfloat16 kernels depend on the number of keys: greedy tokens and close log-probs, not the same bits."""
    prompts = random_prompts([20, 30, 40])
    requests = [Request(prompt, EngineSamplingParams(max_tokens=20, temperature=0.0), (0, 0)) for prompt in prompts]
    expected = run(make_core(tiny_models("qwen3"), "bfloat16"), requests)
    replayed = run(make_core(tiny_models("qwen3"), "bfloat16", use_graphs=True), requests)
    for one, other in zip(replayed, expected, strict=True):
        same = np.array(one.token_ids) == np.array(other.token_ids)
        agreed = len(same) if same.all() else int(same.argmin())  # later tokens follow other ones
        assert agreed > 0
        np.testing.assert_allclose(one.log_probs[:agreed], other.log_probs[:agreed], atol=0.05)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "qwen2_window"])
def test_pass_of_transformers_layers_can_be_captured(tiny_models, name, monkeypatch):
    """On a GPU decoders are not fused, and attention is torch's."""
    monkeypatch.setattr(loading, "fuse_layers", lambda model: None)
    monkeypatch.setattr(loading, "pack_linears", lambda model: None)
    core = make_core(tiny_models(name), "bfloat16", use_graphs=True)
    requests = requests_of([9, 30, 50])
    assert all(completion.token_ids for completion in run(core, requests))


@pytest.mark.parametrize("setting", [dict(num_draft_tokens=3), dict(max_prefix_tokens=0), dict(max_prefill_tokens=64)])
def test_replay_keeps_bits_with_other_features(tiny_models, setting):
    """Passes with drafts are wider, and are not replayed."""
    requests = [
        Request(np.tile(prompt, 3), EngineSamplingParams(max_tokens=30, temperature=0.0), (0, 0))
        for prompt in random_prompts([9, 30, 50])
    ]
    expected = run(make_core(tiny_models("qwen3")), requests)
    assert all(map(same_bits, run(make_core(tiny_models("qwen3"), use_graphs=True, **setting), requests), expected))


def test_mixture_decodes_without_graphs_and_says_why(tiny_models, caplog):
    with caplog.at_level("INFO"):
        core = make_core(tiny_models("qwen3_moe"), use_graphs=True)
    assert core._runner.graphs is None
    assert "without CUDA graphs" in caplog.text and "mixture" in caplog.text


async def test_replay_uses_updated_weights_and_survives_sleep(tiny_models, tmp_path):
    """An update in place keeps captured passes; a sleep drops them with the memory that they use."""
    path, prompts = tiny_models("qwen3"), [PROMPT, PROMPT[:2], [3, 4, 5, 6, 7, 8]]
    params = dict(max_tokens=24, temperature=1.0, seed=3)
    async with engine_of(path, enforce_eager=True) as eager, engine_of(path, enforce_eager=False) as engine:
        weights = {name: tensor.clone() for name, tensor in engine._core.model.named_parameters()}
        changed = {name: tensor * 1.3 for name, tensor in weights.items()}
        check_captures(engine._core)
        async with way_to(eager, tmp_path / "one") as one, way_to(engine, tmp_path / "two") as two:
            before = await completions_of(engine, *prompts, **params)
            assert all(map(same_bits, before, await completions_of(eager, *prompts, **params)))
            for each in (one, two):
                await each.send(changed, version=1)
            assert num_captured(engine._core) > 0
            after = await completions_of(engine, *prompts, **params)
            assert all(map(same_bits, after, await completions_of(eager, *prompts, **params)))
            assert not any(map(same_bits, after, before))
            for level in (1, 2):
                await engine.sleep(level)
                assert num_captured(engine._core) == 0
                await engine.wake_up()
                if level == 2:
                    await two.send(changed, version=2)
                assert all(map(same_bits, await completions_of(engine, *prompts, **params), after))


def test_columns_of_a_download_keep_values():
    """On a GPU all sampled values are one copy, in float64."""
    tokens = torch.tensor([2**31, 7, 0])
    log_probs = torch.tensor([-1.1, -torch.inf, torch.nan])
    top = torch.randn(3, 2)
    parts = _split_columns(_join_columns([tokens, log_probs, top]), [tokens, log_probs, top])
    for part, own in zip(parts, [tokens, log_probs, top], strict=True):
        np.testing.assert_array_equal(part, own.numpy())
        assert part.dtype == own.numpy().dtype
    np.testing.assert_array_equal(upload(np.arange(3), torch.device("cpu")).numpy(), np.arange(3))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["qwen3", "qwen2_window"])
def test_graphs_equal_eager_kernels_on_a_gpu(tiny_models, name):
    requests = [
        Request(prompt, EngineSamplingParams(max_tokens=40, temperature=0.0), (0, 0))
        for prompt in random_prompts([9, 30, 50, 70, 90])
    ]
    completions = []
    for use_graphs in (False, True):
        core = make_core(tiny_models(name), use_graphs=use_graphs, device="cuda:0")
        outcome, peak = peak_captured(core, requests, requests[1::2])
        assert (peak > 0) == use_graphs
        completions.append(outcome)
        core.release_cache()
    for one, other in zip(*completions, strict=True):
        assert one.token_ids == other.token_ids
        np.testing.assert_allclose(one.log_probs, other.log_probs, atol=1e-4)

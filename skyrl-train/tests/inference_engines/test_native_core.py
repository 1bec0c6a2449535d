"""The core compared with transformers, and its promise: results do not depend on co-batched requests, bit for bit.
(What ends an answer, and what log-probs are of: `test_conformance_native.py`.)"""

import math
from typing import Any

import numpy as np
import pytest
import torch
from native_runs import log_probs_of, make_core, random_prompts, run, same_bits
from transformers import AutoModelForCausalLM

from skyrl_train.errors import ConfigError
from skyrl_train.inference_engines.native import packed_linear
from skyrl_train.inference_engines.native.attention import SharedKeys
from skyrl_train.inference_engines.native.core import NativeEngineCore
from skyrl_train.inference_engines.native.packed_linear import can_pack, find_stale_copies, pack_linears
from skyrl_train.inference_engines.native.requests import EngineSamplingParams, PromptScoring, Request
from skyrl_train.inference_engines.request import Completion
from skyrl_train.weight_sync.fingerprint import VerificationSample

ARCHITECTURES = ["llama", "qwen2", "qwen3", "qwen3_moe", "qwen2_window"]
CPU = torch.device("cpu")
DAILY = ARCHITECTURES[2:]  # parts of the other two are in these: biases, an output layer of its own


def each_architecture(*values: object) -> list[Any]:
    """Each name with these values, the ones that are not daily marked slow."""
    return [pytest.param(name, *values, marks=[] if name in DAILY else pytest.mark.slow) for name in ARCHITECTURES]


CPU = torch.device("cpu")


@pytest.mark.first_case
@pytest.mark.parametrize("name", each_architecture())
def test_greedy_completions_equal_transformers_generate(tiny_models, name):
    """Log-probs equal those of one plain forward pass over prompt and response, too."""
    reference = AutoModelForCausalLM.from_pretrained(tiny_models(name))
    prompts = random_prompts([1, 2, 7, 33, 64, 150])
    params = EngineSamplingParams(max_tokens=40, temperature=0.0)
    answers = run(make_core(tiny_models(name)), [Request(prompt, params, (0, 0)) for prompt in prompts])
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.from_numpy(prompt)[None]
        expected = reference.generate(ids, max_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert answer.token_ids == expected[0, len(prompt) :].tolist()
        _, log_probs = log_probs_of(reference, prompt, answer.token_ids)
        torch.testing.assert_close(torch.tensor(answer.log_probs), log_probs, atol=1e-5, rtol=0)


@pytest.fixture
def packed(request, monkeypatch) -> bool:
    """Return True if layers are packed, however small."""
    monkeypatch.setattr(packed_linear, "SMALLEST", 0 if request.param else math.inf)
    return request.param


@pytest.mark.first_case
@pytest.mark.parametrize(("name", "packed"), [*each_architecture(False), ("qwen3", True)], indirect=["packed"])
def test_request_is_bit_exact_alone_and_batched(tiny_models, name, packed):
    """Lengths from 1 to past the attention's chunks; half of the requests join later; they end at different times."""
    lengths = [1, 2, 5, 31, 32, 33, 40, 64, 65, 120, 127, 129, 200, 250, 310, 12, 17]
    prompts = random_prompts(lengths)
    budgets = np.random.default_rng(1).integers(3, 20, len(prompts)).tolist()
    requests = [
        Request(prompt, EngineSamplingParams(max_tokens=budget, temperature=1.0 if index % 3 else 0.0), (5, index))
        for index, (prompt, budget) in enumerate(zip(prompts, budgets, strict=True))
    ]
    core_alone, crowd = make_core(tiny_models(name)), make_core(tiny_models(name))
    alone = [run(core_alone, [request])[0] for request in requests]

    for request, answer, expected in zip(requests, run(crowd, requests, late=requests[1::2]), alone, strict=True):
        assert same_bits(answer, expected), f"prompt of {len(request.prompt)} tokens"


@pytest.fixture
def lengths_shared(monkeypatch) -> list[int]:
    """Numbers of keys that decoding read once for several rows, one for each pass and layer that did."""
    lengths: list[int] = []

    def weighted(shared: SharedKeys, *arguments: Any) -> torch.Tensor:
        lengths.append(shared.length)
        return apply(shared, *arguments)

    apply = SharedKeys.apply
    monkeypatch.setattr(SharedKeys, "apply", weighted)
    return lengths


def beginning_alike(beginnings: list[np.ndarray], count: int) -> list[np.ndarray]:
    """Return `count` prompts behind each beginning, every second one equal to it, the others of further tokens."""
    further = random_prompts([1 + 7 * index for index in range(count)], seed=3)
    return [
        np.concatenate([beginning, further[index]]) if index % 2 else beginning
        for beginning in beginnings
        for index in range(count)
    ]


@pytest.mark.first_case
@pytest.mark.parametrize(("name", "drafts"), [*each_architecture(0), ("qwen3", 3)])
def test_shared_prefix_keys_keep_outputs_bit_exact(tiny_models, name, drafts, lengths_shared):
    """Two groups and a row of its own, whose prompt is shorter than what the groups share."""
    core_alone, crowd = make_core(tiny_models(name)), make_core(tiny_models(name), num_draft_tokens=drafts)
    prompts = [*beginning_alike(random_prompts([290, 300]), 4), *random_prompts([70], seed=9)]
    requests = [
        Request(
            prompt, EngineSamplingParams(max_tokens=9 + 2 * index, temperature=1.0 if index % 3 else 0.0), (5, index)
        )
        for index, prompt in enumerate(prompts)
    ]
    alone = [run(core_alone, [request])[0] for request in requests]
    assert not lengths_shared
    answers = run(crowd, requests, late=requests[1::3])

    assert set(lengths_shared) == {256}
    for request, answer, expected in zip(requests, answers, alone, strict=True):
        assert same_bits(answer, expected), f"prompt of {len(request.prompt)} tokens"


@pytest.mark.parametrize("version", [1, 0])  # 0: another update to the version that was there
def test_weight_update_invalidates_shared_prefix_keys(tiny_models, lengths_shared, version):
    core = make_core(tiny_models("qwen3"))
    [prompt] = random_prompts([200])
    before, after = [[Request(prompt, EngineSamplingParams(max_tokens=12), (5, i)) for i in (a, a + 1)] for a in (0, 2)]
    expected = run(make_core(tiny_models("qwen3")), before)
    done = {}
    for request in before:
        core.add_request(request)
    done |= core.step()
    with torch.inference_mode():
        for parameter in core.model.parameters():
            parameter.mul_(1.01)
    core.update_version(version)
    for request in after:
        core.add_request(request)
    done |= core.step()
    assert [sorted(rows.tolist()) for rows in core._rows.get_shared_keys(4).groups] == [[0, 1], [2, 3]]
    while core.num_running:
        done |= core.step()
    assert done[before[0]].token_ids[:1] == expected[0].token_ids[:1]
    fresh = make_core(tiny_models("qwen3"))
    with torch.inference_mode():
        for parameter in fresh.model.parameters():
            parameter.mul_(1.01)
    assert all(same_bits(done[request], alone) for request, alone in zip(after, run(fresh, after), strict=True))


_CORES: dict[str, NativeEngineCore] = {}


def make_core_cached(path: str) -> NativeEngineCore:
    """One core serves all lone requests: what an earlier request left in the cache must not matter either."""
    if path not in _CORES:
        _CORES[path] = make_core(path)
    return _CORES[path]


@pytest.mark.first_case
@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_resubmitted_aborted_request_continues_bit_exactly(tiny_models, name):
    """The request contains its tokens behind the prompt: random numbers are the same, and prefill computes what
    decoding had computed.
    """
    core = make_core_cached(tiny_models(name))
    [prompt] = random_prompts([50])
    whole = run(core, [Request(prompt, EngineSamplingParams(max_tokens=120), (9, 4))])[0]
    first = Request(prompt, EngineSamplingParams(max_tokens=120), (9, 4))
    core.add_request(first)
    for _ in range(37):
        core.step()
    part = core.abort([first])[first]
    assert isinstance(part, Completion)
    assert part.stop_reason == "abort" and len(part.token_ids) == 37
    longer = np.concatenate([prompt, part.token_ids])
    rest = run(core, [Request(longer, EngineSamplingParams(max_tokens=120 - 37), (9, 4))])[0]
    assert part.token_ids + rest.token_ids == whole.token_ids
    assert part.log_probs + rest.log_probs == whole.log_probs


def test_samples_of_same_prompt_prefill_once(tiny_models):
    prompts = random_prompts([40, 30])
    params = EngineSamplingParams(max_tokens=20)
    apart = [run(make_core(tiny_models("qwen3")), [Request(p, params, (0, i))])[0] for i, p in enumerate(prompts * 4)]
    core = make_core(tiny_models("qwen3"))
    requests = [Request(prompt, params, (0, index)) for index, prompt in enumerate(prompts * 4)]
    for request in requests[:5]:
        core.add_request(request)
    done = core.step()
    for request in requests[5:]:
        core.add_request(request)
    while core.num_running or core.num_waiting:
        done |= core.step()
    assert core.num_prompt_tokens_computed == 40 + 30 + 3, "of those that come later, the last token"
    assert all(same_bits(done[request], expected) for request, expected in zip(requests, apart, strict=True))


@pytest.mark.first_case
@pytest.mark.parametrize("name", each_architecture())
def test_prompt_scores_use_temperature_and_equal_decoding(tiny_models, name):
    """Scored beside others: the log-probs that were reported when the same tokens were drawn, and the likeliest."""
    core = make_core_cached(tiny_models(name))
    prompts = random_prompts([3, 40, 130, 20])
    params = EngineSamplingParams(max_tokens=150, temperature=0.7)
    written = run(core, [Request(prompt, params, (2, index)) for index, prompt in enumerate(prompts)])
    texts = [np.concatenate([p, answer.token_ids]) for p, answer in zip(prompts, written, strict=True)]
    one = EngineSamplingParams(max_tokens=1, temperature=2.0)
    requests = [
        Request(text, one, (2, 0), scoring=PromptScoring(temperature=0.7, num_top=[0, 3][index % 2]))
        for index, text in enumerate(texts)
    ]
    scored = run(core, requests)
    for index, (prompt, answer, score, request) in enumerate(zip(prompts, written, scored, requests, strict=True)):
        assert score.prompt_log_probs[len(prompt) - 1 :] == answer.log_probs
        scores = request.prompt_scores
        assert scores is not None and scores.top_ids.shape == (len(prompt) + 149, [0, 3][index % 2])
        if index % 2:
            is_best = texts[index][1:] == scores.top_ids[:, 0]
            assert is_best.any() and (scores.log_probs[is_best] == scores.top_log_probs[is_best, 0]).all()
            assert (scores.log_probs <= scores.top_log_probs[:, 0]).all()
            assert (np.diff(scores.top_log_probs) <= 0).all()


def test_prompts_differing_in_last_token_share_prefix(tiny_models):
    [prompt] = random_prompts([40])
    other = np.append(prompt[:-1], (prompt[-1] + 1) % 62)
    requests = [
        Request(ids, EngineSamplingParams(max_tokens=10), (0, i)) for i, ids in enumerate((prompt, other, prompt))
    ]
    expected = [run(make_core_cached(tiny_models("qwen3")), [request])[0] for request in requests]
    core = make_core(tiny_models("qwen3"))
    together = run(core, requests)
    assert core.num_prompt_tokens_computed == 40 + 1
    assert all(same_bits(one, alone) for one, alone in zip(together, expected, strict=True))


def test_requests_beyond_num_rows_wait(tiny_models):
    core = make_core(tiny_models("llama"), max_num_seqs=3)
    requests = [
        Request(prompt, EngineSamplingParams(max_tokens=4 + index), (0, index))
        for index, prompt in enumerate(random_prompts([5] * 8))
    ]
    for request in requests:
        core.add_request(request)
    most, ended = 0, []
    while core.num_running or core.num_waiting:
        ended += core.step().values()
        most = max(most, core.num_running)
    assert most == 3
    assert sorted(len(completion.token_ids) for completion in ended) == list(range(4, 12))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_log_probs_are_close_to_float32(tiny_models, dtype):
    [prompt] = random_prompts([30])
    params = EngineSamplingParams(max_tokens=1, temperature=0.0)
    full = run(make_core(tiny_models("qwen3")), [Request(prompt, params, (0, 0))])[0]
    half = run(make_core(tiny_models("qwen3"), dtype=dtype), [Request(prompt, params, (0, 0))] * 1)[0]
    assert half.token_ids == full.token_ids
    assert half.log_probs == pytest.approx(full.log_probs, abs=0.1)


@pytest.mark.parametrize("packed", [False, True], indirect=True)
def test_nan_weights_fail_request_and_leave_no_state(tiny_models, packed):
    core = make_core(tiny_models("qwen3"))
    requests = [Request(prompt, EngineSamplingParams(max_tokens=5), (0, 0)) for prompt in random_prompts([40])]
    good = run(core, requests)[0]
    weight = next(p for name, p in core.model.named_parameters() if name.endswith("v_proj.weight"))
    kept = weight.clone()
    weight.fill_(float("nan"))
    pack_linears(core.model)
    bad = run(core, requests)[0]
    assert isinstance(bad, FloatingPointError)
    weight.copy_(kept)
    pack_linears(core.model)
    assert same_bits(run(core, requests)[0], good)


def test_nan_weights_leave_no_state_of_chunked_prompt(tiny_models):
    core = make_core(tiny_models("qwen3"), max_prefill_tokens=64)
    short, long = (Request(p, EngineSamplingParams(max_tokens=5), (0, 0)) for p in random_prompts([5, 200]))
    [good] = run(core, [short])
    weight = next(p for name, p in core.model.named_parameters() if name.endswith("v_proj.weight"))
    kept = weight.clone()
    weight.fill_(float("nan"))
    core.add_request(long)
    core.step()
    assert long.num_chunked == 64
    core.abort([long])
    weight.copy_(kept)
    core.update_version(1)
    assert same_bits(run(core, [short])[0], good)


def cache_bytes(core: NativeEngineCore) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in core._cache.tensors())


def test_peak_memory_is_released_after_smaller_batch(tiny_models):
    core = make_core(tiny_models("qwen3"))

    def requests(num: int, length: int) -> list[Request]:
        return [
            Request(p, EngineSamplingParams(max_tokens=9), (0, i)) for i, p in enumerate(random_prompts([length] * num))
        ]

    many, few = requests(8, 200), requests(3, 20)
    expected, peak = run(core, many), cache_bytes(core)
    run(core, many[:6])
    assert cache_bytes(core) == peak  # three quarters of it were used
    run(core, few)
    assert cache_bytes(core) == peak / 16  # 4 rows of 32 tokens, of 8 of 256
    # Grown again, with prefixes kept from before: the same bits.
    assert all(same_bits(one, other) for one, other in zip(run(core, many), expected, strict=True))
    assert cache_bytes(core) == peak


def test_unknown_dtype_raises_config_error(tiny_models):
    with pytest.raises(ConfigError, match=r"dtype .*'int8'"):
        make_core(tiny_models("qwen3"), dtype="int8")


@pytest.mark.skipif(not can_pack(), reason="this torch packs no linear layers")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stale_packed_copy_is_named(bias: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(packed_linear, "SMALLEST", 0)
    model = torch.nn.Sequential(torch.nn.Linear(40, 24, bias=bias), torch.nn.Linear(24, 8, bias=bias)).to(dtype)
    x = torch.randn(9, 40).to(dtype)
    plain = model(x)
    pack_linears(model)
    # In bfloat16 the default is oneDNN as well, which packs the weights anew at each call: the same bits.
    assert model(x).equal(plain) or dtype == torch.float32
    sampling = VerificationSample(1, "sampled")
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("oneDNN has no bfloat16 on this processor")
    assert find_stale_copies(model, sampling) == []
    with torch.no_grad():  # a neighbour of the number
        model[1].weight.view(torch.int32 if dtype == torch.float32 else torch.int16)[5, 7] += 1
    assert find_stale_copies(model, sampling) == ["1"]
    pack_linears(model)
    assert find_stale_copies(model, sampling) == []

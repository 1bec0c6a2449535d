"""Promises of `asample`, compared with transformers and peft: temperature, truncation, stops, seeds, prompt scores."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from peft import PeftModel
from random_data import PROMPT, spec
from transformers import AutoModelForCausalLM, AutoTokenizer

from tx.errors import ModelError
from tx.tinker.types import PromptTargets, SampleOutput, SampleSpec

EOS = 1


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_model).eval()


def log_softmax(model: Any, ids: list[int], temperature: float = 1.0) -> torch.Tensor:
    """[len(ids) - 1, V]: row i is of the token that follows the first i + 1."""
    with torch.no_grad():
        return (model(torch.tensor([ids])).logits[0, :-1] / temperature).log_softmax(-1)


def of_tokens(model: Any, ids: list[int], temperature: float = 1.0) -> torch.Tensor:
    return log_softmax(model, ids, temperature).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


def close(values: list[float], expected: torch.Tensor) -> None:
    torch.testing.assert_close(torch.tensor(values), expected, atol=1e-4, rtol=0)


async def test_temperature_zero_is_greedy_with_log_probs_at_one(sampling, reference):
    [sequence] = (await sampling.sample(spec(temperature=0.0), None)).sequences
    scores = log_softmax(reference, PROMPT + sequence.tokens)[len(PROMPT) - 1 :]
    assert sequence.tokens == scores.argmax(-1).tolist() and sequence.stop_reason == "length"
    close(sequence.logprobs, scores.amax(-1))


async def test_log_probs_are_tempered_and_taken_before_truncation(sampling, reference):
    output = await sampling.sample(spec(num_samples=8, temperature=0.6, top_k=5, top_p=0.8), None)
    for sequence in output.sequences:
        scores = log_softmax(reference, PROMPT + sequence.tokens, 0.6)[len(PROMPT) - 1 :]
        chosen = torch.tensor(sequence.tokens)[:, None]
        close(sequence.logprobs, scores.gather(1, chosen)[:, 0])
        best = scores.topk(5).values  # of these the nucleus is what holds 0.8 of their sum
        likelier = (best.exp() * (best > scores.gather(1, chosen))).sum(-1) / best.exp().sum(-1)
        assert (scores.gather(1, chosen) >= best[:, -1:]).all() and (likelier < 0.8).all()


async def test_samples_differ_and_are_reproducible_for_any_batch(sampling):
    eight = (await sampling.sample(spec(num_samples=8), None)).sequences
    three = (await sampling.sample(spec(num_samples=3), None)).sequences
    other = (await sampling.sample(spec(num_samples=8, seed=4), None)).sequences
    assert len({tuple(sequence.tokens) for sequence in eight + other}) == 16
    assert three == eight[:3]


async def test_end_of_sequence_stops_only_without_requested_stops(sampling):
    ends = (await sampling.sample(spec(num_samples=24, max_tokens=150, stop_at_eos=True), None)).sequences
    goes_on = (await sampling.sample(spec(num_samples=24, max_tokens=150), None)).sequences
    stopped = [sequence for sequence in ends if sequence.stop_reason == "stop"]
    assert stopped and all(sequence.tokens.index(EOS) == len(sequence.tokens) - 1 for sequence in stopped)
    for short, long in zip(ends, goes_on, strict=True):
        assert len(long.tokens) == 150 and long.stop_reason == "length"
        assert long.tokens[: len(short.tokens)] == short.tokens and long.logprobs[: len(short.tokens)] == short.logprobs


@pytest.mark.first_case
@pytest.mark.parametrize("kind", ["token", "text", "special token as text"])
async def test_stop_keeps_completing_token(sampling, tiny_model, kind):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    [plain] = (await sampling.sample(spec(max_tokens=120, seed=5), None)).sequences
    place = {"token": 4, "text": 7, "special token as text": next(i for i, t in enumerate(plain.tokens) if t < 3)}
    before, last = plain.tokens[place[kind] - 1 : place[kind] + 1]
    stops = {
        "token": {"stop_token_ids": (last,)},
        "text": {"stop_strings": ("never said", tokenizer.decode([before, last]))},
        "special token as text": {"stop_strings": (tokenizer.decode([last]),)},
    }
    [stopped] = (await sampling.sample(spec(max_tokens=120, seed=5, **stops[kind]), None)).sequences
    assert stopped.stop_reason == "stop" and stopped.tokens[-1] == last
    assert stopped.tokens == plain.tokens[: len(stopped.tokens)] and len(stopped.tokens) <= place[kind] + 1


async def test_context_ends_response_without_max_tokens(sampling_of):
    async with sampling_of(max_context=40) as sampling:
        [sequence] = (await sampling.sample(spec(max_tokens=None), None)).sequences
        assert len(sequence.tokens) == 40 - len(PROMPT) and sequence.stop_reason == "length"
        [cut] = (await sampling.sample(spec(max_tokens=1000), None)).sequences
        assert cut == sequence


async def test_prompt_logprobs_use_temperature_one(sampling, reference):
    output = await sampling.sample(spec(num_samples=4, scores=True, temperature=0.3), None)
    plain = await sampling.sample(spec(num_samples=4, temperature=0.3), None)
    short = await sampling.sample(spec(prompt=[5], scores=True, top=2), None)
    assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
    close(output.prompt_logprobs[1:], of_tokens(reference, PROMPT))  # type: ignore[arg-type]
    assert output.sequences == plain.sequences and plain.prompt_logprobs is None
    assert short.prompt_logprobs == [None] and short.topk_prompt_logprobs == [None]


async def test_scoring_sampled_tokens_gives_same_bits(sampling, adapter):
    """Prefill and decoding agree, at temperature 1 and with an adapter on the output layer."""
    for folder in (None, adapter(1)):
        [written] = (await sampling.sample(spec(max_tokens=80), folder)).sequences
        scored = await sampling.sample(spec(prompt=PROMPT + written.tokens, scores=True, max_tokens=1), folder)
        assert scored.prompt_logprobs is not None
        assert scored.prompt_logprobs[len(PROMPT) :] == written.logprobs


async def test_topk_prompt_logprobs_at_every_position(sampling, reference):
    prompt = np.random.default_rng(0).integers(3, 99, 300).tolist()  # more than is scored at a time
    output = await sampling.sample(spec(prompt=prompt, top=4, temperature=0.5, max_tokens=1), None)
    more = await sampling.sample(spec(prompt=prompt, scores=True, top=500, max_tokens=1), None)
    assert output.prompt_logprobs is None
    assert output.topk_prompt_logprobs is not None and len(output.topk_prompt_logprobs) == 300
    assert output.topk_prompt_logprobs[0] is None
    best = log_softmax(reference, prompt).topk(4)
    for place, ids, values in zip(output.topk_prompt_logprobs[1:], best.indices, best.values, strict=True):
        assert place is not None and [token for token, _ in place] == ids.tolist()
        close([value for _, value in place], values)
    assert more.topk_prompt_logprobs is not None and len(more.topk_prompt_logprobs[1] or []) == 99  # all there are


async def test_prompt_targets_dense_or_sparse_are_scored_independent_of_batch(sampling, reference):
    prompt = np.random.default_rng(0).integers(3, 99, 300).tolist()
    asked = [[7, -1], *[[-1, -1]] * 254, [5, 9], [11, 90], *[[-1, -1]] * 41, [4, 3]]  # on both sides of 256 tokens
    dense = PromptTargets(shape=(299, 2), ids=[token for row in asked for token in row])
    cells = [(row, column, token) for row, ids in enumerate(asked) for column, token in enumerate(ids) if token >= 0]
    rows, columns, ids = map(list, zip(*cells, strict=True))
    crow = np.searchsorted(rows, np.arange(300)).tolist()
    sparse = PromptTargets(shape=(299, 2), ids=ids, crow=crow, columns=columns)
    request = spec(prompt=prompt, max_tokens=1)
    short = replace(spec(prompt=[5, 6, 7], max_tokens=1), targets=PromptTargets(shape=(2, 1), ids=[-1, 8]))
    outputs = await asyncio.gather(
        sampling.sample(replace(request, targets=dense), None),
        sampling.sample(replace(request, targets=sparse), None),
        sampling.sample(short, None),
    )
    of_dense, of_sparse, of_short = (output.target_prompt_logprobs for output in outputs)
    expected = log_softmax(reference, prompt)[rows, ids]
    close(of_sparse.values, expected)
    assert (of_sparse.crow, of_sparse.columns, of_sparse.shape) == (crow, columns, (299, 2))
    table = np.zeros((299, 2))  # 0 where nothing is requested, as the SDK documents
    table[rows, columns] = of_sparse.values
    assert of_dense.values == table.flatten().tolist()
    assert of_short.values[0] == 0
    close(of_short.values[1:], log_softmax(reference, [5, 6, 7])[1:2, 8])


async def test_prompt_is_computed_once_for_all_samples_and_scores(sampling):
    await sampling.sample(spec(16, list(range(3, 53)), scores=True, top=3), None)
    # A sample that begins one step later computes its last prompt token again.
    assert 50 <= sampling._engine._core.num_prompt_tokens_computed < 50 + 16


async def test_two_hundred_short_requests_are_prefilled_together(sampling):
    passes: list[int] = []
    engine = sampling._engine
    engine._core.model.base_model.register_forward_pre_hook(
        lambda _module, _args, given: passes.append(given["input_ids"].numel()), with_kwargs=True
    )
    prompts = [[*range(3 + index % 5, 12 + index % 40), index % 90 + 3] for index in range(200)]
    async with asyncio.timeout(60):
        await asyncio.gather(*(sampling.sample(spec(prompt=prompt, max_tokens=1), None) for prompt in prompts))
    assert len(passes) <= 24  # a few steps of at most two sizes of prompts and one of tokens


@pytest.mark.parametrize("rank", [1, 8, 128])
async def test_adapter_completions_match_peft(sampling, adapter, tiny_model, rank):
    folder = adapter(rank, rank=rank)
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_model), folder).eval()
    adapted, plain = await asyncio.gather(
        *(sampling.sample(spec(scores=True, temperature=0.8), used) for used in (folder, None))
    )
    [sequence] = adapted.sequences
    close(sequence.logprobs, of_tokens(model, PROMPT + sequence.tokens, 0.8)[len(PROMPT) - 1 :])
    close(adapted.prompt_logprobs[1:], of_tokens(model, PROMPT))
    assert abs(adapted.prompt_logprobs[1] - plain.prompt_logprobs[1]) > 0.05


def crowd(adapter: Any) -> list[tuple[SampleSpec, Path | None]]:
    """Requests of all kinds, of the base model and of adapters of ranks from 1 to 128."""
    generator = np.random.default_rng(0)
    ranks = [1, 3, 8, 16, 17, 32, 100, 128]
    adapters: list[Path | None] = [None, *(adapter(50 + rank, rank=rank) for rank in ranks)]
    adapters.append(adapter(9, rank=64, layers=("q_proj", "v_proj")))
    requests: list[tuple[SampleSpec, Path | None]] = []
    for index in range(27):
        params: dict[str, Any] = {"seed": index, "max_tokens": int(generator.integers(1, 25))}
        params |= {
            "temperature": [1.0, 0.0, 0.7][index % 3],
            "top_k": [-1, 5][index % 2],
            "top_p": [1.0, 0.9][index % 5 == 0],
        }
        prompt = generator.integers(3, 99, int(generator.integers(1, 200))).tolist()
        request = spec(1 + index % 4, prompt, scores=index % 4 == 1, top=[0, 3, 0][index % 3], **params)
        requests.append((request, adapters[index % len(adapters)]))
    return requests


@pytest.mark.slow
async def test_completion_is_independent_of_batch_and_repetition(sampling_of, adapter):
    requests = crowd(adapter)
    async with asyncio.timeout(240):
        async with sampling_of(max_loaded_adapters=1) as sampling:
            alone = [await sampling.sample(request, folder) for request, folder in requests]
        async with sampling_of(max_num_seqs=24, max_loaded_adapters=6) as sampling:
            for _ in range(2):
                together: list[SampleOutput] = await asyncio.gather(
                    *(
                        sampling.sample(request, folder, tenant=str(i % 3))
                        for i, (request, folder) in enumerate(requests)
                    )
                )
                assert together == alone


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"prompt": [5] * 512}, "max_model_len=512"),
        ({"prompt": [5, 99]}, "vocabulary, 0 to 98; got 99"),
        ({"prompt": []}, "at least one token"),
        ({"top_p": 0.0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"temperature": float("nan")}, "temperature must be 0"),
    ],
)
async def test_impossible_request_is_user_error(sampling, wrong, message):
    with pytest.raises(ModelError, match=message) as raised:
        await sampling.sample(spec(**wrong), None)
    assert raised.value.category == "user" and sampling.num_running() == 0

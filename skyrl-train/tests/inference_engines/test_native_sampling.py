"""Sampling by hand-checkable numbers, and stop strings across token borders."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from skyrl_train.inference_engines.native import sampling
from skyrl_train.inference_engines.native.requests import EngineSamplingParams
from skyrl_train.inference_engines.native.sampling import (
    SamplingBatch,
    apply_repetition_penalty,
    compute_random_key,
    compute_uniforms,
    sample,
    sample_by_inverse_cdf,
    truncate,
)
from skyrl_train.inference_engines.native.stop_strings import StopStringFinder


def settings(rows: int = 1, temperature: float = 1.0, **columns: float) -> SamplingBatch:
    integers = {"top_k"}
    tensors = {
        name: torch.full((rows,), value, dtype=torch.long if name in integers else torch.float32)
        for name, value in columns.items()
    }
    greedy = temperature == 0
    return SamplingBatch(temperature=torch.full((rows,), temperature), all_greedy=greedy, any_greedy=greedy, **tensors)


@pytest.mark.parametrize(
    "weights, uniform, token",
    [
        ([0.5, 0.3, 0.2], 0.0, 0),
        ([0.5, 0.3, 0.2], 0.49, 0),
        ([0.5, 0.3, 0.2], 0.51, 1),
        ([0.5, 0.3, 0.2], 0.999999, 2),
        ([0.0, 0.3, 0.0], 0.0, 1),  # never a token without weight
        ([0.0, 0.3, 0.0], 1 - 2**-53, 1),
        ([5.0, 3.0, 2.0], 0.51, 1),  # weights need not sum to 1
    ],
)
def test_sampling_selects_token_where_cumulative_sum_passes_uniform(weights, uniform, token):
    drawn = sample_by_inverse_cdf(torch.tensor([weights]), torch.tensor([uniform], dtype=torch.float64))
    assert drawn.tolist() == [token]


def test_blocked_sum_samples_same_token_as_single_sum():
    torch.manual_seed(0)
    weights = torch.rand(64, 1000) ** 8
    uniform = torch.rand(64, dtype=torch.float64)
    ends = weights.double().cumsum(-1)
    expected = (ends <= (uniform * ends[:, -1])[:, None]).sum(-1)
    assert torch.equal(sample_by_inverse_cdf(weights, uniform), expected)


def test_sampling_rows_in_chunks_is_bit_exact(monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(0)
    logits, uniform = 3 * torch.randn(11, 100), torch.rand(11, dtype=torch.float64)
    batch = replace(settings(11), top_k=torch.tensor([3, 5]), truncated=torch.tensor([1, 9]), any_greedy=True)
    batch.temperature[4] = 0
    at_once = sample(logits, batch, uniform)
    monkeypatch.setattr(sampling, "_PART", 300)
    in_parts = sample(logits, batch, uniform)
    assert torch.equal(in_parts.tokens, at_once.tokens)
    assert torch.equal(in_parts.log_probs, at_once.log_probs)


def test_uniforms_are_independent_over_requests_and_positions():
    keys = np.array([compute_random_key(seed, index) for seed in range(10) for index in range(10)])
    table = np.stack(
        [compute_uniforms(keys, np.full(100, position)) for position in range(1000)]
    )  # [1000 positions, 100 keys]
    counts = np.histogram(table, bins=20, range=(0, 1))[0]
    chi_square = ((counts - 5000) ** 2 / 5000).sum()
    assert chi_square < 43.8  # 19 degrees of freedom: 0.1 %
    assert abs(np.corrcoef(table[:-1].ravel(), table[1:].ravel())[0, 1]) < 0.015  # 4.7 standard errors
    assert abs(np.corrcoef(table[:, :-1].ravel(), table[:, 1:].ravel())[0, 1]) < 0.015
    assert len(np.unique(table)) == table.size


FOUR = [0.5, 0.25, 0.15, 0.1]


@pytest.mark.parametrize(
    "columns, kept",
    [
        ({}, [0.5, 0.25, 0.15, 0.1]),
        ({"top_k": 2}, [0.5, 0.25, 0, 0]),
        ({"top_k": 4}, [0.5, 0.25, 0.15, 0.1]),
        ({"top_p": 0.49}, [0.5, 0, 0, 0]),  # the first alone reaches it
        ({"top_p": 0.6}, [0.5, 0.25, 0, 0]),
        ({"top_p": 0.8}, [0.5, 0.25, 0.15, 0]),
        ({"top_p": 1e-6}, [0.5, 0, 0, 0]),  # the likeliest always stays
        ({"min_p": 0.3}, [0.5, 0.25, 0.15, 0]),  # 0.3 x 0.5 = 0.15
        ({"min_p": 0.4}, [0.5, 0.25, 0, 0]),
        ({"top_k": 3, "top_p": 0.6}, [0.5, 0.25, 0, 0]),  # of 0.9: 0.5/0.9 = 0.56, 0.75/0.9 = 0.83
        ({"top_k": 2, "top_p": 0.6}, [0.5, 0, 0, 0]),  # of 0.75: 0.5/0.75 = 0.67
        ({"min_p": 0.4, "top_k": 3, "top_p": 0.7}, [0.5, 0.25, 0, 0]),
    ],
)
def test_truncation_of_four_tokens(columns, kept):
    order = torch.tensor([2, 0, 3, 1])  # the table must not depend on where the likely tokens stand
    result = truncate(torch.tensor([FOUR])[:, order], settings(**columns))
    torch.testing.assert_close(result, torch.tensor([kept])[:, order])


@pytest.mark.parametrize(
    "columns, expected",
    [
        ({}, FOUR),
        ({"top_k": 2}, [2 / 3, 1 / 3, 0, 0]),
        ({"top_p": 0.8}, [0.5 / 0.9, 0.25 / 0.9, 0.15 / 0.9, 0]),
        ({"min_p": 0.4}, [2 / 3, 1 / 3, 0, 0]),
        ({"temperature": 0.5}, [0.7246, 0.1812, 0.0652, 0.0290]),  # squares over their sum 0.345
    ],
)
def test_frequencies_follow_distribution(columns, expected):
    draws = 20_000
    uniform = torch.from_numpy(compute_uniforms(np.full(draws, compute_random_key(7, 0)), np.arange(draws)))
    tokens, log_probs = sample(torch.tensor([FOUR]).log().expand(draws, -1), settings(draws, **columns), uniform)[:2]
    counts = torch.bincount(tokens, minlength=4).double()
    wanted = torch.tensor(expected, dtype=torch.float64) * draws
    assert counts[wanted == 0].sum() == 0
    chi_square = ((counts - wanted) ** 2 / wanted.clamp(min=1)).sum()
    assert chi_square < 16.3  # at most 3 degrees of freedom: 0.1 %
    temperature = columns.get("temperature", 1.0)
    full = (torch.tensor(FOUR).log() / temperature).log_softmax(-1)  # before truncation: what the trainer computes
    torch.testing.assert_close(log_probs, full[tokens])


def test_repetition_penalty_scales_logits_by_sign():
    logits = torch.tensor([[2.0, -1.0, 3.0, -4.0]])
    result = apply_repetition_penalty(logits, torch.tensor([[0, 3, 0]]), torch.tensor([2.0]))
    assert result.tolist() == [[1.0, -1.0, 3.0, -8.0]]


def test_greedy_selects_allowed_argmax_and_reports_raw_log_prob():
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    forbidden = torch.tensor([[True, False, False]])
    token, log_prob = sample(logits, settings(temperature=0.0), None, forbidden=forbidden)[:2]
    assert token.tolist() == [1]
    assert log_prob.item() == pytest.approx(1 - math.log(math.e**2 + math.e + 1), abs=1e-6)


@pytest.mark.parametrize(
    "given, message",
    [
        ({"temperature": -0.1}, "temperature must be 0"),
        ({"temperature": math.nan}, "temperature must be 0"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, or None; got 0"),
        ({"max_tokens": 2.5}, "max_tokens must be an integer"),
        ({"min_tokens": 3, "max_tokens": 2}, "min_tokens"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"stop": ["a", ""]}, "stop must be .* without empty strings"),
        ({"stop": 3}, "stop must be a string or a list of strings"),
        ({"logprobs": 21}, "logprobs must be 0"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"temprature": 1.0}, "temperature"),
    ],
)
def test_invalid_sampling_parameter_error_names_rule(given, message):
    with pytest.raises(ValueError, match=message):
        EngineSamplingParams.from_dict(given)


@pytest.mark.parametrize(
    "tokens, stop, ends_at",
    [
        (["he", "llo", " wor", "ld"], "lo w", 2),  # begins inside one token, ends inside another
        (["a", "b", "c"], "abc", 2),
        (["a", "b", "c"], "b", 1),
        (["ab", "ab", "ac"], "abac", 2),
        (["a", "b", "c"], "d", None),
        (list("xxxxxxxxxxxxxxxxxxxxstop"), "stop", 23),  # far beyond the decoder's window
    ],
)
def test_stop_string_ends_completion_at_completing_token(tokens, stop, ends_at):
    finder = StopStringFinder((stop, "never"), lambda ids: "".join(tokens[i] for i in ids))
    found = [finder.push(token) for token in range(len(tokens))]
    assert found.index(True) == ends_at if ends_at is not None else not any(found)


def test_stop_string_matches_characters_spanning_byte_tokens():
    data = "é→end".encode()  # one token a byte
    finder = StopStringFinder(
        ("→e",), lambda ids: data[min(ids, default=0) : max(ids, default=-1) + 1].decode(errors="replace")
    )
    assert [finder.push(i) for i in range(len(data))].index(True) == len("é→e".encode()) - 1

"""Our sampling keywords in vLLM's words. Needs no vLLM."""

import pytest
import torch

from skyrl_train.inference_engines.native.requests import EngineSamplingParams
from skyrl_train.inference_engines.vllm.sampling import http_sampling, seed_of, vllm_split_seeds
from skyrl_train.inference_engines.vllm.tempered_sampler import tempered_log_softmax


def test_request_i_of_a_batch_with_seed_s_is_made_of_s_and_i():
    _, seeds = vllm_split_seeds({"seed": 5}, 3)
    assert seeds == [(5, 0), (5, 1), (5, 2)]
    _, seeds = vllm_split_seeds({"seed": [[5, 2], [5, 0]]}, 2)
    assert seeds == [(5, 2), (5, 0)]
    _, seeds = vllm_split_seeds({}, 2)
    assert seeds == [None, None]


def test_seeds_differ_by_seed_by_index_and_by_the_length_of_the_prompt():
    cases = [((1, 0), 7), ((2, 0), 7), ((1, 1), 7), ((1, 0), 8)]
    numbers = [seed_of(pair, length) for pair, length in cases]
    assert len(set(numbers)) == 4
    assert all(number is not None and 0 <= number < 2**63 for number in numbers)
    assert seed_of((1, 0), 7) == numbers[0]


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"temperatur": 1.0}, "temperature"),
        ({"temperature": 0.001}, "0.01"),  # vLLM would take 0.01 for it and say so in its log alone
        ({"seed": [[1, 2]]}, "one .* each of the 2 requests"),
        ({"seed": [[1], [2]]}, "seed"),
    ],
)
def test_settings_that_vllm_changes_silently_are_refused(given: dict, named: str):
    with pytest.raises(ValueError, match=named):
        vllm_split_seeds(given, 2)


def test_a_server_is_told_every_keyword_so_that_its_own_defaults_change_nothing():
    body = http_sampling(EngineSamplingParams.from_dict({"max_tokens": 4, "stop": "end"}), 9)
    assert body["repetition_penalty"] == 1.0 and body["top_p"] == 1.0 and body["top_k"] == -1 and body["min_p"] == 0.0
    assert body["stop"] == ["end"] and body["include_stop_str_in_output"] is True
    assert body["seed"] == 9 and body["max_tokens"] == 4 and body["logprobs"] == 0


def test_log_probs_are_those_of_the_divided_logits_and_of_the_plain_ones_where_greedy():
    logits = torch.tensor([[0.0, 2.0], [0.0, 2.0]])
    found = tempered_log_softmax(logits, torch.tensor([2.0, 0.0]))
    expected = [[-1.3132617, -0.3132617], [-2.126928, -0.126928]]  # log softmax of (0, 1) and of (0, 2)
    torch.testing.assert_close(found, torch.tensor(expected))
    torch.testing.assert_close(tempered_log_softmax(logits, 2.0)[1], found[0])
    torch.testing.assert_close(tempered_log_softmax(logits, None)[0], found[1])

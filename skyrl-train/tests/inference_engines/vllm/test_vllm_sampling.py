"""Our sampling keywords in vLLM's and SGLang's words. Needs neither."""

import json

import pytest
import torch

from skyrl_train.errors import UnsupportedByEngine
from skyrl_train.inference_engines.native.requests import EngineSamplingParams
from skyrl_train.inference_engines.remote import sglang as remote_sglang
from skyrl_train.inference_engines.remote import vllm as remote_vllm
from skyrl_train.inference_engines.remote.connection import ServerConnection
from skyrl_train.inference_engines.remote.sglang import SGLangProtocol
from skyrl_train.inference_engines.vllm.sampling import build_http_sampling, check_and_split_seed, compute_seed
from skyrl_train.inference_engines.vllm.tempered_sampler import compute_tempered_log_softmax


def test_seed_is_number_or_pair():
    assert [check_and_split_seed(given)[1] for given in ({"seed": 5}, {"seed": [5, 2]}, {})] == [(5, 0), (5, 2), None]


def test_seeds_differ_by_seed_index_and_prompt_length():
    cases = [((1, 0), 7), ((2, 0), 7), ((1, 1), 7), ((1, 0), 8)]
    numbers = [compute_seed(pair, length) for pair, length in cases]
    assert len(set(numbers)) == 4
    assert all(number is not None and 0 <= number < 2**63 for number in numbers)
    assert compute_seed((1, 0), 7) == numbers[0]


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"temperatur": 1.0}, "temperature"),
        ({"temperature": 0.001}, "0.01"),  # vLLM would take 0.01 for it and say so in its log alone
        ({"seed": [[1, 2]]}, "seed"),
        ({"seed": [1]}, "seed"),
    ],
)
def test_settings_silently_changed_by_vllm_are_rejected(given: dict, named: str):
    with pytest.raises(ValueError, match=named):
        check_and_split_seed(given)


def test_server_request_sets_all_sampling_keywords():
    body = build_http_sampling(EngineSamplingParams.from_dict({"max_tokens": 4, "stop": "end"}), 9)
    assert body["repetition_penalty"] == 1.0 and body["top_p"] == 1.0 and body["top_k"] == -1 and body["min_p"] == 0.0
    assert body["stop"] == ["end"] and body["include_stop_str_in_output"] is True
    assert body["seed"] == 9 and body["max_tokens"] == 4 and body["logprobs"] == 0


def test_constraints_penalties_and_biases_for_vllm():
    given = {"frequency_penalty": 0.5, "presence_penalty": -1, "logit_bias": {7: 2.0}, "logprobs": 3}
    body = build_http_sampling(
        EngineSamplingParams.from_dict(given | {"constraint": {"json_schema": {"type": "null"}}}), None
    )
    assert (body["frequency_penalty"], body["presence_penalty"], body["logprobs"]) == (0.5, -1.0, 3)
    assert body["logit_bias"] == {7: 2.0}
    schema = json.loads(body["structured_outputs"]["json"])
    assert schema["type"] == "null" and "whitespace_pattern" in schema["x-guidance"]
    lark = EngineSamplingParams.from_dict({"constraint": {"lark": "start: /a/"}})
    assert build_http_sampling(lark, None)["structured_outputs"] == {"grammar": "start: /a/"}
    plain = build_http_sampling(EngineSamplingParams(), None)
    assert plain["structured_outputs"] is None and plain["logit_bias"] is None
    with pytest.raises(UnsupportedByEngine, match="num_answer_tokens=3"):
        check_and_split_seed(given | {"num_answer_tokens": 3})
    with pytest.raises(ValueError, match="not a valid JSON schema"):
        build_http_sampling(EngineSamplingParams.from_dict({"constraint": {"json_schema": "{"}}), None)


def test_constraints_penalties_and_biases_for_sglang():
    protocol = SGLangProtocol(ServerConnection("127.0.0.1:9", 1.0), 1.0)
    params = EngineSamplingParams.from_dict(
        {"frequency_penalty": 0.5, "logit_bias": {7: 2.0}, "constraint": {"json_schema": {"type": "null"}}}
    )
    protocol._check(params, None)
    body = protocol._build_sampling(params, None, 5)
    assert (body["frequency_penalty"], body["presence_penalty"], body["logit_bias"]) == (0.5, 0.0, {"7": 2.0})
    assert json.loads(str(body["json_schema"])) == {"type": "null"}
    with pytest.raises(UnsupportedByEngine, match="only as JSON schemas"):
        protocol._check(EngineSamplingParams.from_dict({"constraint": {"lark": "start: /a/"}}), None)
    with pytest.raises(UnsupportedByEngine, match="logprobs=0"):
        protocol._check(EngineSamplingParams(logprobs=2, presence_penalty=1.0), None)


def test_top_log_probs_of_servers():
    """vLLM counts the token drawn among them; both name ids."""
    place = {"token_id": 4, "logprob": -3.0}
    others = [place, {"token_id": 9, "logprob": -0.5}, {"token_id": 2, "logprob": -1.0}]
    vllm = remote_vllm._parse_top([place | {"top_logprobs": others}], 2)
    sglang = remote_sglang._parse_top([[(-0.5, 9, None), (-1.0, 2, None)], [(-9.0, 1, None)] * 2], 1, 2)
    assert vllm is not None and sglang is not None
    assert vllm.ids.tolist() == sglang.ids.tolist() == [[9, 2]]
    assert vllm.log_probs.tolist() == sglang.log_probs.tolist() == [[-0.5, -1.0]]


def test_log_probs_use_temperature_except_when_greedy():
    logits = torch.tensor([[0.0, 2.0], [0.0, 2.0]])
    found = compute_tempered_log_softmax(logits, torch.tensor([2.0, 0.0]))
    expected = [[-1.3132617, -0.3132617], [-2.126928, -0.126928]]  # log softmax of (0, 1) and of (0, 2)
    torch.testing.assert_close(found, torch.tensor(expected))
    torch.testing.assert_close(compute_tempered_log_softmax(logits, 2.0)[1], found[0])
    torch.testing.assert_close(compute_tempered_log_softmax(logits, None)[0], found[1])

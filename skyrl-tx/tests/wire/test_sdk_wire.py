"""The real SDK's own classes and parsers at the other end of the wire."""

import json
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from sdk_environment import sdk_environment

from tx.tinker.types import PassOutput, SampleOutput, Sequence
from tx.tinker.wire import schemas
from tx.tinker.wire.checks import check_training
from tx.tinker.wire.codec import encode_pass_output, encode_pass_output_json, encode_sample_output, sample_output_json
from tx.tinker.wire.training_requests import read_training_body

ENCODINGS = {"0.16.1": ["json"], "0.24.1": ["json", "protobuf"], "0.38.0": ["protobuf"]}
NEWEST = "0.38.0"


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(version, marks=pytest.mark.slow if version == NEWEST else pytest.mark.full)
        for version in ENCODINGS
    ],
)
def version(request: pytest.FixtureRequest) -> str:
    return request.param


@cache
def python_of(version: str) -> Path:
    return sdk_environment(version)


def ask(version: str, order: dict) -> Any:
    command = [str(python_of(version)), str(Path(__file__).with_name("sdk_peer.py"))]
    done = subprocess.run(command, input=json.dumps(order), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@cache
def written(version: str) -> dict[str, Any]:
    return ask(version, {"write": True})


def training(version: str, name: str):
    for given, kind, data in written(version)["training"]:
        if given.removeprefix("forward ") == name:
            forward = given.startswith("forward ")
            yield (
                read_training_body(bytes.fromhex(data), kind, None, forward_only_default=forward, max_bytes=10**6),
                forward,
            )


def test_sdk_training_requests_are_read_exactly(version, facts):
    requests = list(training(version, "cross_entropy"))
    assert len(requests) == {"0.16.1": 2, "0.24.1": 3, "0.38.0": 1}[version]
    for request, forward in requests:
        check_training(request, facts)
        assert (request.model_id, request.seq_id, request.forward_only) == ("s:train:0", 3, forward)
        plain, from_lists, *from_numpy = request.data
        assert plain.tokens.tolist() == [5, 6, 7]
        assert plain.inputs["target_tokens"].tolist() == [6, 7, 8]
        assert plain.inputs["weights"].tolist() == [0, 1, 0.5]
        assert from_lists.tokens.tolist() == [1, 2, 3]
        assert from_lists.inputs["weights"].tolist() == [1, 1, 0.25]
        for datum in from_numpy:
            assert datum.inputs["target_tokens"].tolist() == [[1, 2]]
            assert datum.inputs["weights"].tolist() == [[0.5, -0.5]]


def test_loss_settings_are_read(version, facts):
    for request, _ in training(version, "ppo"):
        check_training(request, facts)
        assert request.loss_config == {"clip_low_threshold": 0.5, "clip_high_threshold": 1.5}
        assert request.data[0].inputs["logprobs"].tolist() == [-0.5, -1.25]
        assert request.data[0].inputs["advantages"].tolist() == [1, -2]


def test_sparse_tensors_arrive_dense(version, facts):
    for request, _ in training(version, "sparse"):
        check_training(request, facts)
        assert request.data[0].inputs["target_tokens"].tolist() == [[7, 0, 0, 8], [0, 0, 0, 0], [0, 9, 0, 0]]
        assert request.data[0].inputs["weights"].tolist() == [[0.5, 0, 0, 1], [0, 0, 0, 0], [0, 2, 0, 0]]


def test_all_other_sdk_bodies_are_read_completely(version):
    bodies = written(version)["bodies"]
    assert len(bodies) >= 26
    for name, body in bodies:
        read = getattr(schemas, name).model_validate(body)
        lost = {field for field in body if field not in type(read).model_fields} - {"type"}
        assert not lost, (name, lost)


def test_sdk_sampling_requests_are_read_exactly(version):
    full, _, bare, _ = [
        schemas.AsampleRequest.model_validate(b) for n, b in written(version)["bodies"] if n == "AsampleRequest"
    ]
    spec = full.to_spec(lambda: 9)
    assert (spec.prompt, spec.num_samples, spec.prompt_logprobs, spec.topk_prompt_logprobs) == ([1, 2, 3], 2, True, 3)
    assert (spec.params.seed, spec.params.max_tokens, spec.params.stop_strings) == (1, 5, ("a", "b"))
    assert (spec.params.temperature, spec.params.top_k, spec.params.top_p) == (0.5, 4, 0.9)
    assert bare.to_spec(lambda: 9).params.seed == 9
    assert bare.to_spec(lambda: 9).params.stop_at_eos


def test_results_are_read_exactly_by_sdk(version):
    passed = encode_pass_output(
        PassOutput(
            [np.array([-0.5, -1], np.float32), np.array([-2], np.float32), np.array([[-1, -2]], np.float32)],
            {"loss:sum": 1.5},
        )
    )
    sequences = [Sequence([3, 4], [-0.5, -1.0], "stop"), Sequence([5], [-0.25], "length")]
    bare = encode_sample_output(SampleOutput(sequences))
    full = encode_sample_output(
        SampleOutput(sequences, [None, -0.5, -4.0], [None, [(7, -0.5), (0, -1.0)], [(9, -2.0)]])
    )
    for encoding in ENCODINGS[version]:
        orders = []
        for kind, data, as_json in (
            ("pass", passed, encode_pass_output_json),
            *(("sample", s, sample_output_json) for s in (bare, full)),
        ):
            orders.append((kind, encoding, (data if encoding == "protobuf" else orjson.dumps(as_json(data))).hex()))
        seen_pass, seen_bare, seen_full = ask(version, {"read": orders})
        shapes_and_numbers = [([2], [-0.5, -1.0]), ([1], [-2.0]), ([1, 2], [-1.0, -2.0])]
        assert seen_pass["type"] == "ArrayRecord"
        assert seen_pass["metrics"] == {"loss:sum": 1.5}
        assert seen_pass["outputs"] == [{"logprobs": [shape, "float32", x]} for shape, x in shapes_and_numbers]
        assert seen_bare["sequences"] == [[[3, 4], [-0.5, -1.0], "stop"], [[5], [-0.25], "length"]]
        assert (seen_bare["prompt_logprobs"], seen_bare["topk"]) == (None, None)
        assert seen_full["prompt_logprobs"] == [None, -0.5, -4.0]
        assert seen_full["topk"] == [None, [[7, -0.5], [0, -1.0]], [[9, -2.0]]]

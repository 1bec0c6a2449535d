"""Fuzzing: any input is decoded or refused with RequestError, and decoded requests can be checked."""

import contextlib
import json

import numpy as np
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from tx.errors import RequestError
from tx.tinker.types import LOSSES, Datum
from tx.tinker.wire import schemas
from tx.tinker.wire import tinker_wire_pb2 as pb
from tx.tinker.wire.checks import check_sample, check_training
from tx.tinker.wire.codec import TrainingRequest, decode_training, encode_training
from tx.tinker.wire.training_requests import find_address, read_training_body

TYPES = st.sampled_from(["application/x-protobuf", "application/json", "application/json; a=b", "text/html", ""])
ENCODINGS = st.sampled_from([None, "identity", "zstd", "gzip"])
often = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])

VALID = encode_training(
    TrainingRequest(
        "run:train:0",
        3,
        [Datum(np.array([1, 2, 3]), {"target_tokens": np.array([2, 3, 4]), "weights": np.ones(3, np.float32)})] * 2,
        "cross_entropy",
    )
)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def read_and_check(body: bytes, content_type: str, encoding: str | None, facts, forward: bool = False) -> None:
    find_address(body, content_type, encoding, 100_000)
    with contextlib.suppress(RequestError):
        request = read_training_body(body, content_type, encoding, forward_only_default=forward, max_bytes=100_000)
        again = decode_training(request.payload)  # the payload means what was read
        assert (again.model_id, again.seq_id) == (request.model_id, request.seq_id)
        assert again.forward_only == request.forward_only
        assert [d.tokens.tolist() for d in again.data] == [d.tokens.tolist() for d in request.data]
        check_training(request, facts)


@given(st.binary(max_size=200), TYPES, ENCODINGS, st.booleans())
@often
def test_random_bytes(facts, body, content_type, encoding, forward):
    read_and_check(body, content_type, encoding, facts, forward)


@given(st.lists(st.tuples(st.integers(0, len(VALID) - 1), st.integers(0, 255)), max_size=4), st.integers(0, len(VALID)))
@often
def test_mutated_and_truncated_protobuf_is_decoded_or_refused(facts, changes, cut):
    body = bytearray(VALID)
    for place, byte in changes:
        body[place] = byte
    read_and_check(bytes(body[:cut]), "application/x-protobuf", None, facts)
    read_and_check(bytes(body), "application/x-protobuf", None, facts)
    packed = bytearray(zstandard.compress(VALID))
    for place, byte in changes:
        packed[place % len(packed)] = byte
    read_and_check(bytes(packed), "application/x-protobuf", "zstd", facts)


@st.composite
def messages(draw) -> pb.ForwardBackwardRequest:
    """Right in form, of any content."""
    message = pb.ForwardBackwardRequest(model_id=draw(st.text(max_size=3)), seq_id=draw(st.integers(-1, 3)))
    message.loss_fn = draw(st.sampled_from([*LOSSES, "custom", "", "unknown"]))
    for name in draw(st.sets(st.sampled_from(["beta", "clip_low_threshold", "clip_high_threshold", "x"]))):
        if draw(st.booleans()):
            message.loss_fn_config[name] = draw(st.floats())
        elif draw(st.booleans()):
            message.loss_fn_config_v2[name].number = draw(st.floats())
        else:
            message.loss_fn_config_v2[name].SetInParent()
    small = st.binary(max_size=8) | st.just(b"") | st.lists(st.integers(0, 3), max_size=3).map(_int64)
    for _ in range(draw(st.integers(0, 2))):
        datum = message.data.add()
        for _ in range(draw(st.integers(0, 2))):
            chunk = datum.model_input.add()
            if draw(st.booleans()):
                chunk.encoded_text.tokens = draw(st.lists(st.integers(-1, 101), max_size=3).map(_int32))
        names = ["target_tokens", "weights", "logprobs", "advantages", "sequence_ratio_mask", "clip_low_threshold"]
        for name in draw(st.sets(st.sampled_from(names))):
            tensor = datum.loss_fn_inputs[name]
            tensor.dtype = draw(st.integers(0, 5))
            tensor.shape.extend(draw(st.lists(st.integers(-1, 4) | st.integers(-(2**63), 2**63 - 1), max_size=3)))
            if draw(st.booleans()):
                tensor.dense = draw(small)
            else:
                csr = tensor.sparse_csr
                csr.values, csr.crow_indices, csr.col_indices = draw(st.tuples(small, small, small))
    return message


def _int64(numbers: list[int]) -> bytes:
    return np.array(numbers, np.int64).tobytes()


def _int32(numbers: list[int]) -> bytes:
    return np.array(numbers, np.int32).tobytes()


@given(messages(), st.booleans())
@often
def test_protobuf_of_any_content(facts, message, forward):
    read_and_check(message.SerializeToString(), "application/x-protobuf", None, facts, forward)


def _paths(value, path=()):
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from _paths(inner, (*path, key))


def _changed(value, path, new):
    if not path:
        return new
    copy = value.copy()
    copy[path[0]] = _changed(value[path[0]], path[1:], new)
    return copy


TENSOR = {"data": [2, 3], "dtype": "int64", "shape": [2]}
SPARSE = {
    "data": [1.0],
    "dtype": "float32",
    "shape": [2, 1],
    "sparse_crow_indices": [0, 0, 1],
    "sparse_col_indices": [0],
}
TRAINING = {
    "model_id": "m",
    "seq_id": 1,
    "forward_backward_input": {
        "data": [
            {
                "model_input": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]},
                "loss_fn_inputs": {"target_tokens": TENSOR, "weights": SPARSE},
            }
        ],
        "loss_fn": "cross_entropy",
        "loss_fn_config": {},
    },
}


@given(st.sampled_from(list(_paths(TRAINING))), JSON_VALUES)
@often
def test_json_with_any_mutated_value_is_decoded_or_refused(facts, path, value):
    body = json.dumps(_changed(TRAINING, path, value)).encode()
    read_and_check(body, "application/json", None, facts)


BODIES: list[type[BaseModel]] = [
    kind
    for kind in vars(schemas).values()
    if isinstance(kind, type)
    and issubclass(kind, schemas.Body | schemas.LenientBody)
    and kind.__module__ == schemas.__name__
]
ASAMPLE = {
    "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]},
    "sampling_params": {"max_tokens": 3, "stop": ["a"], "temperature": 1.0, "top_k": 3, "top_p": 0.5, "seed": 1},
    "num_samples": 2,
    "base_model": "m",
    "prompt_logprobs": True,
    "topk_prompt_logprobs": 2,
}


@given(st.sampled_from(list(_paths(ASAMPLE))), JSON_VALUES)
@often
def test_sample_with_any_mutated_value_is_decoded_or_refused(facts, path, value):
    try:
        request = schemas.AsampleRequest.model_validate_json(json.dumps(_changed(ASAMPLE, path, value)))
    except ValidationError as error:
        assert schemas.describe_errors(error)
    else:
        with contextlib.suppress(RequestError):
            check_sample(request.to_spec(lambda: 0), facts)


@given(st.sampled_from(BODIES), st.data())
@often
def test_bodies_with_any_values_in_their_fields(kind, data):
    names = data.draw(st.sets(st.sampled_from([*kind.model_fields, "x"])))
    body = {name: data.draw(JSON_VALUES) for name in names}
    try:
        kind.model_validate_json(json.dumps(body)) if data.draw(st.booleans()) else kind.model_validate(body)
    except ValidationError as error:
        json.dumps(schemas.describe_errors(error)).encode()

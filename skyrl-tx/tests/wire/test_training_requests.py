"""Request bodies: valid ones are read in every encoding, invalid ones are refused immediately."""

import json

import numpy as np
import pytest
import zstandard

from tx.errors import RequestError
from tx.tinker.types import Datum
from tx.tinker.wire.codec import TrainingRequest, decode_training, encode_training
from tx.tinker.wire.training_requests import Address, find_address, read_training_body, set_loss

PROTOBUF, JSON = "application/x-protobuf", "application/json"
MAX = 1_000_000


def payload(**changes) -> bytes:
    datum = Datum(np.array([5, 6]), {"target_tokens": np.array([6, 7]), "weights": np.array([0, 1], np.float32)})
    fields = {"model_id": "s:train:0", "seq_id": 7, "data": [datum], "loss_fn": "cross_entropy"} | changes
    return encode_training(TrainingRequest(**fields))


def as_json(key: str = "forward_backward_input", **changes) -> dict:
    datum = {
        "model_input": {"chunks": [{"type": "encoded_text", "tokens": [5]}, {"tokens": [6]}]},
        "loss_fn_inputs": {
            "target_tokens": {"data": [6, 7], "dtype": "int64"},
            "weights": {"data": [0, 1], "dtype": "float32", "shape": [2]},
        },
    }
    return {"model_id": "s:train:0", "seq_id": 7, key: {"data": [datum], "loss_fn": "cross_entropy"} | changes}


def read(body, content_type=PROTOBUF, encoding=None, forward=False, max_bytes=MAX):
    body = json.dumps(body).encode() if isinstance(body, dict) else body
    request = read_training_body(body, content_type, encoding, forward_only_default=forward, max_bytes=max_bytes)
    return request, request.payload


def refused(*args, **kwargs) -> RequestError:
    with pytest.raises(RequestError) as error:
        read(*args, **kwargs)
    return error.value


def test_protobuf_body_is_stored_as_payload():
    body = payload()
    request, kept = read(body)
    assert kept == body
    assert (request.model_id, request.seq_id, request.forward_only) == ("s:train:0", 7, False)


def test_substitute_loss_replaces_requested_loss_in_payload():
    request, _ = read(payload(loss_fn="stable_reinforce"))
    other = set_loss(request, "gspo")
    again = decode_training(other.payload)
    for one in (other, again):
        assert one.loss_fn == "gspo" and one.loss_config["clip_high_threshold"] == 1.2
        assert (one.model_id, one.seq_id, len(one.data)) == (request.model_id, request.seq_id, len(request.data))


@pytest.mark.parametrize("write_size", [True, False])
def test_zstd_is_unpacked_with_and_without_size(write_size):
    body = payload()
    packed = zstandard.ZstdCompressor(write_content_size=write_size).compress(body)
    assert read(packed, encoding="zstd")[1] == body
    assert read(packed, encoding=" ZSTD ")[1] == body


def test_json_of_old_clients_decodes_to_same_request():
    request, kept = read(as_json(), "application/json; charset=utf-8")
    assert kept == payload()
    assert request.data[0].tokens.tolist() == [5, 6]
    assert request.data[0].inputs["weights"].tolist() == [0.0, 1.0]


def test_forward_endpoint_makes_request_forward_only():
    assert read(as_json("forward_input"), JSON, forward=True)[0].forward_only
    request, kept = read(payload(), forward=True)
    assert request.forward_only
    assert decode_training(kept).forward_only
    assert read(payload(forward_only=True))[0].forward_only
    assert "unknown field `forward_backward_input`" in str(refused(as_json(), JSON, forward=True))


def test_sparse_tensors_in_json_are_read_as_their_dense_selves():
    body = as_json()
    sparse = {"data": [0.5], "dtype": "float32", "shape": [2, 3], "sparse_crow_indices": [0, 0, 1]}
    body["forward_backward_input"]["data"][0]["loss_fn_inputs"]["weights"] = sparse
    assert "must be set together" in str(refused(body, JSON))
    sparse["sparse_col_indices"] = [2]
    assert read(body, JSON)[0].data[0].inputs["weights"].tolist() == [[0, 0, 0], [0, 0, 0.5]]


def test_body_over_limit_is_413_packed_or_not():
    body = payload()
    assert refused(body, max_bytes=10).status == 413
    for write_size in (True, False):
        bomb = zstandard.ZstdCompressor(write_content_size=write_size).compress(bytes(20_000_000))
        assert len(bomb) < 2_000
        error = refused(bomb, encoding="zstd")
        assert error.status == 413
        assert "at most 1,000,000 bytes, including after decompression" in str(error)


@pytest.mark.parametrize("write_size", [True, False])
def test_truncated_invalid_or_trailing_zstd_is_refused(write_size):
    packed = zstandard.ZstdCompressor(write_content_size=write_size).compress(payload() * 50)
    for body in (packed[:-1], packed[: len(packed) // 2], packed[:3], b"", b"no zstd at all", packed + b"more"):
        error = refused(body, encoding="zstd")
        assert (error.status, "one complete zstd frame" in str(error)) == (400, True)


def test_other_types_and_packings_are_415():
    assert "content-type must be" in str(refused(payload(), "text/plain"))
    for error in (refused(payload(), ""), refused(payload(), "multipart/form-data"), refused(b"", encoding="gzip")):
        assert error.status == 415


def test_bytes_contradicting_content_type_are_refused():
    assert "body must be a protobuf ForwardBackwardRequest" in str(refused(b"\xff" * 20))
    assert "body must be a protobuf" in str(refused(json.dumps(as_json()).encode()))
    assert "body must be JSON" in str(refused(payload(), JSON))
    assert "body must be JSON" in str(refused(b"", JSON))
    assert "got `array`" in str(refused(b"[" * 100_000, JSON))
    assert "not allow NaN" in str(refused(b'{"model_id": NaN}', JSON))


def change(path: str, value) -> dict:
    """The right body with one place changed; `path` as errors write it, below the input."""
    body = as_json()
    here = body["forward_backward_input"]
    *parents, last = path.replace("[", ".").replace("]", "").split(".")
    for part in parents:
        here = here[int(part)] if part.isdigit() else here[part]
    here[int(last) if last.isdigit() else last] = value
    return body


WEIGHTS, TARGETS = "data[0].loss_fn_inputs.weights", "data[0].loss_fn_inputs.target_tokens"
TOKENS = "data[0].model_input.chunks[0].tokens"


@pytest.mark.parametrize(
    "path, value, says",
    [
        ("data", None, "forward_backward_input.data: Expected `array`, got `null`"),
        ("loss_fn", 3, "forward_backward_input.loss_fn: Expected `str`, got `int`"),
        ("loss_fn_config", {"beta": "large"}, "loss_fn_config['beta'] must be a number; got 'large'"),
        ("loss_fn_config", {"beta": True}, "loss_fn_config['beta'] must be a number; got 'True'"),
        ("loss_fn_config", {"beta": 10**400}, "loss_fn_config['beta'] must be a number"),
        ("los_fn", "ppo", "los_fn"),
        (TOKENS, "abc", "data[0].model_input.chunks[0].tokens: Expected `array"),
        (TOKENS, [1.5], "chunks[0].tokens[0]: Expected `int`, got `float`"),
        (TOKENS, [True], "Expected `int`, got `bool`"),
        (TOKENS, [2**31], "data[0].model_input.chunks[0].tokens must be integers of 32 bits"),
        (TOKENS, [2**100], "bits"),
        ("data[0].model_input.chunks[0]", {"type": "image", "data": "", "format": "png"}, "must be encoded_text"),
        ("data[0].model_input.chunks[0]", {"data": "", "format": "png"}, "must be encoded_text"),
        (WEIGHTS + ".data", [None, 1], "data[0].loss_fn_inputs['weights'].data[0]: Expected `int | float`, got `null`"),
        (WEIGHTS + ".data", [10**400, 1], "weights"),
        (WEIGHTS + ".dtype", "float16", "['weights'].dtype: Invalid enum value 'float16'"),
        (WEIGHTS + ".shape", [3], "['weights'].shape must have 2 elements, the number of values; got [3]"),
        (WEIGHTS + ".shape", [2**80], "shape must have"),
        (WEIGHTS + ".data", [[0, 1]], "Expected `int | float`, got `array`"),
        (TARGETS + ".data", [6.5, 7], "['target_tokens'].data must be integers of 64 bits"),
        (TARGETS + ".data", [2**63, 7], "['target_tokens'].data must be integers of 64 bits"),
        (TARGETS + ".data", [10**400, 7], "must be integers of 64 bits"),
        (TARGETS + ".dtype", "float32", "['target_tokens'].dtype must be int64; got float32"),
    ],
)
def test_invalid_json_is_refused_with_location(path, value, says):
    error = refused(change(path, value), JSON)
    assert error.status == 400
    assert says in str(error)


def test_whole_floats_are_integers_and_overflowing_weights_infinite():
    """The checks refuse the latter."""
    assert read(change(TARGETS + ".data", [6.0, 7.0]), JSON)[1] == payload()
    assert np.isinf(read(change(WEIGHTS + ".data", [1e300, 0]), JSON)[0].data[0].inputs["weights"][0])


@pytest.mark.parametrize("seq", [0, -1])
def test_request_without_model_and_seq_is_refused(seq):
    assert "seq_id must be a number from 1" in str(refused(payload(seq_id=seq)))
    assert "seq_id must be a number from 1" in str(refused(as_json() | {"seq_id": seq}, JSON))
    assert "seq_id must be a number from 1" in str(refused(as_json() | {"seq_id": 2**40}, JSON))
    assert "model_id must be set; got ''" in str(refused(payload(model_id="")))
    assert "model_id must be set" in str(refused(payload(model_id="a\0b")))
    assert "missing required field `seq_id`" in str(
        refused({k: v for k, v in as_json().items() if k != "seq_id"}, JSON)
    )


def test_refused_body_still_reports_model_and_seq():
    there = Address("s:train:0", 7)
    assert find_address(payload(loss_fn="nonsense"), PROTOBUF, None, MAX) == there
    assert find_address(zstandard.compress(payload()), PROTOBUF, "zstd", MAX) == there
    assert find_address(json.dumps(change("data", None)).encode(), JSON, None, MAX) == there
    optim_step = {"model_id": "s:train:0", "seq_id": 7, "adam_params": "nonsense"}
    assert find_address(json.dumps(optim_step).encode(), JSON, None, MAX) == there


@pytest.mark.parametrize("body", [b"", b"[]", b"3", b'{"seq_id": 1}', b'{"model_id": "m", "seq_id": true}', b"\xff"])
def test_body_without_model_and_seq_has_no_address(body):
    assert find_address(body, JSON, None, MAX) is None
    assert find_address(body, PROTOBUF, "zstd", MAX) is None

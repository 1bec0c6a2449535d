"""Encoding and decoding are inverse, in the layout that the protocol fixes."""

import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from tx.errors import RequestError
from tx.tinker.types import Datum, PassOutput, SampleOutput, Sequence, TargetLogProbs
from tx.tinker.wire import tinker_wire_pb2 as pb
from tx.tinker.wire.codec import (
    TrainingRequest,
    decode_pass_output,
    decode_sample_output,
    decode_training,
    encode_pass_output,
    encode_pass_output_json,
    encode_sample_output,
    encode_training,
    sample_output_json,
)

float32 = st.floats(width=32, allow_nan=False)
tokens = npst.arrays(np.int64, st.integers(0, 20), elements=st.integers(0, 2**31 - 1))
shapes = st.one_of(st.tuples(st.integers(1, 6)), st.tuples(st.integers(1, 6), st.integers(1, 3)))


def same(a: Datum, b: Datum) -> bool:
    pairs = [(a.tokens, b.tokens), *((a.inputs[k], b.inputs[k]) for k in a.inputs)]
    return a.inputs.keys() == b.inputs.keys() and all(
        x.dtype == y.dtype and x.shape == y.shape and np.array_equal(x, y) for x, y in pairs
    )


@st.composite
def data(draw) -> Datum:
    shape = draw(shapes)
    inputs = {"target_tokens": draw(npst.arrays(np.int64, shape, elements=st.integers(-(2**63), 2**63 - 1)))}
    for name in draw(st.sets(st.sampled_from(["weights", "logprobs", "advantages", "anything"]))):
        inputs[name] = draw(npst.arrays(np.float32, shape, elements=float32))
    return Datum(tokens=draw(tokens), inputs=inputs)


@given(st.lists(data(), max_size=4), st.integers(1, 2**31 - 1), st.booleans(), st.text(max_size=5))
@settings(max_examples=40)
def test_training_request_round_trips(given_data, seq, forward_only, name):
    request = TrainingRequest(name, seq, given_data, "ppo", {"clip_low_threshold": 0.5}, forward_only)
    read = decode_training(encode_training(request))
    assert (read.model_id, read.seq_id, read.loss_fn, read.forward_only) == (name, seq, "ppo", forward_only)
    assert read.loss_config == {"clip_low_threshold": 0.5, "clip_high_threshold": 1.2}
    assert len(read.data) == len(given_data)
    assert all(same(a, b) for a, b in zip(given_data, read.data, strict=True))


@given(st.lists(shapes.flatmap(lambda shape: npst.arrays(np.float32, shape, elements=float32)), max_size=5))
@settings(max_examples=100)
def test_result_round_trips_with_different_k_per_datum(logprobs):
    read = decode_pass_output(encode_pass_output(PassOutput(logprobs, {"loss:sum": -1.5})))
    assert read.metrics == {"loss:sum": -1.5}
    assert all(np.array_equal(a, b) and a.shape == b.shape for a, b in zip(logprobs, read.logprobs, strict=True))


topk_row = st.lists(st.tuples(st.integers(0, 2**31 - 1), st.floats(-1000, 0, width=32)), min_size=1, max_size=3)


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 2**31 - 1), float32), max_size=4), max_size=3),
    st.none() | st.lists(st.none() | float32, min_size=1, max_size=5),
    st.none() | st.lists(st.none() | topk_row, min_size=1, max_size=4),
)
@settings(max_examples=100)
def test_samples_round_trip(answers, prompt_logprobs, topk):
    sequences = [Sequence([t for t, _ in a], [p for _, p in a], "stop" if len(a) % 2 else "length") for a in answers]
    output = SampleOutput(sequences, prompt_logprobs, topk)
    assert decode_sample_output(encode_sample_output(output)) == output


def test_training_request_matches_protocol_layout():
    message = pb.ForwardBackwardRequest(model_id="m", seq_id=3, loss_fn="cross_entropy")
    one = message.data.add()
    one.model_input.add().encoded_text.tokens = bytes([1, 0, 0, 0, 2, 0, 0, 0])
    one.model_input.add().encoded_text.tokens = bytes([3, 0, 0, 0])
    target = one.loss_fn_inputs["target_tokens"]
    target.dense, target.dtype = bytes([2, 0, 0, 0, 3, 0, 0, 0, 4, 0, 0, 0]), pb.DTYPE_INT32
    weights = one.loss_fn_inputs["weights"]
    weights.dense, weights.dtype = bytes([0x80, 0x3F, 0, 0, 0, 0xC0]), pb.DTYPE_BFLOAT16  # 1, 0, -2
    read = decode_training(message.SerializeToString()).data[0]
    assert read.tokens.tolist() == [1, 2, 3]
    assert read.inputs["target_tokens"].tolist() == [2, 3, 4]
    assert read.inputs["target_tokens"].dtype == np.int64
    assert read.inputs["weights"].tolist() == [1.0, 0.0, -2.0]
    assert all(array.flags.writeable for array in [read.tokens, *read.inputs.values()])  # torch warns of others


def message_of_sparse(num_data: int, name: str, values: np.ndarray, *, shape: list, crow: list, col: list):
    """Make a request of data with one sparse tensor each."""
    message = pb.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="cross_entropy")
    for _ in range(num_data):
        tensor = message.data.add().loss_fn_inputs[name]
        tensor.dtype = pb.DTYPE_INT64 if values.dtype == np.int64 else pb.DTYPE_FLOAT32
        tensor.shape.extend(shape)
        tensor.sparse_csr.values = values.tobytes()
        tensor.sparse_csr.crow_indices = np.array(crow, np.int64).tobytes()
        tensor.sparse_csr.col_indices = np.array(col, np.int64).tobytes()
    return message


def test_sparse_tensor_decodes_like_dense():
    parts = {"shape": [3, 4], "crow": [0, 2, 2, 3], "col": [0, 3, 1]}
    message = message_of_sparse(1, "target_tokens", np.array([7, 8, 9]), **parts)
    read = decode_training(message.SerializeToString()).data[0].inputs["target_tokens"]
    assert read.tolist() == [[7, 0, 0, 8], [0, 0, 0, 0], [0, 9, 0, 0]]


@pytest.mark.parametrize(
    "change, says",
    [
        ({"shape": [2**40, 2**40]}, "at most"),
        ({"shape": [3]}, "[rows, columns]"),
        ({"shape": [-3, 4]}, "[rows, columns]"),
        ({"crow": [0, 2, 1, 3]}, "increasing"),
        ({"crow": [0, 2, 3]}, "4 numbers"),
        ({"crow": []}, "4 numbers"),
        ({"crow": [0, 2, 2, 9]}, "number of values"),
        ({"col": [0, 4, 1]}, "0 to 3"),
        ({"col": [0, -1, 1]}, "0 to 3"),
        ({"col": [0]}, "3 numbers"),
    ],
)
def test_inconsistent_sparse_tensor_is_refused(change, says):
    parts = {"shape": [3, 4], "crow": [0, 2, 2, 3], "col": [0, 3, 1]} | change
    message = message_of_sparse(1, "weights", np.ones(3, np.float32), **parts)
    with pytest.raises(RequestError, match=r"data\[0\]\.loss_fn_inputs\['weights'\]") as refused:
        decode_training(message.SerializeToString())
    assert says in str(refused.value)


def test_many_sparse_tensors_together_may_not_become_gigabytes():
    message = message_of_sparse(3, "weights", np.ones(0, np.float32), shape=[1, 2**24], crow=[0, 0], col=[])
    with pytest.raises(RequestError, match=r"data\[2\]"):
        decode_training(message.SerializeToString())


def test_cross_entropy_without_weights_has_weights_of_one():
    request = TrainingRequest("m", 1, [Datum(np.array([1]), {"target_tokens": np.array([[2, 3]])})], "cross_entropy")
    assert decode_training(encode_training(request)).data[0].inputs["weights"].tolist() == [[1.0, 1.0]]


@pytest.mark.parametrize(
    ("given", "expected"), [(None, [0.0, 0.0, 1.0, 1.0]), ([0.0, 1.0, 1.0, 0.0], [0.0, 1.0, 1.0, 0.0])]
)
def test_gspo_without_mask_counts_sampled_targets(given: list[float] | None, expected: list[float]):
    """The prompt is padded with zeros; the last token was certain when it was sampled."""
    inputs = {"target_tokens": np.array([0, 0, 5, 6]), "logprobs": np.array([0, 0, -1, 0], np.float32)}
    inputs["advantages"] = np.array([0, 0, 2, 2], np.float32)
    if given is not None:
        inputs["sequence_ratio_mask"] = np.array(given, np.float32)
    request = TrainingRequest("m", 1, [Datum(np.arange(4), inputs)], "gspo")
    assert decode_training(encode_training(request)).data[0].inputs["sequence_ratio_mask"].tolist() == expected


def test_integer_weights_become_floats_and_float_targets_are_refused():
    weights = {"target_tokens": np.array([2]), "weights": np.array([3])}
    request = TrainingRequest("m", 1, [Datum(np.array([1]), weights)], "cross_entropy")
    assert decode_training(encode_training(request)).data[0].inputs["weights"].dtype == np.float32
    request.data[0].inputs["target_tokens"] = np.array([2.0], np.float32)
    with pytest.raises(RequestError, match=r"data\[0\].loss_fn_inputs\['target_tokens'\].dtype"):
        decode_training(encode_training(request))


def test_loss_config_v2_overrides_loss_config():
    message = pb.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="dro", loss_fn_config={"beta": 1.0})
    assert decode_training(message.SerializeToString()).loss_config == {"beta": 1.0}
    message.loss_fn_config_v2["beta"].number = 2.0
    assert decode_training(message.SerializeToString()).loss_config == {"beta": 2.0}
    message.loss_fn_config_v2["beta"].text = "large"
    with pytest.raises(RequestError, match="loss_fn_config"):
        decode_training(message.SerializeToString())


@pytest.mark.parametrize("kind", ["image", "dmel"])
def test_chunks_other_than_text_are_refused_by_name(kind):
    message = pb.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="cross_entropy")
    getattr(message.data.add().model_input.add(), kind).SetInParent()
    with pytest.raises(RequestError, match=rf"data\[0\].model_input.chunks\[0\] must be encoded_text.*got {kind}"):
        decode_training(message.SerializeToString())


def test_unknown_field_of_newer_client_is_refused():
    payload = encode_training(TrainingRequest("m", 1, [], "ppo")) + bytes([(99 << 3) & 0x7F | 0x80, 99 >> 4, 1])
    with pytest.raises(RequestError, match="field number 99"):
        decode_training(payload)


@pytest.mark.parametrize("cut", [1, 10, 30])
def test_truncated_bytes_are_refused(cut):
    request = TrainingRequest("model", 1, [Datum(np.array([1, 2, 3]), {"target_tokens": np.array([2, 3, 4])})], "ppo")
    with pytest.raises(RequestError, match="ForwardBackwardRequest"):
        decode_training(encode_training(request)[:-cut])


def test_misaligned_tokens_and_wrong_shapes_are_refused():
    message = pb.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="ppo")
    message.data.add().model_input.add().encoded_text.tokens = b"abc"
    with pytest.raises(RequestError, match="3 bytes"):
        decode_training(message.SerializeToString())
    message.data[0].model_input[0].encoded_text.tokens = b"abcd"
    tensor = message.data[0].loss_fn_inputs["weights"]
    tensor.dense, tensor.dtype = b"abcd", pb.DTYPE_FLOAT32
    for shape in ([2], [-1], [1, 0], [2**62, 4], [-1, -1]):
        del tensor.shape[:]
        tensor.shape.extend(shape)
        with pytest.raises(RequestError, match="shape"):
            decode_training(message.SerializeToString())
    tensor.dtype = pb.DTYPE_UNSPECIFIED
    with pytest.raises(RequestError, match="dtype must be"):
        decode_training(message.SerializeToString())


def test_result_as_json_of_old_clients():
    output = PassOutput([np.array([-1.5, -2], np.float32), np.array([[-1, -2]], np.float32)], {"loss:sum": 3.5})
    assert encode_pass_output_json(encode_pass_output(output)) == {
        "loss_fn_output_type": "ArrayRecord",
        "loss_fn_outputs": [
            {"logprobs": {"data": [-1.5, -2.0], "dtype": "float32", "shape": [2]}},
            {"logprobs": {"data": [-1.0, -2.0], "dtype": "float32", "shape": [1, 2]}},
        ],
        "metrics": {"loss:sum": 3.5},
    }


def test_samples_as_json_of_old_clients():
    output = SampleOutput([Sequence([3, 4], [-0.5, -1.0], "stop")])
    plain = {"type": "sample", "sequences": [{"tokens": [3, 4], "logprobs": [-0.5, -1.0], "stop_reason": "stop"}]}
    assert sample_output_json(encode_sample_output(output)) == plain
    asked = SampleOutput(output.sequences, [None, -2.0], [None, [(7, -0.25), (0, -8.0)]])
    assert sample_output_json(encode_sample_output(asked)) == plain | {
        "prompt_logprobs": [None, -2.0],
        "topk_prompt_logprobs": [None, [(7, -0.25), (0, -8.0)]],
    }


@pytest.mark.parametrize("layout", [{}, {"crow": [0, 0, 2], "columns": [0, 1]}])
def test_target_logprobs_round_trip_in_layout(layout):
    values = [0.0, 0.0, -0.5, 0.0] if not layout else [-0.5, 0.0]
    output = SampleOutput([], target_prompt_logprobs=TargetLogProbs((2, 2), values, **layout))
    encoded = encode_sample_output(output)
    assert decode_sample_output(encoded) == output
    tensor = sample_output_json(encoded)["target_prompt_logprobs"]
    sparse = {"sparse_crow_indices": [0, 0, 2], "sparse_col_indices": [0, 1]} if layout else {}
    assert tensor == {"data": values, "dtype": "float32", "shape": [2, 2]} | sparse


def test_empty_topk_slots_are_token_0_at_minus_99999_and_never_nan():
    encoded = encode_sample_output(SampleOutput([], [None], [None, [(7, -0.25)], [(3, -1.0), (0, -2.0)]]))
    message = pb.SampleResponse.FromString(encoded)
    topk = message.topk_prompt_logprobs
    assert (topk.k, topk.length) == (2, 3)
    assert np.frombuffer(topk.token_ids, np.int32).tolist() == [0, 0, 7, 0, 3, 0]
    assert np.frombuffer(topk.logprobs, np.float32).tolist() == [-99999, -99999, -0.25, -99999, -1, -2]
    assert math.isnan(np.frombuffer(message.prompt_logprobs, np.float32)[0])
    assert decode_sample_output(encode_sample_output(SampleOutput([], [None], [None]))).topk_prompt_logprobs == [None]


def test_five_megabytes_are_read_in_no_time():
    """Takes about 30 ms on a quiet core; the bound is for a busy one. A loop over tokens would take seconds."""
    one = {name: np.zeros(300, np.float32) for name in ("logprobs", "advantages")}
    datum = Datum(np.arange(300), {"target_tokens": np.arange(300), **one})
    payload = encode_training(TrainingRequest("m", 1, [datum] * 1000, "ppo"))
    assert len(payload) > 5_000_000
    start = time.process_time()
    decode_training(payload)
    assert time.process_time() - start < 0.5

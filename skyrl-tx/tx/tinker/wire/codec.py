"""Wire encoding of training requests and results, and JSON results for clients without protobuf.

Checks that bytes can be decoded; `checks` validates values. Cost: a few microseconds per datum, independent of tokens.
"""

from dataclasses import dataclass, field
from itertools import groupby
from math import prod
from typing import TypeVar

import numpy as np
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from tx.errors import RequestError
from tx.tinker.chunked_lists import list_of, to_array
from tx.tinker.types import Datum, PassOutput, SampleOutput, Sequence, TargetLogProbs
from tx.tinker.wire import tinker_wire_pb2 as pb
from tx.tinker.wire.losses import TARGETS, fill_default_config, fill_default_inputs
from tx.tinker.wire.tensors import TensorReader, read_tokens, write_tensor

MAX_DATA = 16_384
"""Data of a request; the SDK sends at most 1,024."""
EMPTY_TOKEN, EMPTY_LOGPROB = 0, -99999.0
"""A slot of top-k log-probs that holds nothing."""

M = TypeVar("M", bound=Message)


@dataclass(frozen=True)
class TrainingRequest:
    """A forward or forward-backward request of one model, defaults of its loss filled in."""

    model_id: str
    seq_id: int
    data: list[Datum]
    loss_fn: str
    loss_config: dict[str, float] = field(default_factory=dict)
    forward_only: bool = False
    payload: bytes = field(default=b"", repr=False, compare=False)
    """`ForwardBackwardRequest` as bytes, if the request was read from a body."""


# ---- training: the request


def decode_training(payload: bytes) -> TrainingRequest:
    """Decode a `ForwardBackwardRequest`.

    Raises:
        RequestError: invalid bytes or unreadable contents.
    """
    message = parse_message(pb.ForwardBackwardRequest, payload)
    check_unknown_fields(message, "the request")
    if len(message.data) > MAX_DATA:
        raise RequestError(f"data must be at most {MAX_DATA} data; got {len(message.data)}")
    reader = TensorReader()
    return TrainingRequest(
        model_id=message.model_id,
        seq_id=message.seq_id,
        data=[_read_datum(datum, reader, message.loss_fn, f"data[{i}]") for i, datum in enumerate(message.data)],
        loss_fn=message.loss_fn,
        loss_config=fill_default_config(message.loss_fn, _read_loss_config(message)),
        forward_only=message.forward_only,
    )


def encode_training(request: TrainingRequest) -> bytes:
    """Encode a `ForwardBackwardRequest`; tokens must fit 32 bits."""
    message = pb.ForwardBackwardRequest(
        model_id=request.model_id, seq_id=request.seq_id, loss_fn=request.loss_fn, forward_only=request.forward_only
    )
    for name, number in request.loss_config.items():
        message.loss_fn_config_v2[name].number = number
    for datum in request.data:
        written = message.data.add()
        written.model_input.add().encoded_text.tokens = datum.tokens.astype("<i4").tobytes()
        for name, array in datum.inputs.items():
            write_tensor(array, written.loss_fn_inputs[name])
    return message.SerializeToString(deterministic=True)


def convert_input(name: str, array: np.ndarray, field_name: str) -> np.ndarray:
    """Convert an input to the type of its name: targets are integers, everything else is float32.

    Raises:
        RequestError: non-integer targets.
    """
    if name != TARGETS:
        return array.astype(np.float32, copy=False)
    if array.dtype.kind != "i":
        raise RequestError(f"{field_name}.dtype must be int64; got float32")
    return array


def parse_message(kind: type[M], data: bytes) -> M:
    """Parse protobuf bytes.

    Raises:
        RequestError: invalid bytes.
    """
    message = kind()
    try:
        message.ParseFromString(data)
    except DecodeError:
        raise RequestError(
            f"body must be a protobuf {kind.__name__}; its {len(data)} bytes are invalid or truncated"
        ) from None
    return message


def check_unknown_fields(message: Message, what: str) -> None:
    """Refuse unknown fields: a field of a newer client may change the meaning of the request."""
    for unknown in UnknownFieldSet(message):
        raise RequestError(f"field number {unknown.field_number} of {what} is unknown to this server")


def _read_loss_config(message: pb.ForwardBackwardRequest) -> dict[str, float]:
    config = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        if value.WhichOneof("value") != "number":
            raise RequestError(f"loss_fn_config[{name!r}] must be a number; got {value.text[:80]!r}")
        config[name] = value.number
    return config


def _read_datum(message: pb.Datum, reader: TensorReader, loss_fn: str, name: str) -> Datum:
    check_unknown_fields(message, name)
    chunks = [_read_chunk(chunk, f"{name}.model_input.chunks[{i}]") for i, chunk in enumerate(message.model_input)]
    inputs = {}
    for key, tensor in message.loss_fn_inputs.items():
        field_name = f"{name}.loss_fn_inputs[{key!r}]"
        inputs[key] = convert_input(key, reader.read(tensor, field_name), field_name)
    return fill_default_inputs(loss_fn, Datum(tokens=join_chunks(chunks), inputs=inputs))


def _read_chunk(chunk: pb.Chunk, name: str) -> np.ndarray:
    kind = chunk.WhichOneof("chunk")
    if kind != "encoded_text":
        raise RequestError(describe_non_text_input(name, kind))
    return read_tokens(chunk.encoded_text.tokens, f"{name}.tokens")


def describe_non_text_input(name: str, kind: str | None) -> str:
    """Return the error text for an input that is not text."""
    return f"{name} must be encoded_text: the models of this server are text-only; got {kind or 'something else'}"


def join_chunks(chunks: list[np.ndarray]) -> np.ndarray:
    """[N] int64."""
    return chunks[0] if len(chunks) == 1 else np.concatenate([np.zeros(0, np.int64), *chunks])


# ---- training: the result


def encode_pass_output(output: PassOutput) -> bytes:
    """Encode a `ForwardBackwardOutput`: one record of the data, or one of each run of data with the same K."""
    assert all(":" in name for name in output.metrics), "clients crash on a metric that is not `name:how`"
    message = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics=output.metrics)
    for trailing, run in groupby(output.logprobs, key=lambda array: array.shape[1:]):
        arrays = [np.ascontiguousarray(array, "<f4") for array in run]
        record = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(arrays))
        tensor = record.fields["logprobs"]
        tensor.data = b"".join(array.tobytes() for array in arrays)
        tensor.offsets = np.cumsum([0, *(array.nbytes for array in arrays)], dtype="<i8").tobytes()
        tensor.dtype = pb.DTYPE_FLOAT32
        tensor.trailing_shape.extend(trailing)
    return message.SerializeToString(deterministic=True)


def decode_pass_output(data: bytes) -> PassOutput:
    """Decode the output of `encode_pass_output`."""
    message = parse_message(pb.ForwardBackwardOutput, data)
    logprobs = []
    for record in message.loss_fn_outputs:
        tensor = record.fields["logprobs"]
        flat = np.frombuffer(tensor.data, "<f4")
        ends = np.frombuffer(tensor.offsets, "<i8")[1:-1] // flat.itemsize
        trailing = tuple(tensor.trailing_shape)
        logprobs += [part.reshape(part.size // prod(trailing), *trailing) for part in np.split(flat, ends)]
    return PassOutput(logprobs=logprobs, metrics=dict(message.metrics))


def encode_pass_output_json(data: bytes) -> dict[str, object]:
    """Encode a pass output for clients that accept JSON."""
    output = decode_pass_output(data)
    return {
        "loss_fn_output_type": "ArrayRecord",
        "loss_fn_outputs": [
            {"logprobs": {"data": array.ravel().tolist(), "dtype": "float32", "shape": list(array.shape)}}
            for array in output.logprobs
        ],
        "metrics": output.metrics,
    }


# ---- sampling: the result


def encode_sample_output(output: SampleOutput) -> bytes:
    """Encode a `SampleResponse`."""
    message = pb.SampleResponse()
    for sequence in output.sequences:
        message.sequences.add(
            stop_reason=pb.STOP_REASON_STOP if sequence.stop_reason == "stop" else pb.STOP_REASON_LENGTH,
            tokens=np.asarray(sequence.tokens, "<i4").tobytes(),
            logprobs=np.asarray(sequence.logprobs, "<f4").tobytes(),
        )
    if output.prompt_logprobs is not None:
        message.prompt_logprobs = np.asarray(output.prompt_logprobs, "<f4").tobytes()  # None becomes NaN
    if output.topk_prompt_logprobs is not None:
        _write_topk(output.topk_prompt_logprobs, message.topk_prompt_logprobs)
    if output.target_prompt_logprobs is not None:
        _write_targets(output.target_prompt_logprobs, message.target_prompt_logprobs)
    return message.SerializeToString(deterministic=True)


def decode_sample_output(data: bytes) -> SampleOutput:
    """Decode the output of `encode_sample_output`; log-probs have the precision of float32."""
    message = parse_message(pb.SampleResponse, data)
    return SampleOutput(
        sequences=[
            Sequence(
                tokens=np.frombuffer(sequence.tokens, "<i4").tolist(),
                logprobs=np.frombuffer(sequence.logprobs, "<f4").tolist(),
                stop_reason="stop" if sequence.stop_reason == pb.STOP_REASON_STOP else "length",
            )
            for sequence in message.sequences
        ],
        prompt_logprobs=(
            [None if x != x else x for x in np.frombuffer(message.prompt_logprobs, "<f4").tolist()]
            if message.HasField("prompt_logprobs")
            else None
        ),
        topk_prompt_logprobs=(
            _read_topk(message.topk_prompt_logprobs) if message.HasField("topk_prompt_logprobs") else None
        ),
        target_prompt_logprobs=(
            _read_targets(message.target_prompt_logprobs) if message.HasField("target_prompt_logprobs") else None
        ),
    )


def sample_output_json(data: bytes) -> dict[str, object]:
    """Encode a sample output for clients that accept JSON; fields not requested are omitted."""
    output = decode_sample_output(data)
    answer: dict[str, object] = {"type": "sample", "sequences": [sequence._asdict() for sequence in output.sequences]}
    if output.prompt_logprobs is not None:
        answer["prompt_logprobs"] = output.prompt_logprobs
    if output.topk_prompt_logprobs is not None:
        answer["topk_prompt_logprobs"] = output.topk_prompt_logprobs
    if (targets := output.target_prompt_logprobs) is not None:
        tensor = {"data": targets.values, "dtype": "float32", "shape": list(targets.shape)}
        sparse = {"sparse_crow_indices": targets.crow, "sparse_col_indices": targets.columns}
        answer["target_prompt_logprobs"] = tensor if targets.crow is None else tensor | sparse
    return answer


def _write_targets(targets: TargetLogProbs, message: pb.Tensor) -> None:
    message.dtype = pb.DTYPE_FLOAT32
    message.shape.extend(targets.shape)
    values = to_array(targets.values).astype("<f4").tobytes()
    if targets.crow is None or targets.columns is None:
        message.dense = values
        return
    message.sparse_csr.values = values
    message.sparse_csr.crow_indices = to_array(targets.crow).astype("<i8").tobytes()
    message.sparse_csr.col_indices = to_array(targets.columns).astype("<i8").tobytes()


def _read_targets(message: pb.Tensor) -> TargetLogProbs:
    csr = message.sparse_csr if message.HasField("sparse_csr") else None
    rows, columns = message.shape
    return TargetLogProbs(
        (rows, columns),
        list_of(np.frombuffer(message.dense if csr is None else csr.values, "<f4")),
        None if csr is None else list_of(np.frombuffer(csr.crow_indices, "<i8")),
        None if csr is None else list_of(np.frombuffer(csr.col_indices, "<i8")),
    )


def _write_topk(rows: list[list[tuple[int, float]] | None], message: pb.TopkLogprobs) -> None:
    k = max([1, *(len(row) for row in rows if row)])  # clients take a table without columns for none at all
    padded = [[*(row or ()), *[(EMPTY_TOKEN, EMPTY_LOGPROB)] * (k - len(row or ()))] for row in rows]
    pairs = np.asarray(padded, np.float64).reshape(len(rows), k, 2)  # exact: token ids are below 2^53
    message.token_ids = pairs[:, :, 0].astype("<i4").tobytes()
    message.logprobs = pairs[:, :, 1].astype("<f4").tobytes()
    message.k, message.length = k, len(rows)


def _read_topk(message: pb.TopkLogprobs) -> list[list[tuple[int, float]] | None]:
    tokens = np.frombuffer(message.token_ids, "<i4").tolist()
    logprobs = np.frombuffer(message.logprobs, "<f4").tolist()
    pairs = list(zip(tokens, logprobs, strict=True))
    rows = [pairs[start : start + message.k] for start in range(0, len(pairs), message.k)]
    return [[pair for pair in row if pair != (EMPTY_TOKEN, EMPTY_LOGPROB)] or None for row in rows]

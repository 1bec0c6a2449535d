"""Parser of `forward_backward` and `forward` bodies: JSON of old clients or protobuf, optionally zstd-compressed.
Invalid bodies are refused before they use memory.
"""

import re
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec
import zstandard
from google.protobuf.message import DecodeError

from tx.errors import RequestError
from tx.tinker.types import Datum
from tx.tinker.wire import tinker_wire_pb2 as pb
from tx.tinker.wire.codec import (
    MAX_DATA,
    TrainingRequest,
    convert_input,
    decode_training,
    describe_non_text_input,
    encode_training,
    join_chunks,
)
from tx.tinker.wire.losses import fill_default_config, fill_default_inputs
from tx.tinker.wire.tensors import JsonTensor, TensorReader, read_json_tokens

PROTOBUF = ("application/x-protobuf", "application/protobuf")
MAX_SEQ = 2**31 - 1
_MODEL_ID = re.compile(r"[^\x00-\x1f]{1,1024}")


class Address(NamedTuple):
    """Model and seq of a request."""

    model_id: str
    seq: int


def read_training_body(
    body: bytes,
    content_type: str,
    content_encoding: str | None,
    *,
    forward_only_default: bool,
    max_bytes: int,
) -> TrainingRequest:
    """Decode a request. Its `payload` are the bytes that `decode_training` reads back as the same request.

    Args:
        forward_only_default: the endpoint is `forward`
        max_bytes: of the body, packed and unpacked

    Raises:
        RequestError: too large (413), unsupported type (415), contradicting its type, or without an address (400).
    """
    kind = _parse_media_type(content_type)
    if kind not in (*PROTOBUF, "application/json"):
        raise RequestError(f"content-type must be application/json or {PROTOBUF[0]}; got {content_type[:80]!r}", 415)
    body = unpack(body, content_encoding, max_bytes)
    if kind == "application/json":
        request = _from_json(body, forward_only_default)
        _check_address(request)
        return replace(request, payload=encode_training(request))
    request = decode_training(body)
    _check_address(request)
    if forward_only_default and not request.forward_only:
        body += _encode_override(forward_only=True)
    return replace(request, payload=body, forward_only=forward_only_default or request.forward_only)


def set_loss(request: TrainingRequest, loss_fn: str) -> TrainingRequest:
    """Return a request that was read from a body with another loss, in its payload too."""
    return replace(
        request,
        loss_fn=loss_fn,
        loss_config=fill_default_config(loss_fn, request.loss_config),
        data=[fill_default_inputs(loss_fn, datum) for datum in request.data],
        payload=request.payload + _encode_override(loss_fn=loss_fn),
    )


def _encode_override(**fields: Any) -> bytes:
    """Return bytes that set fields of a payload when they follow it: the last value of a field counts."""
    return pb.ForwardBackwardRequest(**fields).SerializeToString()


def find_address(body: bytes, content_type: str, content_encoding: str | None, max_bytes: int) -> Address | None:
    """Read model and seq of a refused body with `model_id` and `seq_id`, if possible: clients never reuse a seq, so the
    model continues with the next. Never raises."""
    try:
        body = unpack(body, content_encoding, max_bytes)
        if _parse_media_type(content_type) in PROTOBUF:
            message = pb.ForwardBackwardRequest.FromString(body)
            model_id, seq = message.model_id, message.seq_id
        else:
            fields = msgspec.json.decode(body, type=_Addressed)
            model_id, seq = fields.model_id, fields.seq_id
    except (RequestError, DecodeError, msgspec.MsgspecError, ValueError, RecursionError):
        return None
    if not _MODEL_ID.fullmatch(model_id) or not 0 < seq <= MAX_SEQ:
        return None
    return Address(model_id, seq)


class _Addressed(msgspec.Struct):
    """Address of a request. The rest of the body is skipped without building objects, which is many times faster."""

    model_id: str
    seq_id: int


def unpack(body: bytes, content_encoding: str | None, max_bytes: int) -> bytes:
    """Decompress a body.

    Raises:
        RequestError: too large, compressed or not (413); not zstd (415); truncated or invalid zstd (400).
    """
    if len(body) > max_bytes:
        raise build_too_large(max_bytes)
    match (content_encoding or "identity").strip().lower():
        case "identity":
            return body
        case "zstd":
            return _unpack_zstd(body, max_bytes)
        case other:
            raise RequestError(f"content-encoding must be zstd or identity; got {other[:80]!r}", 415)


def build_too_large(max_bytes: int) -> RequestError:
    return RequestError(
        f"body must be at most {max_bytes:,} bytes, including after decompression (--max-body-mb); send "
        "less data per request",
        413,
    )


def _unpack_zstd(body: bytes, max_bytes: int) -> bytes:
    try:
        size = zstandard.get_frame_parameters(body).content_size
        if size == zstandard.CONTENTSIZE_UNKNOWN:
            return _unpack_zstd_of_unknown_size(body, max_bytes)
        if size > max_bytes:
            raise build_too_large(max_bytes)
        return zstandard.ZstdDecompressor().decompress(body, max_output_size=max_bytes, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise RequestError(f"body must be one complete zstd frame to match content-encoding ({error})") from None


def _unpack_zstd_of_unknown_size(body: bytes, max_bytes: int) -> bytes:
    """Unpack in small pieces: one byte of zstd can be thousands of bytes of data."""
    stream = zstandard.ZstdDecompressor().decompressobj()
    parts, size = [], 0
    for start in range(0, len(body), 1024):
        parts.append(stream.decompress(body[start : start + 1024]))
        size += len(parts[-1])
        if size > max_bytes:
            raise build_too_large(max_bytes)
        if stream.eof:
            break
    if not stream.eof or stream.unused_data or start + 1024 < len(body):
        raise zstandard.ZstdError("it is truncated, or followed by other data")
    return b"".join(parts)


def _parse_media_type(content_type: str) -> str:
    return content_type.split(";")[0].strip().lower()


def _check_address(request: TrainingRequest) -> None:
    if not _MODEL_ID.fullmatch(request.model_id):
        raise RequestError(f"model_id must be set; got {request.model_id[:80]!r}")
    if not 0 < request.seq_id <= MAX_SEQ:
        raise RequestError(
            f"seq_id must be a number from 1 to {MAX_SEQ}, increasing by 1 with each request; got {request.seq_id}"
        )


# ---- JSON of clients up to 0.24


class _JsonChunk(msgspec.Struct):
    type: str | None = None
    """Clients up to 0.16 leave it out."""
    tokens: list[int] | None = None


class _ModelInput(msgspec.Struct, forbid_unknown_fields=True):
    chunks: list[_JsonChunk]


class _Datum(msgspec.Struct, forbid_unknown_fields=True):
    model_input: _ModelInput
    loss_fn_inputs: dict[str, msgspec.Raw] = {}
    """Each read by itself, so that errors can name it."""


class _Input(msgspec.Struct, forbid_unknown_fields=True):
    data: list[_Datum]
    loss_fn: str
    loss_fn_config: dict[str, object] | None = None


class _ForwardBackward(msgspec.Struct, forbid_unknown_fields=True):
    model_id: str
    seq_id: int
    forward_backward_input: _Input
    type: str | None = None


class _Forward(msgspec.Struct, forbid_unknown_fields=True):
    model_id: str
    seq_id: int
    forward_input: _Input
    type: str | None = None


def _from_json(body: bytes, forward_only: bool) -> TrainingRequest:
    kind: Any = _Forward if forward_only else _ForwardBackward
    message = _decode_json(body, kind, "")
    given: _Input = message.forward_input if forward_only else message.forward_backward_input
    if len(given.data) > MAX_DATA:
        raise RequestError(f"data must be at most {MAX_DATA} data; got {len(given.data)}")
    reader = TensorReader()
    return TrainingRequest(
        model_id=message.model_id,
        seq_id=message.seq_id,
        data=[_parse_datum(datum, reader, given.loss_fn, f"data[{i}]") for i, datum in enumerate(given.data)],
        loss_fn=given.loss_fn,
        loss_config=fill_default_config(given.loss_fn, _parse_loss_config(given.loss_fn_config or {})),
        forward_only=forward_only,
    )


def _decode_json(body: bytes | msgspec.Raw, kind: Any, name: str) -> Any:
    """Decode JSON into a struct; `name` is its location in the body, if nested."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:  # "Expected `int`, got `str` - at `$.data[0]`"
        rule, _, place = str(error).partition(" - at ")
        raise RequestError(f"{(name + place.strip('`$')).removeprefix('.') or 'body'}: {rule}") from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise RequestError(f"body must be JSON, which does not allow NaN or Infinity: {error}") from None


def _parse_loss_config(given: dict[str, Any]) -> dict[str, float]:
    for name, value in given.items():
        if type(value) not in (int, float) or abs(value) > 1e308:
            raise RequestError(f"loss_fn_config[{name[:80]!r}] must be a number; got {str(value)[:80]!r}")
    return {name: float(value) for name, value in given.items()}


def _parse_datum(datum: _Datum, reader: TensorReader, loss_fn: str, name: str) -> Datum:
    chunks = []
    for i, chunk in enumerate(datum.model_input.chunks):
        field = f"{name}.model_input.chunks[{i}]"
        if chunk.type not in (None, "encoded_text") or chunk.tokens is None:
            raise RequestError(describe_non_text_input(field, chunk.type))
        chunks.append(read_json_tokens(chunk.tokens, f"{field}.tokens"))
    inputs = {}
    for key, tensor in datum.loss_fn_inputs.items():
        field = f"{name}.loss_fn_inputs[{key!r}]"
        inputs[key] = convert_input(key, reader.read_json(_decode_json(tensor, JsonTensor, field), field), field)
    return fill_default_inputs(loss_fn, Datum(tokens=join_chunks(chunks), inputs=inputs))

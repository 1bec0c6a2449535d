"""What a request's row remembers: the order for the engine, and what is to be done here when it is done."""

from typing import Any

import msgspec

from tx.tinker.engine.messages import CreateModel, Load, Optimize, Sample, Save, Train, Unload
from tx.tinker.types import CheckpointKind


class SaveEffect(msgspec.Struct, frozen=True, kw_only=True):
    """What a finished `Save` becomes: a checkpoint with a name, a sampler, or both."""

    kind: CheckpointKind
    name: str | None = None
    overwrite: bool = False
    ttl_seconds: int | None = None
    user_metadata: dict[str, Any] | None = None
    sampling_session_seq_id: int | None = None


class Record(msgspec.Struct, frozen=True, kw_only=True):
    order: CreateModel | Train | Optimize | Save | Load | Unload | Sample
    """Without its payload, if that is a blob."""
    answer: bytes | None = None
    """JSON that is the result, where it does not depend on what the engine says."""
    save: SaveEffect | None = None


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Record)


def encode_record(record: Record) -> bytes:
    return _encoder.encode(record)


def decode_record(data: bytes) -> Record:
    return _decoder.decode(data)

"""Receiver of weight syncs inside SGLang's scheduler processes.

SGLang calls `load` (`--custom-weight-loader`) with named tensors. The names are commands as JSON; the tensors are
empty, since weights use another transport. Results are returned in files: SGLang has no return channel, and an uncaught
error would end the process.
"""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from skyrl_train.errors import WeightSyncError
from skyrl_train.types import JsonObject
from skyrl_train.weight_sync.base import WeightSyncInitInfo, WeightUpdateRequest
from skyrl_train.weight_sync.fingerprint import Verification, fingerprints_of

if TYPE_CHECKING:
    from skyrl_train.weight_sync.receiver import WeightReceiver

NAME = f"{__name__}.load"
"""Name of this loader in SGLang's settings."""


@dataclass
class _Connection:
    receiver: "WeightReceiver"
    verification: Verification
    fingerprints: dict[str, int] = field(default_factory=dict)
    names_before: frozenset[str] = frozenset()
    """Tensor names of the previous update."""


_connection: _Connection | None = None


def load(model: torch.nn.Module, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """Execute the commands in the names and write the results."""
    for text, _ in named_tensors:
        order = json.loads(text)
        try:
            answer = {"fingerprints": _handle_order(model, order)}
        except Exception as error:  # any error must reach the trainer and not SGLang
            answer = {"error": f"{type(error).__name__}: {error}"}
        unfinished = Path(order["answer"] + ".part")
        unfinished.write_text(json.dumps(answer))
        os.replace(unfinished, order["answer"])


def _handle_order(model: torch.nn.Module, order: JsonObject) -> dict[str, int]:
    match order["do"]:
        case "connect":
            _connect(model, WeightSyncInitInfo(**order["info"]), order["process_index"])
        case "update":
            _update(model, WeightUpdateRequest.from_json_dict(order["request"]))
        case "finish":
            return _finish(order["version"])
    return {}


def _connect(model: torch.nn.Module, info: WeightSyncInitInfo, process_index: int) -> None:
    global _connection
    from skyrl_train.weight_sync.receiver import WeightReceiver

    if _connection is not None:
        _connection.receiver.close()
        _connection = None
    device = next(model.parameters()).device
    _connection = _Connection(WeightReceiver(info, device, process_index), info.verification)


def _get_connection() -> _Connection:
    if _connection is None:
        raise WeightSyncError("no connection: init_weight_update_communicator was not called")
    return _connection


def _update(model: torch.nn.Module, request: WeightUpdateRequest) -> None:
    connection = _get_connection()
    if request.index == 0:
        connection.fingerprints = {}
    bucket = connection.receiver.receive(request)
    try:
        model.load_weights(bucket)  # pyright: ignore[reportCallIssue]  # every SGLang model has it
    except Exception as error:
        raise WeightSyncError(
            f"the model does not take {', '.join(request.names)}: {type(error).__name__}: {error}"
        ) from error
    connection.fingerprints |= fingerprints_of(bucket, request.version, connection.verification)


def _finish(version: int) -> dict[str, int]:
    connection = _get_connection()
    names = frozenset(connection.fingerprints)
    try:
        connection.receiver.finish(version)
    except WeightSyncError as error:
        unknown = sorted(names - connection.names_before)
        if connection.names_before and unknown:
            raise WeightSyncError(f"{error}, and with {len(unknown)} unknown ones, such as {unknown[0]!r}") from error
        raise
    connection.names_before = names
    return connection.fingerprints

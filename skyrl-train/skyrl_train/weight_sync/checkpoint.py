"""File transport for trainer and engines with a shared file system: safetensors in Hugging Face's layout, which any
server can load.

    <directory>/<version>/model-00001-of-00002.safetensors, ..., model.safetensors.index.json

A version's folder appears atomically. It is deleted after all engines have a later version.
"""

import json
import mmap
import os
import shutil
import struct
from pathlib import Path
from typing import BinaryIO

import torch

from skyrl_gym.whole_folders import move_into_place
from skyrl_train.errors import WeightSyncError
from skyrl_train.utils.io import write_atomically
from skyrl_train.weight_sync.base import BytesLocation, WeightUpdateRequest
from skyrl_train.weight_sync.payload import Payload, num_bytes_of
from skyrl_train.weight_sync.transport import Reader, Writer

INDEX = "model.safetensors.index.json"
_UNFINISHED = ".unfinished"
_RAW = ".bucket"  # a payload other than safetensors: deltas, for engines with the base version
_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}


class CheckpointVersion:
    """Files of one version while they are written."""

    def __init__(self, directory: Path, version: int):
        self.version = version
        self._folder = directory / str(version)
        self._unfinished = directory / f"{version}{_UNFINISHED}"
        self._names: list[list[str]] = []
        self._num_bytes = 0
        shutil.rmtree(self._unfinished, ignore_errors=True)
        self._unfinished.mkdir(parents=True)

    def add(self, payload: Payload) -> None:
        """Write one bucket to a separate file, tensor by tensor."""
        with (self._unfinished / str(len(self._names))).open("wb") as file:
            file.write(_format_header(payload))
            _write_bytes(file, payload)
        self._names.append(payload.names)
        self._num_bytes += payload.num_bytes

    def publish(self) -> list[Path]:
        """Rename the files and their folder to their final names. Returns the files."""
        count = len(self._names)
        names = [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
        for number, name in enumerate(names):
            (self._unfinished / str(number)).rename(self._unfinished / name)
        weight_map = {tensor: name for name, tensors in zip(names, self._names, strict=True) for tensor in tensors}
        index = {"metadata": {"total_size": self._num_bytes}, "weight_map": weight_map}
        write_atomically(self._unfinished / INDEX, json.dumps(index, indent=2))  # also flushes the folder's entries
        move_into_place(self._unfinished, self._folder)  # replaces one of an earlier run
        return [self._folder / name for name in names]


class CheckpointWriter(Writer):
    """Trainer side of the file transport. The last version's files are kept for restarting servers."""

    def __init__(self, directory: str):
        self._directory = Path(directory)

    def write(self, payload: Payload, version: int, index: int) -> BytesLocation:
        """Write the bytes unless they already are in a file, and return their location."""
        if payload.place:
            return payload.place
        folder = self._directory / str(version)
        file = folder / f"{index:05}{_RAW}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            unfinished = file.with_suffix(_UNFINISHED)
            with unfinished.open("wb") as opened:
                _write_bytes(opened, payload)
            unfinished.rename(file)  # an engine may still map the file of a failed attempt
        except OSError as error:
            raise WeightSyncError(f"{file} cannot be written (generator.weight_sync_directory): {error}") from error
        return {"location": str(file)}

    def finish(self, version: int) -> None:
        """Delete all other versions and unfinished files."""
        for folder in self._directory.iterdir():
            number = folder.name.removesuffix(_UNFINISHED)
            if folder.is_dir() and number.isdecimal() and folder.name != str(version):
                shutil.rmtree(folder, ignore_errors=True)


class CheckpointReader(Reader):
    """Engine side of the file transport, for engines that load tensors rather than a folder."""

    def read(self, request: WeightUpdateRequest) -> torch.Tensor:
        """Read the bucket's bytes [num_bytes] uint8, mapped from its file.

        Raises:
            WeightSyncError: the file is missing or differs from the request.
        """
        if request.num_bytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        try:
            with open(request.location, "rb") as file:
                start = 0 if request.location.endswith(_RAW) else _find_end_of_header(file)
                size = os.fstat(file.fileno()).st_size
                if size - start != request.num_bytes:
                    raise WeightSyncError(
                        f"{request.location} holds {size - start} bytes of weights, but bucket {request.index} of "
                        f"version {request.version} announces {request.num_bytes}"
                    )
                return torch.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), dtype=torch.uint8)[start:]
        except (OSError, struct.error) as error:
            raise WeightSyncError(
                f"{request.location} cannot be read here: {error}. Trainer and engines must see "
                "generator.weight_sync_directory under one name"
            ) from error


def _format_header(payload: Payload) -> bytes:
    """Return the start of a safetensors file: header length, and tensor offsets as JSON."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, dtype, shape in zip(payload.names, payload.dtypes, payload.shapes, strict=True):
        end = start + num_bytes_of(dtype, shape)
        entries[name] = {"dtype": _DTYPES[dtype], "shape": list(shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)  # tensors start at a multiple of 8
    return struct.pack("<Q", len(text)) + text


def _find_end_of_header(file: BinaryIO) -> int:
    return 8 + struct.unpack("<Q", file.read(8))[0]


def _write_bytes(file: BinaryIO, payload: Payload) -> None:
    for part in payload.parts:
        file.write(part.cpu().numpy().data)
    file.flush()
    os.fsync(file.fileno())

"""Staging: work of the trainer for a sync while the engines still generate (delta encoding, writing files)."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
import xxhash

from skyrl_train.errors import WeightSyncError
from skyrl_train.weight_sync.checkpoint import CheckpointVersion
from skyrl_train.weight_sync.delta import encode
from skyrl_train.weight_sync.last_weights import LastWeights
from skyrl_train.weight_sync.payload import Buffer, Payload, integers_of


class DeltaStage:
    """Deltas to the previous version, in a file; whole tensors for engines without that version."""

    def __init__(self, directory: str):
        self._directory = directory
        self._last = LastWeights(directory)
        self._buffer = Buffer(torch.device("cpu"))
        self._buckets: list[Payload] = []
        self._base_version: int | None = None  # base version of `_changes`
        self._changes = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115
        self._sizes: list[int] = []

    def begin(self, version: int) -> None:
        """Discard the buckets of the previous version."""
        self._base_version, self._last.version = self._last.version, None
        self._buckets, self._sizes = [], []
        self._changes.seek(0)
        self._changes.truncate()

    def add(self, payload: Payload) -> None:
        """Encode every tensor against its previous version."""
        self._add_bucket(payload)
        self._buckets.append(replace(payload, parts=[], bucket=[]))

    def end(self, version: int) -> None:
        self._changes.flush()
        self._last.version = version

    def payloads(self, held: int | None) -> Iterator[Payload]:
        """Yield deltas if their base version is `held`, else whole tensors."""
        if held is None or held != self._base_version:
            for payload in self._buckets:
                yield replace(payload, parts=[self._read_last(payload)])
            return
        self._changes.seek(0)
        for payload, size in zip(self._buckets, self._sizes, strict=True):
            part = torch.frombuffer(bytearray(self._changes.read(size)), dtype=torch.uint8)
            yield replace(payload, parts=[part], num_bytes=size, base_version=held)

    def close(self) -> None:
        self._last.close()
        self._changes.close()

    def _add_bucket(self, payload: Payload) -> None:
        hashed = xxhash.xxh3_64()
        size = 0
        for name, dtype, shape, part in zip(payload.names, payload.dtypes, payload.shapes, payload.parts, strict=True):
            if not self._last.knows(name, dtype, shape):
                self._base_version = None
            new = part.cpu()
            if self._base_version is not None:
                base = self._buffer.first(new.numel())
                self._last.read(name, base)
                for piece in encode(integers_of(new, dtype), integers_of(base, dtype)):
                    hashed.update(piece)
                    size += self._changes.write(piece)
            self._last.write(name, dtype, shape, new)
        self._sizes.append(size + self._changes.write(hashed.digest()))

    def _read_last(self, payload: Payload) -> torch.Tensor:
        """Read the bytes of a bucket's tensors as staged last."""
        flat = self._buffer.first(payload.num_bytes)
        start = 0
        for name in payload.names:
            end = start + self._last.num_bytes(name)
            self._last.read(name, flat[start:end])
            start = end
        return flat


class CheckpointStage:
    """Whole tensors in a folder of `directory` named after the version, in Hugging Face's layout."""

    def __init__(self, directory: str):
        self._directory = Path(directory)
        self._folder: CheckpointVersion | None = None
        self._payloads: list[Payload] = []

    def begin(self, version: int) -> None:
        self._payloads = []
        with self._convert_errors(version):
            self._folder = CheckpointVersion(self._directory, version)

    def add(self, payload: Payload) -> None:
        """Write one bucket to a separate file."""
        assert self._folder is not None
        with self._convert_errors(self._folder.version):
            self._folder.add(payload)
        self._payloads.append(replace(payload, parts=[], bucket=[]))

    def end(self, version: int) -> None:
        """Publish the complete folder atomically."""
        assert self._folder is not None
        with self._convert_errors(version):
            files = self._folder.publish()
        self._payloads = [
            replace(payload, place={"location": str(file)}) for payload, file in zip(self._payloads, files, strict=True)
        ]

    def payloads(self, held: int | None) -> Iterator[Payload]:
        """Yield the files, independent of the engines' version."""
        return iter(self._payloads)

    def close(self) -> None:
        """Keep the last version's files, for restarting servers."""

    @contextmanager
    def _convert_errors(self, version: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise WeightSyncError(
                f"the weights of version {version} cannot be written to {self._directory} "
                f"(generator.weight_sync_directory): {error}"
            ) from error

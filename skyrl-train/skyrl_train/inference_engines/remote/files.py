"""Weights and adapters as files, for servers without our worker extension, which load the files themselves."""

from pathlib import Path

import torch

from skyrl_train.errors import UnsupportedByEngine, WeightSyncError
from skyrl_train.weight_sync.base import WeightReport, WeightSyncInitInfo, WeightUpdateRequest
from skyrl_train.weight_sync.fingerprint import Verification, fingerprints_of
from skyrl_train.weight_sync.receiver import WeightReceiver


class CheckpointFiles:
    """Checkpoint files of an update. They are also read here, so the fingerprints describe the files, not the server's
    memory.

    Args:
        info: must specify `checkpoint`, `full`.
        url: URL of the server, for errors.
        instead: how to start the server for other transports.
    """

    def __init__(self, info: WeightSyncInitInfo, url: str, instead: str):
        if info.transport != "checkpoint" or info.encoding != "full":
            raise UnsupportedByEngine(
                f"the server at {url} takes weights as checkpoints only (generator.weight_sync_strategy=checkpoint), "
                f"not by {info.transport} ({info.encoding}); start it with {instead}"
            )
        self._receiver = WeightReceiver(info, torch.device("cpu"))
        self._verification: Verification = info.verification
        self._folder: Path | None = None
        self._fingerprints: dict[str, int] = {}

    def add(self, request: WeightUpdateRequest) -> None:
        if request.index == 0:
            self._fingerprints = {}
        bucket = self._receiver.receive(request)
        self._folder = Path(request.location).parent
        self._fingerprints |= fingerprints_of(bucket, request.version, self._verification)

    def finish(self, version: int) -> tuple[Path, WeightReport]:
        """Return the folder to load, and a report of its contents. The server's memory is not read."""
        self._receiver.finish(version)
        if self._folder is None:
            raise WeightSyncError(f"the update to version {version} has no files")
        report = WeightReport(version=version, fingerprints=self._fingerprints, received_only=list(self._fingerprints))
        return self._folder, report


def compute_adapter_fingerprints(path: str, version: int, verification: Verification = "sampled") -> dict[str, int]:
    """Compute fingerprints of the tensors in an adapter's file, by their names there.

    Raises:
        WeightSyncError: no adapter in the folder.
    """
    from safetensors.torch import load_file

    file = Path(path) / "adapter_model.safetensors"
    if not file.is_file() or not (Path(path) / "adapter_config.json").is_file():
        raise WeightSyncError(
            f"there is no adapter in {path}: adapter_config.json and adapter_model.safetensors must be there"
        )
    return fingerprints_of(load_file(file).items(), version, verification)

"""Checkpoint files of a training model: gathered tensors under the names of transformers, for any backend and number of
ranks.

Each rank writes a part of the tensors and hashes its files. `state_<rank>_<n>.safetensors` hold weights and moments;
`random_<rank>.safetensors` the state of a rank's random generators; `state.json` everything that is not a tensor.
"""

import hashlib
import json
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from safetensors.torch import save as to_safetensors

from skyrl_train.errors import CheckpointError
from skyrl_train.utils.io import FileRecord
from skyrl_train.utils.nodes import get_node_name
from skyrl_train.utils.storage import Place, write_durably

FORMAT = 1
_STATE = "state.json"
_MAX_FILE_BYTES = 512 << 20  # two copies of one file are in a rank's memory while it is written


@dataclass(frozen=True)
class WrittenFiles:
    """Report of one rank about its files in a folder shared by all ranks.

    Args:
        node: the machine's name and address.
        files: by name, relative to the folder.
    """

    node: str
    files: dict[str, FileRecord]


def write_state(
    folder: Place, tensors: Iterable[tuple[str, torch.Tensor]], num_steps: int, rank: int, num_ranks: int
) -> WrittenFiles:
    """Write a training model into a folder. A collective.

    Args:
        tensors: `TrainingBackend.training_state()`.
        num_steps: optimizer steps counted by the learning-rate schedule.

    Returns: the files of this rank.

    Raises:
        CheckpointError: a disk error. The rank has then joined all gathers, so that its peers do not hang.
    """
    return RankState(rank, num_ranks, num_steps).write(folder, _select_tensors(tensors, rank, num_ranks))


class RankState:
    """One rank's part of a training model, with the current state of its random generators.

    Args:
        num_steps: optimizer steps counted by the learning-rate schedule.
    """

    def __init__(self, rank: int, num_ranks: int, num_steps: int):
        self._rank = rank
        self._described = {"format": FORMAT, "num_steps": num_steps, "num_ranks": num_ranks}
        self._random_state = _get_random_state()

    def write(self, folder: Place, tensors: Iterable[tuple[str, torch.Tensor]]) -> WrittenFiles:
        """Write the files of this rank. Raises CheckpointError after all tensors were consumed."""
        writer = _Writer(folder, self._rank)
        for name, tensor in tensors:
            writer.add(name, tensor)
        writer.flush()
        writer.write(f"random_{self._rank}.safetensors", to_safetensors(self._random_state))
        if self._rank == 0:
            writer.write(_STATE, json.dumps(self._described).encode())
        if writer.error is not None:
            raise CheckpointError(str(writer.error)) from writer.error
        return WrittenFiles(get_node_name(), writer.files)


class BackgroundWrite:
    """Copy of this rank's part in host memory, written by a thread while training continues. See `write_state` for the
    arguments. Construction is a collective."""

    def __init__(
        self,
        folder: Place,
        tensors: Iterable[tuple[str, torch.Tensor]],
        num_steps: int,
        rank: int,
        num_ranks: int,
    ):
        share = RankState(rank, num_ranks, num_steps)
        copies = dict(_select_tensors(tensors, rank, num_ranks))
        self._written: Future[WrittenFiles] = Future()

        def write() -> None:
            try:  # tensors are removed one by one, so that written ones free their memory
                taken = ((name, copies.pop(name)) for name in list(copies))
                self._written.set_result(share.write(folder, taken))
            except BaseException as error:  # raised when the files are requested
                self._written.set_exception(error)

        # A daemon: an unresponsive store must not keep the process from exiting.
        threading.Thread(target=write, name="checkpoint", daemon=True).start()

    def get_files(self) -> WrittenFiles | None:
        """Return the files of this rank, or None while they are being written. Raises CheckpointError."""
        return self._written.result() if self._written.done() else None


def _select_tensors(
    tensors: Iterable[tuple[str, torch.Tensor]], rank: int, num_ranks: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield copies of the tensors that this rank writes. Each is assigned to the rank with the fewest bytes so far,
    computed identically on all ranks. The iterator, which gathers tensors, is always exhausted."""
    given = [0] * num_ranks
    for name, tensor in tensors:
        writer = given.index(min(given))
        given[writer] += tensor.nbytes
        if writer == rank:
            yield name, tensor.detach().to("cpu", copy=True).contiguous()


class _Writer:
    """Writer of one rank's files. After the first error it writes nothing, and raises the error at the end."""

    def __init__(self, folder: Place, rank: int):
        self.files: dict[str, FileRecord] = {}
        self.error: OSError | None = None
        self._folder = folder
        self._rank = rank
        self._waiting: dict[str, torch.Tensor] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        if self.error is None:
            self._waiting[name] = tensor
            if sum(waiting.nbytes for waiting in self._waiting.values()) >= _MAX_FILE_BYTES:
                self.flush()

    def flush(self) -> None:
        if self._waiting:
            self.write(f"state_{self._rank}_{len(self.files)}.safetensors", to_safetensors(self._waiting))
            self._waiting = {}

    def write(self, name: str, content: bytes) -> None:
        if self.error is not None:
            return
        try:
            write_durably(self._folder / name, content)
        except OSError as error:
            self.error = error
        self.files[name] = FileRecord(len(content), hashlib.sha256(content).hexdigest())


class StateFiles:
    """Reader of files written by `write_state`.

    Raises:
        CheckpointError: the folder has none, or files of another release.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._unread: set[str] = set()
        if (folder / "sharded").is_dir():
            raise CheckpointError(
                f"{folder} was written by an earlier release in an unsupported format: resume with that release, or "
                "export the model with it (trainer.hf_save_interval) and start from the export"
            )
        try:
            described = json.loads((folder / _STATE).read_text())
            self.num_steps, found = int(described["num_steps"]), described["format"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{folder / _STATE} cannot be read: {error}") from error
        if found != FORMAT:
            raise CheckpointError(f"{folder} has format {found}, written by another release; this one reads {FORMAT}")

    @cached_property
    def _open_files(self) -> dict[str, safe_open]:
        """Open file of each tensor: tensors are memory-mapped, so only accessed ones are read."""
        places = {}
        try:
            for path in sorted(self._folder.glob("state_*.safetensors")):
                file = safe_open(str(path), framework="pt")
                places |= dict.fromkeys(file.keys(), file)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"the files of {self._folder} cannot be read: {error}") from error
        self._unread = set(places)
        return places

    def read(self, name: str, shape: torch.Size | None = None) -> torch.Tensor:
        """Return a whole tensor, on the CPU; it must not be modified.

        Raises:
            CheckpointError: the name is missing, or the shape differs.
        """
        if name not in self._open_files:
            raise CheckpointError(f"{self._folder} does not fit this model: {name} is missing")
        tensor = self._open_files[name].get_tensor(name)
        if shape is not None and tensor.shape != shape:
            raise CheckpointError(
                f"{self._folder} does not fit this model: {name} has shape {list(tensor.shape)} in the checkpoint and "
                f"{list(shape)} in the model"
            )
        self._unread.discard(name)
        return tensor

    def __contains__(self, name: str) -> bool:
        return name in self._open_files

    def check_all_read(self) -> None:
        """Raise CheckpointError if the files contain tensors that the model does not train."""
        if self._unread:
            raise CheckpointError(
                f"{self._folder} does not fit this model: it contains {sorted(self._unread)[0]}, which is not trained "
                f"here ({len(self._unread)} such tensors)"
            )

    def restore_random_state(self, rank: int) -> None:
        """Restore the random generators of this rank. A new rank (more ranks than before) derives its state from rank
        0's and its number."""
        own = self._folder / f"random_{rank}.safetensors"
        state = load_file(own if own.is_file() else self._folder / "random_0.safetensors")
        torch.set_rng_state(state["cpu"])
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"])
        if not own.is_file():
            torch.manual_seed(torch.initial_seed() + rank)


def _get_random_state() -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state

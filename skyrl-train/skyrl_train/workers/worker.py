"""Rank of a model: a training backend that holds the model, and an objective that trains it.

A plain object, independent of Ray.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import torch
from safetensors import SafetensorError
from transformers import CONFIG_NAME, PreTrainedTokenizerBase

from skyrl_train.config import SkyRLConfig
from skyrl_train.config.training_backends import TrainingBackendRegistry
from skyrl_train.distributed.process_group import find_free_port
from skyrl_train.errors import CheckpointError
from skyrl_train.training_backends.base import (
    Gradient,
    MakeBackend,
    MetricSums,
    ModelName,
    Objective,
    ParallelInfo,
    RankInfo,
    TrainingBackend,
)
from skyrl_train.training_backends.checkpoint import BackgroundWrite, WrittenFiles
from skyrl_train.training_backends.host_store import Transfer
from skyrl_train.training_batch import MicroBatch, TrainingInputBatch, TrainingOutputBatch
from skyrl_train.utils.cuda_allocator import enable_expandable_segments, release_cached_memory
from skyrl_train.utils.io import FileRecord
from skyrl_train.utils.memory_peaks import MemoryPeaks
from skyrl_train.utils.nodes import get_node_address
from skyrl_train.utils.shared_download import SharedDownload
from skyrl_train.utils.storage import location, publishing
from skyrl_train.workers.objectives.critic import CriticObjective


class Worker:
    """Rank of a model that computes scores and, with an objective, is trained. An optimizer step is `forward_backward`
    of this rank's part of a mini-batch, then `optim_step`.

    Args:
        backend: holds the model.
        objective: training objective; None for a model that is not trained.
    """

    name: ClassVar[ModelName]
    """Name of the model in metrics and settings."""

    def __init__(self, backend: TrainingBackend, objective: Objective | None = None):
        self.backend = backend
        self.objective = objective
        self.batch = TrainingInputBatch()
        self.memory_peaks = MemoryPeaks(torch.device("cpu"))
        self._download: SharedDownload | None = None
        self._background_write: BackgroundWrite | None = None

    @property
    def cfg(self) -> SkyRLConfig:
        return self.backend.cfg

    @property
    def parallel(self) -> ParallelInfo:
        return self.backend.parallel

    # ---- start and end

    def rendezvous_point(self) -> tuple[str, int]:
        """Return an address and free port of this worker's machine for the rendezvous of its group."""
        return get_node_address(), find_free_port()

    def init_model(self, info: RankInfo) -> ParallelInfo:
        """Join the group and load the model. A collective: all ranks must call it."""
        if self.cfg.trainer.use_expandable_segments and info.torch_device.type == "cuda":
            enable_expandable_segments()  # before anything is allocated
        self.backend.join(info)
        self.memory_peaks = MemoryPeaks(self.backend.device)
        with self.memory_peaks.measure("load"):
            self.backend.load_model()
        return replace(self.parallel, shares_prefixes=self.backend.shares_prefixes)

    def take_memory_peaks(self) -> dict[str, int]:
        """Return this rank's peak memory [bytes] since the last call in `load`, `forward` and `train`, relative to the
        memory before its model was loaded."""
        return self.memory_peaks.reset()

    def teardown(self) -> None:
        """Release resources that outlive the worker's last reference."""

    # ---- scores, gradients, optimizer steps

    def forward(self, batch: TrainingInputBatch, micro_batches: Sequence[MicroBatch]) -> TrainingOutputBatch:
        """Compute log-probs (policy, reference) or values (critic) of the response tokens, without gradients.

        Args:
            batch: `sequences`, `attention_mask` [b, T]. R is metadata `response_length`.
            micro_batches: rows of the batch, as divided by the schedule.

        Returns:
            `output` [b, R]; rows of dummy micro-batches stay 0.
        """
        with self.memory_peaks.measure("forward"):
            return TrainingOutputBatch(output=self.backend.forward(batch, micro_batches))

    def load_batch(self, batch: TrainingInputBatch) -> None:
        """Keep this data-parallel rank's rows of the training batch, to which `forward_backward` refers."""
        self.batch = batch

    def forward_backward(self, micro_batches: Sequence[MicroBatch]) -> MetricSums:
        """Accumulate the gradient of this rank's part of one mini-batch, given as rows of the loaded batch."""
        return self.add_gradient(micro_batches).sums

    def add_gradient(self, micro_batches: Sequence[MicroBatch]) -> Gradient:
        """Accumulate the gradient of this rank's part of one mini-batch. Returns metrics, scores and router
        statistics."""
        assert self.objective is not None, f"the {self.name} is not trained"
        with self.memory_peaks.measure("train"):
            return self.backend.forward_backward(self.batch, micro_batches, self.objective)

    def optim_step(self) -> dict[str, float]:
        """Take one optimizer step with the accumulated gradient. A non-finite gradient is dropped and counted.

        Returns:
            `grad_norm` before clipping, `<name>_lr` of this step, `skipped_updates` (1 if the gradient was not finite).
        """
        with self.memory_peaks.measure("train"):
            step = self.backend.optimizer_step()
        return {
            "grad_norm": step.grad_norm,
            f"{self.name}_lr": step.learning_rate,
            "skipped_updates": float(step.is_skipped),
        }

    # ---- device memory

    def offload_to_cpu(self) -> Transfer | None:
        """Release the device's memory until `backload_to_gpu`. Returns: what was copied; None if nothing moves here."""
        return self.backend.offload()

    def offload_optimizer(self) -> Transfer | None:
        """Release only the optimizer's memory until `backload_to_gpu`."""
        return self.backend.offload_optimizer()

    def release_cached_memory(self) -> None:
        """Release only memory that nothing uses, such as former activations."""
        release_cached_memory(self.backend.device)

    def backload_to_gpu(self) -> Transfer | None:
        """Move the model back to the device."""
        return self.backend.onload()

    # ---- files

    def save_checkpoint(self, folder: str) -> WrittenFiles:
        """Write the complete training state of this model into `folder` and return the files. A collective."""
        return self.backend.save(location(folder))

    def start_checkpoint(self, folder: str) -> None:
        """Copy the checkpoint state to host memory; a thread writes it while training continues. A collective."""
        self._background_write = self.backend.start_saving(location(folder))

    def checkpoint_files(self) -> WrittenFiles | None:
        """Return the files of the last `start_checkpoint`; None while they are being written. Raises
        CheckpointError."""
        assert self._background_write is not None, "a checkpoint is started before its files are asked for"
        return self._background_write.get_files()

    def fetch_checkpoint(self, folder: str, records: dict[str, FileRecord]) -> None:
        """Download and verify a checkpoint of `save_checkpoint` from an object store, for the next `load_checkpoint` of
        that folder. Ranks of one machine share the copy.

        Args:
            records: size and hash of each file.
        """
        self._download = SharedDownload(location(folder), records)

    def load_checkpoint(self, folder: str) -> None:
        """Restore a checkpoint of `save_checkpoint` on any number of ranks. The optimizer settings of this run are
        kept. A collective."""
        if self._download is None:
            self.backend.load(Path(folder))
            return
        try:
            self.backend.load(self._download.folder)
        finally:
            self._download.release()
            self._download = None

    def load_weights(self, folder: str) -> None:
        """Load the weights of a model written by a worker's `save_hf_model`. A collective."""
        self.backend.load_parameters(folder)

    def save_hf_model(self, folder: str, tokenizer: PreTrainedTokenizerBase) -> None:
        """Export the model for `transformers` (float32 safetensors, config, tokenizer) with merged adapters; adapters
        are also written in peft's format into `adapter`. The folder appears when it is complete. A collective."""
        settings, transformer = self.backend.trained_settings, self.backend.transformer
        state = self.full_state()
        is_writer = self.parallel.rank == 0
        try:
            with publishing(location(folder), seal=CONFIG_NAME) if is_writer else nullcontext() as draft:
                target = Path() if draft is None else draft.local  # only rank 0 writes
                if settings.model.lora.rank:
                    from skyrl_train.models.adapter_files import (
                        save_adapter,  # heavy: the driver imports this module as well
                    )

                    save_adapter(transformer, target / "adapter", settings.model.path or "")
                if is_writer:
                    transformer.save_pretrained(target, state_dict=state)
                    tokenizer.save_pretrained(target)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"the model could not be exported to {folder}: {error}. Nothing of it is left; the same command "
                "resumes from the newest checkpoint"
            ) from error

    def full_state(self) -> dict[str, torch.Tensor]:
        """Gather all parameters on the CPU of rank 0 (empty on other ranks). A collective."""
        state = {}
        for name, tensor in self.backend.gather_parameters():
            if self.parallel.rank == 0:
                state[name] = tensor.to("cpu", copy=True)
        return state


class CriticWorker(Worker):
    """Rank of the critic, which is trained to predict returns.

    Args:
        num_training_steps: optimizer steps of the whole run, for the learning-rate schedule.
        make_backend: builder of the backend of `trainer.strategy`; None: looked up here.
    """

    name = "critic"

    def __init__(self, cfg: SkyRLConfig, num_training_steps: int, make_backend: MakeBackend | None = None):
        backend = create_backend(cfg, self.name, num_training_steps, make_backend)
        super().__init__(backend, CriticObjective(cfg.trainer.algorithm))


class RefWorker(Worker):
    """Rank of the reference model for the KL divergence."""

    name = "ref"

    def __init__(self, cfg: SkyRLConfig, make_backend: MakeBackend | None = None):
        super().__init__(create_backend(cfg, self.name, None, make_backend))

    def forward_top(
        self, batch: TrainingInputBatch, micro_batches: Sequence[MicroBatch], num_top: int
    ) -> TrainingOutputBatch:
        """Compute the most likely tokens at each response position: `teacher_ids` and `teacher_log_probs` [b, R, K]."""
        ids, log_probs = self.backend.forward_top(batch, micro_batches, num_top)
        return TrainingOutputBatch(teacher_ids=ids, teacher_log_probs=log_probs)


def create_backend(
    cfg: SkyRLConfig, name: ModelName, num_training_steps: int | None, make_backend: MakeBackend | None
) -> TrainingBackend:
    """Create this rank's backend of a model. The driver passes the builder, pickled by value if custom, since
    registrations in the driver do not exist in worker processes."""
    return (make_backend or TrainingBackendRegistry.get(cfg.trainer.strategy))(cfg, name, num_training_steps)

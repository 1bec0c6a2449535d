"""Training of many adapters of one frozen model in this process. Independent of HTTP and request order.

Co-batched models in a `multi_adapter_pass` do not change a bit of a model's results (float32 on a CPU with one thread);
see `layout` and `adapters`.
"""

import logging
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import nn

from tx.errors import ModelError, RequestError
from tx.tinker.backends.base import BackendInfo, BackendLost, Failure, TrainingBackend
from tx.tinker.backends.torch import files
from tx.tinker.backends.torch.adam import adamw, clip_gradient
from tx.tinker.backends.torch.adapters import Adapter
from tx.tinker.backends.torch.frozen_model import FrozenModel
from tx.tinker.backends.torch.layout import micro_batches
from tx.tinker.backends.torch.multi_adapter_pass import run_together, to_failure
from tx.tinker.backends.torch.rank_group import ALONE, RankGroup
from tx.tinker.backends.torch.settings import TrainingSettings
from tx.tinker.types import AdamParams, Datum, LoraSpec, PassOutput, TrainingPass
from tx.tinker.wire.checks import check_training

logger = logging.getLogger(__name__)


class TorchTraining(TrainingBackend):
    """The `torch` backend's training.

    Args:
        base_model_folder: of a transformers causal LM.
        rank_group: ranks that train together; each calls every method, in the same order.
        settings: fields of `TrainingSettings`.

    Raises:
        ConfigError: an unknown or impossible setting, a model that cannot be trained here.
    """

    def __init__(self, base_model_folder: str | Path, *, rank_group: RankGroup = ALONE, **settings: Any):
        self._settings = TrainingSettings.from_dict(settings)
        self._folder, self._rank_group = Path(base_model_folder), rank_group
        self._base = FrozenModel(self._folder, self._settings, rank_group)
        self.adapters: dict[str, Adapter] = {}

    def info(self) -> BackendInfo:
        return BackendInfo(
            name="torch",
            vocab_size=self._base.vocab_size,
            max_context=self._base.max_context,
            max_lora_rank=self._settings.max_lora_rank,
            max_resident_models=self._settings.max_resident_models,
            pass_tokens=self._tokens_of_pass * self._rank_group.size,
        )

    @property
    def base_model(self) -> nn.Module:
        """The frozen transformers model, for sharing its weights: parameters have transformers' names. Do not call its
        layers.
        """
        return self._base.model

    # ---- models

    def create(self, model_id: str, lora: LoraSpec) -> None:
        adapter = self._create_empty(lora)
        adapter.initialize()
        self.adapters[model_id] = adapter

    def forget(self, model_id: str) -> None:
        self.adapters.pop(model_id, None)

    def save(self, model_id: str, folder: Path, *, state: bool) -> None:
        adapter = self._get_adapter(model_id)
        # All of them before the first is written: a rank that fails to write must not leave the others in a collective.
        vectors = {
            kind: self._rank_group.gather_vector_on_first(part, adapter.num_weights)
            for kind, part in adapter.vectors(state=state).items()
        }
        if self._rank_group.rank == 0:
            files.write_adapter(
                adapter, vectors.pop("weights"), folder, str(self._folder), self._get_target_modules(adapter)
            )
            if state:
                files.write_state(adapter, vectors, folder)

    def load(self, model_id: str, folder: Path, *, optimizer: bool) -> None:
        # Nothing of the model outlives a load, so neither does its layout.
        adapter = self._resolve_layout(folder, self._get_adapter(model_id), by_weights=True)
        files.read_into(adapter, folder, optimizer=optimizer)
        self.adapters[model_id] = adapter

    def restore(self, model_id: str, lora: LoraSpec, folder: Path) -> None:
        # `lora` is that of the model's creation; it may have loaded a checkpoint of the other layout since.
        adapter = self._resolve_layout(folder, self._create_empty(lora), by_weights=False)
        files.read_into(adapter, folder, optimizer=True, gradient=True)
        # Known only once it is read: a damaged folder leaves no half-restored model.
        self.adapters[model_id] = adapter

    def close(self) -> None:
        self.adapters.clear()

    # ---- passes

    def micro_batches(self, data: Sequence[Datum]) -> list[list[Datum]]:
        return micro_batches(data, self._tokens_of_pass, self._rank_group.size)

    def run(self, passes: Sequence[TrainingPass]) -> list[PassOutput | Failure]:
        results: list[PassOutput | Failure | None] = [self._find_error(each) for each in passes]
        for together in self._group_passes(passes, [i for i, result in enumerate(results) if result is None]):
            for i, result in zip(together, self._run_safely([passes[i] for i in together]), strict=True):
                results[i] = result
        return [result for result in results if result is not None]

    def copy_gradient(self, model_id: str) -> torch.Tensor | None:
        gradient = self._get_adapter(model_id).gradient
        # A copy, because later passes add to the vector in place.
        return None if gradient is None else gradient.clone()

    def put_gradient(self, model_id: str, gradient: torch.Tensor | None) -> None:
        self._get_adapter(model_id).gradient = gradient

    def optim_step(self, model_id: str, adam: AdamParams) -> dict[str, float]:
        adapter = self._get_adapter(model_id)
        # No step at all: Adam with a gradient of 0 would still move the weights by their momentum.
        if adapter.gradient is None:
            return {"grad_norm:mean": 0.0, "learning_rate:mean": adam.learning_rate, "step:max": float(adapter.step)}
        gradient, norm = clip_gradient(adapter.gradient, adam.grad_clip_norm, self._rank_group.compute_norm)
        if not math.isfinite(norm):
            adapter.gradient = None  # whatever is added to it, no later step could use it
            raise ModelError(
                "the accumulated gradient is not finite: no step was taken, the weights are unchanged, the gradient "
                "was cleared. Check for NaN or very large numbers in the data, or lower the learning rate"
            )
        step, norm_of = adapter.step + 1, self._rank_group.compute_norm
        adapter.take(adamw(adapter.adam_state(), gradient, step, adam, adapter.scaling, norm_of))
        return {"grad_norm:mean": norm, "learning_rate:mean": adam.learning_rate, "step:max": float(adapter.step)}

    # ---- how

    @property
    def _tokens_of_pass(self) -> int:
        assert self._settings.tokens_per_micro_batch is not None
        return self._settings.tokens_per_micro_batch

    def _get_adapter(self, model_id: str) -> Adapter:
        if model_id not in self.adapters:
            raise ModelError(f"model {model_id} is not loaded", "server")
        return self.adapters[model_id]

    def _create_empty(self, lora: LoraSpec) -> Adapter:
        if not 1 <= lora.rank <= self._settings.max_lora_rank:
            raise ModelError(f"lora_config.rank must be from 1 to {self._settings.max_lora_rank}; got {lora.rank}")
        kinds = {"attn": lora.train_attn, "mlp": lora.train_mlp, "unembed": lora.train_unembed}
        sites = self._base.find_sites(kinds)
        if lora.share_experts:
            sites = [site.to_shared_experts() for site in sites]
        if not sites:
            wanted = ", ".join(f"train_{kind}" for kind, is_wanted in kinds.items() if is_wanted)
            raise ModelError(f"lora_config: nothing to train; {wanted or 'all parts are disabled'}")
        return Adapter(lora, sites, self._base.device, self._base.dtype, self._rank_group)

    def _resolve_layout(self, folder: Path, adapter: Adapter, *, by_weights: bool) -> Adapter:
        """Return the adapter, or a new empty one if experts share matrices in only one of adapter and checkpoint. Args:
        by_weights: of `files.shares_experts`.
        """
        shares_experts = files.shares_experts(adapter.sites, folder, by_weights=by_weights)
        if shares_experts in (None, adapter.lora.share_experts):
            return adapter
        return self._create_empty(msgspec.structs.replace(adapter.lora, share_experts=shares_experts))

    def _get_target_modules(self, adapter: Adapter) -> list[str]:
        """Return name suffixes where they identify the layers (as engines expect), else full names."""
        adapted = {site.name for site in adapter.sites if site.num_experts is None}
        leaves = {name.rpartition(".")[2] for name in adapted}
        meant = {name for name, _ in self._base.model.named_modules() if name.rpartition(".")[2] in leaves}
        of_experts = {site.name.rpartition(".")[2] for site in adapter.sites if site.num_experts is not None}
        return sorted((leaves if meant == adapted else adapted) | of_experts)

    def _find_error(self, each: TrainingPass) -> Failure | None:
        """Check for errors that would harm co-batched requests: a GPU does not survive a token outside the
        vocabulary."""
        try:
            self._get_adapter(each.model_id)
            check_training(each, self._base, finite=False)
        except ModelError as error:
            return Failure(error)
        except RequestError as error:
            return Failure(ModelError(str(error)))
        return None

    def _group_passes(self, passes: Sequence[TrainingPass], indices: list[int]) -> Iterator[list[int]]:
        """Group passes to run jointly: forward-only ones apart from those with gradient, within the token limit of a
        pass on every rank."""
        for forward_only in (True, False):
            together: list[int] = []
            # One limit for each rank, since the ranks' shares of the data differ. A pass above the limit runs alone.
            room = np.zeros(self._rank_group.size)
            for i in indices:
                if passes[i].forward_only != forward_only:
                    continue
                tokens = self._count_tokens_per_rank(passes[i].data)
                if together and (bool((tokens > room).any()) or self._base.one_model_a_pass):
                    yield together
                    together = []
                room = (room if together else self._tokens_of_pass) - tokens
                together.append(i)
            if together:
                yield together

    def _count_tokens_per_rank(self, data: Sequence[Datum]) -> np.ndarray:
        lengths = [len(datum.tokens) for datum in data]
        return np.bincount(self._rank_group.assign_owners(data), lengths, self._rank_group.size)

    def _run_safely(self, passes: Sequence[TrainingPass]) -> Sequence[PassOutput | Failure]:
        """Run passes jointly; if that fails, one by one, so that only the faulty pass fails."""
        adapters = [self._get_adapter(each.model_id) for each in passes]
        try:
            return run_together(self._base, self._rank_group, passes, adapters)
        except Exception as error:  # any error is reported to the request that caused it
            if self._rank_group.size > 1:  # the others are in the middle of the pass, and wait for this one
                raise BackendLost(f"training process {self._rank_group.rank} failed in a pass: {error!r}") from error
            if len(passes) == 1:
                return [to_failure(passes[0], error)]
            logger.warning("a pass of %d models failed, retrying each separately: %s", len(passes), error)
        # Outside the handler: inside it, the error's traceback would still hold the tensors of the failed pass.
        if self._base.device.type == "cuda":
            torch.cuda.empty_cache()
        return [result for each in passes for result in self._run_safely([each])]

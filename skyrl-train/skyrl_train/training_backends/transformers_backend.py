"""Base of backends that hold a transformers model and compute whole micro-batches with it."""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from transformers import PreTrainedModel

from skyrl_train.config import RefConfig
from skyrl_train.models.build import build_model, gather_parameters, get_transformer
from skyrl_train.models.lora import has_weight_based_init
from skyrl_train.models.packing import Layout
from skyrl_train.models.scoring import ScoringModel
from skyrl_train.models.scoring_check import check_scoring
from skyrl_train.models.value_model import ValueModel
from skyrl_train.models.weight_files import WeightFiles, fill_buffers, load_values_in_forward, open_on_all_ranks
from skyrl_train.training_backends.base import Scores, TrainingBackend
from skyrl_train.training_batch import TrainingInputBatch
from skyrl_train.utils.device_copies import copy_to_device


class TransformersBackend(TrainingBackend):
    """Backend around a `ScoringModel` or `ValueModel`."""

    model: ScoringModel | ValueModel
    """Root module, whose parameters may be sharded over the ranks."""

    def build(self, path: str, *, with_weights: bool) -> ScoringModel | ValueModel:
        """Build the unsharded model on the CPU; without weights its parameters have only shapes (meta device)."""
        return build_model(
            self.cfg,
            self.name,
            path,
            device=self.device,
            is_trained=self.is_trained,
            with_weights=with_weights,
            sequence_parallel=self.sequence_parallel,
        )

    def open_model(self, path: str, *, check: bool) -> tuple[ScoringModel | ValueModel, WeightFiles | None]:
        """Build the model on the CPU, with no more memory than this rank's shard needs. A collective.

        Args:
            check: compare its scores with transformers, on rank 0.

        Returns:
            The model on the meta device except for buffers and parameters without files (adapters, a critic's head),
            and the
                files from which each rank reads its shard. If they cannot be read in parts: the model with its weights
                on rank
                0, with only shapes on others, and None.
        """
        random_state = torch.get_rng_state()
        model = self.build(path, with_weights=False)
        refusal = None
        if method := self._init_method_from_weights:
            refusal = f"trainer.{self.name}.model.lora.init_method={method} computes adapters from the weights"
        files = open_on_all_ranks(get_transformer(model), path, refusal)
        is_first = self.parallel.rank == 0
        if files is not None:
            fill_buffers(get_transformer(model), files)
        elif is_first:
            torch.set_rng_state(random_state)
            model = self.build(path, with_weights=True)
        if check and is_first:
            # No more in memory than this rank's shard if all ranks shard the model.
            part = sum(parameter.numel() for parameter in model.parameters()) // self.parallel.world_size
            with nullcontext() if files is None else load_values_in_forward(get_transformer(model), files, part):
                check_scoring(model, path)
        return model, files

    @property
    def _init_method_from_weights(self) -> str | None:
        """Return `lora.init_method` if adapters are initialized from the weights, which then differ from the files."""
        lora = None if isinstance(self.settings, RefConfig) else self.settings.model.lora
        return lora.init_method if lora is not None and self.is_trained and has_weight_based_init(lora) else None

    @property
    def shares_prefixes(self) -> bool:
        return self.model.packing and self.model.share_prefixes

    @property
    def transformer(self) -> PreTrainedModel:
        return get_transformer(self.model)

    def compute(self, *args: object, **kwargs: object) -> Any:
        """Call the root module."""
        return self.model(*args, **kwargs)

    def score(self, micro_batch: TrainingInputBatch, *, with_entropy: bool = False) -> Scores:
        inputs, layout = self._build_inputs(micro_batch)
        if isinstance(self.model, ValueModel):
            return Scores(self.compute(*inputs, layout=layout))
        routes = micro_batch.get("expert_routes")
        if routes is not None:
            assert self.model.routing_replay is not None, f"the {self.name} was loaded without routing replay"
            self.model.routing_replay.shape.check(routes)
            routes = copy_to_device(routes, self.device)
        words = micro_batch.get("teacher_ids")
        candidates = None if words is None else copy_to_device(words, self.device)
        counts, ids = micro_batch.get("kept_counts"), micro_batch.get("kept_ids")
        scores = self.compute(
            *inputs,
            self._temperature,
            layout=layout,
            with_entropy=with_entropy,
            routes=routes,
            candidates=candidates,
            # A tuple, in which FSDP finds tensors; its mixed precision does not cast integers.
            kept=None if counts is None or ids is None else (counts.to(self.device), ids.to(self.device)),
        )
        return Scores(scores.log_probs, scores.entropy, scores.router, candidates=scores.candidates)

    def score_top(self, micro_batch: TrainingInputBatch, num_top: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, layout = self._build_inputs(micro_batch)
        return self.compute(*inputs, self._temperature, layout=layout, num_top=num_top).top

    def score_recording_routes(self, micro_batch: TrainingInputBatch) -> Scores:
        inputs, layout = self._build_inputs(micro_batch)
        scores = self.compute(*inputs, self._temperature, layout=layout, record_routes=True)
        return Scores(scores.log_probs, routes=scores.routes)

    def _build_inputs(self, micro_batch: TrainingInputBatch) -> tuple[tuple[torch.Tensor, torch.Tensor, int], Layout]:
        """Return the arguments of the root module, on the device."""
        sequences, mask = micro_batch.tensor("sequences"), micro_batch.tensor("attention_mask")
        num_response: int = micro_batch.metadata["response_length"]
        # Built where the batch is, in host memory: its shapes depend on values, which a GPU would have to send back.
        layout = self.model.build_layout(sequences, mask, num_response).to(self.device)
        return (copy_to_device(sequences, self.device), copy_to_device(mask, self.device), num_response), layout

    @property
    def _temperature(self) -> float:
        """Sampling temperature of the policy, for all models."""
        return self.cfg.generator.sampling_params.temperature

    def prompt_log_probs(self, tokens: torch.Tensor) -> torch.Tensor:
        assert isinstance(self.model, ScoringModel), "a critic has no log-probs"
        tokens = tokens.to(self.device)
        scores = self.compute(tokens, torch.ones_like(tokens), tokens.shape[1] - 1, 1.0, with_entropy=False)
        return scores.log_probs.float()

    def gather_parameters(self, dtype: torch.dtype = torch.float32) -> Iterator[tuple[str, torch.Tensor]]:
        return gather_parameters(self.model, dtype)

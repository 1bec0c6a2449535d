"""Training of many adapters of one frozen model, in this process. Knows no HTTP, no order of requests.

A pass is one forward and backward of the base model over the data of several models, laid end to end; from the last
hidden states on each model goes alone: its output layer, its loss, its gradient. With whom a model shares a pass
changes no bit of what it gets (float32 on a CPU with one thread); `layout` and `adapters` say why.
"""

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from tx.errors import ModelError
from tx.tinker.backends.base import BackendInfo, Failure, TrainingBackend
from tx.tinker.backends.torch import files
from tx.tinker.backends.torch.adam import adamw_, clip_
from tx.tinker.backends.torch.adapters import Adapter, set_parts
from tx.tinker.backends.torch.frozen_model import FrozenModel
from tx.tinker.backends.torch.head import Targets
from tx.tinker.backends.torch.layout import Segment, lay_out
from tx.tinker.backends.torch.losses import LOSSES, loss_inputs
from tx.tinker.backends.torch.settings import TrainingSettings
from tx.tinker.types import AdamParams, Datum, LoraSpec, PassOutput, TrainingPass

logger = logging.getLogger(__name__)


class TorchTraining(TrainingBackend):
    """The `torch` backend's training.

    Args:
        base_model_folder: of a transformers causal LM.
        settings: fields of `TrainingSettings`.

    Raises:
        ConfigError: an unknown or impossible setting, a model that cannot be trained here.
    """

    def __init__(self, base_model_folder: str | Path, **settings: Any):
        self._settings = TrainingSettings.from_dict(settings)
        self._folder = Path(base_model_folder)
        self._base = FrozenModel(self._folder, self._settings)
        self._adapters: dict[str, Adapter] = {}

    def info(self) -> BackendInfo:
        return BackendInfo(
            name="torch",
            vocab_size=self._base.vocab_size,
            max_context=self._base.max_context,
            max_lora_rank=self._settings.max_lora_rank,
            max_resident_models=self._settings.max_resident_models,
            pass_tokens=self._tokens_of_pass,
        )

    @property
    def base_model(self) -> nn.Module:
        """The frozen transformers model, for who wants to share its weights: parameters have transformers' names. Its
        layers are this object's to call."""
        return self._base.model

    # ---- models

    def create(self, model_id: str, lora: LoraSpec) -> None:
        adapter = self._empty(lora)
        adapter.begin()
        self._adapters[model_id] = adapter

    def forget(self, model_id: str) -> None:
        self._adapters.pop(model_id, None)

    def save(self, model_id: str, folder: Path, *, state: bool) -> None:
        adapter = self._adapter(model_id)
        files.write_adapter(adapter, folder, str(self._folder), self._target_modules(adapter))
        if state:
            files.write_state(adapter, folder)

    def load(self, model_id: str, folder: Path, *, optimizer: bool) -> None:
        files.read_into(self._adapter(model_id), folder, optimizer=optimizer)

    def restore(self, model_id: str, lora: LoraSpec, folder: Path) -> None:
        adapter = self._empty(lora)
        files.read_into(adapter, folder, optimizer=True, gradient=True)
        self._adapters[model_id] = adapter

    def close(self) -> None:
        self._adapters.clear()

    # ---- passes

    def micro_batches(self, data: Sequence[Datum]) -> list[list[Datum]]:
        batches: list[list[Datum]] = []
        room = 0
        for datum in data:
            if not batches or len(datum.tokens) > room:
                batches.append([])
                room = self._tokens_of_pass
            batches[-1].append(datum)
            room -= len(datum.tokens)
        return batches

    def run(self, passes: Sequence[TrainingPass]) -> list[PassOutput | Failure]:
        results: list[PassOutput | Failure | None] = [self._refusal(each) for each in passes]
        for together in self._shared(passes, [i for i, result in enumerate(results) if result is None]):
            for i, result in zip(together, self._run_safely([passes[i] for i in together]), strict=True):
                results[i] = result
        return [result for result in results if result is not None]

    def copy_gradient(self, model_id: str) -> torch.Tensor | None:
        gradient = self._adapter(model_id).gradient
        return None if gradient is None else gradient.clone()

    def put_gradient(self, model_id: str, gradient: torch.Tensor | None) -> None:
        self._adapter(model_id).gradient = gradient

    def optim_step(self, model_id: str, adam: AdamParams) -> dict[str, float]:
        adapter = self._adapter(model_id)
        gradient, adapter.gradient = adapter.gradient, None
        if gradient is None:
            return {"grad_norm:mean": 0.0, "learning_rate:mean": adam.learning_rate, "step:max": float(adapter.step)}
        norm = clip_(gradient, adam.grad_clip_norm)
        if not np.isfinite(norm):
            raise ModelError(
                "the accumulated gradient is not finite: no step was taken, the weights are as before, the gradient is "
                "cleared. Look for NaN or very large numbers in the data, or lower the learning rate"
            )
        if adapter.mean is None or adapter.square is None:
            adapter.mean, adapter.square = torch.zeros_like(adapter.weights), torch.zeros_like(adapter.weights)
        adapter.step += 1
        adamw_(adapter.weights, gradient, adapter.mean, adapter.square, adapter.step, adam)
        adapter.changed()
        return {"grad_norm:mean": norm, "learning_rate:mean": adam.learning_rate, "step:max": float(adapter.step)}

    # ---- how

    @property
    def _tokens_of_pass(self) -> int:
        assert self._settings.tokens_per_micro_batch is not None
        return self._settings.tokens_per_micro_batch

    def _adapter(self, model_id: str) -> Adapter:
        if model_id not in self._adapters:
            raise ModelError(f"model {model_id} is not loaded", "server")
        return self._adapters[model_id]

    def _empty(self, lora: LoraSpec) -> Adapter:
        if not 1 <= lora.rank <= self._settings.max_lora_rank:
            raise ModelError(f"lora_config.rank must be from 1 to {self._settings.max_lora_rank}; got {lora.rank}")
        kinds = {"attn": lora.train_attn, "mlp": lora.train_mlp, "unembed": lora.train_unembed}
        sites = self._base.sites_of(kinds)
        if not sites:
            wanted = ", ".join(f"train_{kind}" for kind, is_wanted in kinds.items() if is_wanted)
            raise ModelError(f"lora_config: nothing to train; {wanted or 'none of its parts is on'}")
        return Adapter(lora, sites, self._base.device, self._base.dtype)

    def _target_modules(self, adapter: Adapter) -> list[str]:
        """Last parts of names where they say which layers are meant (engines know these), else whole names."""
        adapted = {site.name for site in adapter.sites}
        leaves = {name.rpartition(".")[2] for name in adapted}
        meant = {name for name, _ in self._base.model.named_modules() if name.rpartition(".")[2] in leaves}
        return sorted(leaves if meant == adapted else adapted)

    def _refusal(self, each: TrainingPass) -> Failure | None:
        """What would hurt others in a pass: a GPU does not survive a token outside the vocabulary."""
        try:
            self._adapter(each.model_id)
            _check_data(each.data, self._base.vocab_size, self._base.max_context)
        except ModelError as error:
            return Failure(error)
        return None

    def _shared(self, passes: Sequence[TrainingPass], indices: list[int]) -> Iterator[list[int]]:
        """Which passes go together: forward ones apart from those with gradient, of no more tokens than a pass has."""
        for forward_only in (True, False):
            together: list[int] = []
            room = 0
            for i in indices:
                if passes[i].forward_only != forward_only:
                    continue
                num_tokens = sum(len(datum.tokens) for datum in passes[i].data)
                if together and (num_tokens > room or self._base.one_model_a_pass):
                    yield together
                    together = []
                room = (room if together else self._tokens_of_pass) - num_tokens
                together.append(i)
            if together:
                yield together

    def _run_safely(self, passes: Sequence[TrainingPass]) -> Sequence[PassOutput | Failure]:
        """Together, and one by one if that fails: then only who is to blame does."""
        try:
            return self._run_together(passes)
        except Exception as error:  # whatever it is, it is told to the one it belongs to
            if len(passes) == 1:
                return [_failure(passes[0], error)]
            logger.warning("a pass of %d models failed, each is tried alone: %s", len(passes), error)
        if self._base.device.type == "cuda":
            torch.cuda.empty_cache()
        return [result for each in passes for result in self._run_safely([each])]

    def _run_together(self, passes: Sequence[TrainingPass]) -> list[PassOutput | Failure]:
        """Gradients are added to the models' own at the very end, when nothing can fail any more."""
        base, with_gradient = self._base, not passes[0].forward_only
        adapters = [self._adapter(each.model_id) for each in passes]
        layout = lay_out([each.data for each in passes], base.device)
        gradients = [
            torch.zeros_like(adapter.weights, dtype=base.dtype) if with_gradient else None for adapter in adapters
        ]
        parts = [
            adapter.parts(segment.start, segment.end, gradient)
            for adapter, segment, gradient in zip(adapters, layout.segments, gradients, strict=True)
        ]
        root = torch.zeros((), device=base.device, requires_grad=True) if with_gradient else None
        set_parts(base.layers, parts, layout.input_ids.shape[1], root)
        try:
            with torch.set_grad_enabled(with_gradient):
                hidden = base.hidden_states(layout)
            of_hidden = torch.zeros_like(hidden) if with_gradient else None
            results = [
                self._score(each, segment, part.get(base.head_name), hidden, of_hidden)
                for each, segment, part in zip(passes, layout.segments, parts, strict=True)
            ]
            if of_hidden is not None and hidden.requires_grad:
                hidden.backward(of_hidden)
        finally:
            set_parts(base.layers, (), 0, None)
        for adapter, gradient, result in zip(adapters, gradients, results, strict=True):
            if gradient is not None and isinstance(result, PassOutput):
                if adapter.gradient is None:
                    adapter.gradient = torch.zeros_like(adapter.weights)
                adapter.gradient.add_(gradient)
        return results

    def _score(
        self, each: TrainingPass, segment: Segment, part: Any, hidden: torch.Tensor, of_hidden: torch.Tensor | None
    ) -> PassOutput | Failure:
        """A model's log-probs and loss, and the gradient of its rows of the hidden states."""
        try:
            inputs = loss_inputs(each.loss_fn, each.data, each.loss_config, self._base.device)
            rows = slice(segment.start, segment.end)
            scored = self._base.head.score(hidden.detach()[rows], Targets.of(each.data), part)
            log_probs = scored.log_probs.requires_grad_(of_hidden is not None)
            with torch.set_grad_enabled(of_hidden is not None):
                losses, metrics = LOSSES[each.loss_fn](log_probs, inputs)
            if of_hidden is not None:
                (gradient,) = torch.autograd.grad(losses.sum(), log_probs)
                of_hidden[rows] = scored.backward(gradient)
        except Exception as error:  # this model's alone: the others go on
            return _failure(each, error)
        total = float(losses.detach().sum(dtype=torch.float64))
        flat = log_probs.detach().cpu().numpy()
        cuts = np.cumsum([datum.inputs["target_tokens"].size for datum in each.data])[:-1]
        return PassOutput(
            [
                piece.reshape(datum.inputs["target_tokens"].shape)
                for piece, datum in zip(np.split(flat, cuts), each.data, strict=True)
            ],
            {"loss:sum": total, "targets:sum": float(len(flat)), **metrics},
        )


def _failure(each: TrainingPass, error: Exception) -> Failure:
    """Without the traceback, which would keep the tensors of the pass alive; it is in the log if the fault is ours."""
    if not isinstance(error, ModelError):
        logger.error("a pass of model %s failed", each.model_id, exc_info=error)
    return Failure(error.with_traceback(None))


def _check_data(data: Sequence[Datum], vocab_size: int, max_context: int) -> None:
    """Shapes and ranges.

    Raises:
        ModelError: names the field and the rule.
    """
    if not data:
        raise ModelError("data must hold at least one datum")
    for i, datum in enumerate(data):
        targets = datum.inputs.get("target_tokens")
        if targets is None:
            raise ModelError(f"data[{i}].loss_fn_inputs['target_tokens'] is missing")
        num_tokens = len(datum.tokens)
        if not 1 <= num_tokens <= max_context:
            raise ModelError(f"data[{i}].model_input must have from 1 to {max_context} tokens; got {num_tokens}")
        if targets.ndim not in (1, 2) or len(targets) != num_tokens or not targets.size:
            raise ModelError(
                f"data[{i}].loss_fn_inputs['target_tokens'] must have the shape [{num_tokens}] or [{num_tokens}, K]; "
                f"got {list(targets.shape)}"
            )
        for name, ids in (("model_input", datum.tokens), ("loss_fn_inputs['target_tokens']", targets)):
            least, most = int(ids.min()), int(ids.max())
            if least < 0 or most >= vocab_size:
                wrong = least if least < 0 else most
                raise ModelError(f"data[{i}].{name}: tokens are from 0 to {vocab_size - 1}; got {wrong}")

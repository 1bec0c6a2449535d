"""The trainer's side: the model that a policy worker would compute with, asked for the tokens that an engine wrote.

Shapes: B rows, T tokens of prompt and response, R of the response, V words.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from skyrl_inspect.mismatch.answers import Answers
from skyrl_train.config import SkyRLConfig
from skyrl_train.expert_routes import ExpertRoutes, pad_routes
from skyrl_train.models.build import build_model
from skyrl_train.models.scoring import ScoringModel, build_layout
from skyrl_train.training_backends.base import RankInfo
from skyrl_train.training_backends.fsdp2.backend import FSDP2Backend
from skyrl_train.utils.gpus import get_indexed_device

_ROWS_AT_A_TIME = 8


class TrainerModel:
    """Scores answers as the trainer does.

    Args:
        model: a `ScoringModel`, sharded or not.
    """

    def __init__(self, model: nn.Module, device: torch.device):
        self._model = model
        self._device = device

    def log_probs(self, answers: Answers, temperature: float) -> list[torch.Tensor]:
        """Compute the log-probs of each answer's tokens under softmax(logits / temperature): float32 [r] on the CPU."""
        return self._score(answers, temperature, [None] * len(answers.prompts))[0]

    def replayed(self, answers: Answers, temperature: float) -> tuple[list[torch.Tensor], float]:
        """Compute the same over the experts that the engine chose. Returns: log-probs, and the share of these experts
        that the model would not choose itself."""
        assert answers.routes is not None
        return self._score(answers, temperature, answers.routes)

    @torch.no_grad()
    def _score(
        self, answers: Answers, temperature: float, routes: Sequence[ExpertRoutes | None]
    ) -> tuple[list[torch.Tensor], float]:
        rows = list(zip(answers.prompts, answers.responses, strict=True))
        found: list[torch.Tensor] = []
        num_differing = num_choices = 0.0
        for start in range(0, len(rows), _ROWS_AT_A_TIME):
            chunk = slice(start, start + _ROWS_AT_A_TIME)
            sequences, mask, num_response = _pad_rows(rows[chunk])
            padded = pad_routes(routes[chunk], mask)
            scores = self._model(
                sequences.to(self._device),
                mask.to(self._device),
                num_response,
                temperature,
                routes=None if padded is None else padded.to(self._device),
            )
            lengths = [len(response) for _, response in rows[chunk]]
            found += [row[:length].float().cpu() for row, length in zip(scores.log_probs, lengths, strict=True)]
            if scores.router is not None:
                num_differing += scores.router.num_differing
                num_choices += float(scores.router.counts.sum())
        return found, num_differing / max(1.0, num_choices)


class Reference(TrainerModel):
    """The trainer's model in float32, whole: also gives logits. On one process sharding changes no number, so it is
    what a trainer with `trainer.bf16=false` computes."""

    _model: ScoringModel

    @torch.no_grad()
    def logits(self, prompt: Sequence[int], response: Sequence[int]) -> torch.Tensor:
        """Compute the logits before each token of the response: float32 [R, V] on the CPU."""
        sequences, mask, num_response = _pad_rows([(prompt, response)])
        packing = self._model.packing
        layout = build_layout(sequences.to(self._device), mask.to(self._device), num_response, packing, None)
        logits = self._model.causal_lm(**layout.build_inputs(), use_cache=False).logits
        return logits.flatten(0, 1)[layout.predictors].float().cpu()


@contextmanager
def build_reference_model(cfg: SkyRLConfig) -> Iterator[Reference]:
    """The policy in float32."""
    device = _get_device(cfg)
    model = build_model(
        _make_single_worker_settings(cfg),
        "policy",
        cfg.trainer.policy.model.path or "",
        device=device,
        is_trained=False,
    )
    assert isinstance(model, ScoringModel)
    yield Reference(model.to(device), device)


@contextmanager
def build_bfloat16_model(cfg: SkyRLConfig) -> Iterator[TrainerModel]:
    """The policy as a worker with `trainer.bf16=true` computes it: float32 parameters, cast by FSDP."""
    backend = FSDP2Backend(_make_single_worker_settings(cfg), "policy")
    backend.cfg.trainer.bf16 = True
    backend.join(RankInfo(device=str(_get_device(cfg))))
    backend.load_model()
    yield TrainerModel(backend.model, backend.device)


def _make_single_worker_settings(cfg: SkyRLConfig) -> SkyRLConfig:
    """The settings of a policy of one worker: how many share the work changes no log-prob but by rounding."""
    alone = copy.deepcopy(cfg)
    alone.trainer.policy.sequence_parallel_size = 1
    alone.trainer.policy.fsdp_config.fsdp_size = -1
    return alone


def _get_device(cfg: SkyRLConfig) -> torch.device:
    return get_indexed_device(cfg.trainer.placement.resolve_device())


def _pad_rows(rows: Sequence[tuple[Sequence[int], Sequence[int]]]) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Pad prompts on the left and responses on the right. Returns: sequences and mask [B, T], and R."""
    num_prompt = max(len(prompt) for prompt, _ in rows)
    num_response = max(len(response) for _, response in rows)
    sequences = torch.zeros(len(rows), num_prompt + num_response, dtype=torch.int64)
    mask = torch.zeros_like(sequences)
    for row, (prompt, response) in enumerate(rows):
        columns = slice(num_prompt - len(prompt), num_prompt + len(response))
        sequences[row, columns] = torch.tensor([*prompt, *response])
        mask[row, columns] = 1
    return sequences, mask, num_response

"""Draft model for speculative decoding: a smaller model that proposes the next tokens of running requests.

A draft is sampled from the draft model with the random number that the engine's model uses at the same position, and is
accepted if that model samples the same token (`speculation.py`): the coupling of "drafter-invariant" speculative
decoding (Daliri, Musco, Suresh 2024). Completions then have exactly the distribution of the engine's model and do not
depend on drafts. Rejection sampling with the draft's probabilities (Leviathan et al. 2023) guarantees only the
distribution: a token depends on whether it was drafted, and thus on concurrent requests.

Dimensions: n rows, T tokens of a pass, K drafts of a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from skyrl_train.errors import ConfigError
from skyrl_train.inference_engines.native.loading import get_context_length
from skyrl_train.inference_engines.native.requests import NO_LORA, Request
from skyrl_train.inference_engines.native.rows import RowTable
from skyrl_train.inference_engines.native.runner import ModelRunner
from skyrl_train.inference_engines.native.sampling import compute_uniforms, sample

_CHUNK = 2048
"""Tokens of a request computed per pass when the draft model has to catch up."""


@dataclass(eq=False)
class _Row:
    """State of a row of the draft model's cache."""

    request: Request
    length: int = 0
    """Number of the request's tokens with keys and values."""
    drafts: Sequence[int] = ()
    """Drafts after them that also have keys and values."""


class DraftModel:
    """Draft model with its own key-value cache for up to `max_rows` running requests. Its weights are never updated.

    Rows match the core's table, which moves rows only to lower indices; each call detects the changes.

    Args:
        model: loaded with the native attention, on its device, in eval mode
        max_rows: maximum number of requests with drafting
        max_length: maximum tokens of prompt and response

    Raises:
        ConfigError: a model with linear attention (its state cannot be rolled back after a rejected draft), or with a
            too short context.
    """

    def __init__(self, model: PreTrainedModel, *, max_rows: int, max_length: int):
        name = f"engine_init_kwargs.speculative_model={model.config.name_or_path}"
        limit = get_context_length(model, None)
        if limit < max_length:
            raise ConfigError(
                f"{name} has a context of {limit} tokens, but the engine has {max_length}: set "
                "generator.max_model_len (or use a draft model with a longer context), or remove it"
            )
        self._runner = ModelRunner(
            model, max_num_seqs=max_rows, max_length=max_length, max_cache_tokens=None, max_loras=1
        )
        if self._runner.has_states:
            raise ConfigError(f"{name} has linear attention, whose state cannot be rolled back after a rejected draft")
        self._last_id = model.config.get_text_config().vocab_size - 1
        self._rows: list[_Row] = []

    def generate_drafts(self, rows: RowTable, nums: Sequence[int]) -> list[np.ndarray]:
        """Generate `nums[i]` drafts for each running request."""
        count, most = len(rows), max(nums)
        if not most:
            return [rows.tokens[0, :0]] * count
        lengths, device, cache = rows.length[:count], self._runner.device, self._runner.cache
        cache.reserve(self._runner.round_up_rows(count), int(lengths.max()) + most)
        widest = self._sync_rows(rows)
        # Rows that lack fewer tokens than others recompute known ones, with the same keys and values.
        positions = lengths[:, None] - widest + np.arange(widest)
        logits = self._decode(rows.tokens[np.arange(count)[:, None], positions], positions)
        # Ignoring per-token settings makes drafts less likely to be accepted, never wrong.
        batch = replace(rows.get_sampling_batch(device), repetition_penalty=None, recorded=None)
        drafts = np.zeros((count, most), np.int64)
        for offset in range(most):
            # The random number that the verifying model uses at this position: similar distributions yield the same
            # token.
            uniform = None if batch.all_greedy else compute_uniforms(rows.key[:count], lengths + offset)
            chosen = sample(
                _fit(logits, rows.vocabulary), batch, None if uniform is None else torch.from_numpy(uniform).to(device)
            )
            drafts[:, offset] = chosen.tokens.clamp(0, rows.vocabulary - 1).cpu().numpy()
            if offset + 1 < most:
                logits = self._decode(drafts[:, offset, None], (lengths + offset)[:, None])
        for row, length, own in zip(self._rows, lengths.tolist(), drafts, strict=True):
            row.length, row.drafts = length, own[:-1].tolist()
        return [own[:num] for own, num in zip(drafts, nums, strict=True)]

    def release(self) -> None:
        """Free the memory of keys and values."""
        self._runner.cache.release()
        self._rows = []

    def to(self, device: torch.device) -> None:
        """Move the weights. Only while nothing is drafted."""
        self._runner.model.to(device)  # pyright: ignore[reportArgumentType]

    def _sync_rows(self, rows: RowTable) -> int:
        """Move rows to the current indices of their requests, and compute all missing tokens except the last ones.
        Returns the maximum number of tokens that a row still lacks, including its last one: 1 or 2.
        """
        before = {row.request: (place, row) for place, row in enumerate(self._rows)}
        self._rows = []
        for place, request in enumerate(rows.requests):
            source, row = before.get(request, (place, _Row(request)))
            if source != place:  # a higher one: what it overwrites has been moved before, or is not needed
                self._runner.cache.copy_row(source, place, row.length + len(row.drafts))
            self._rows.append(row)
        most = min(2, int(rows.length[: len(rows)].min()))
        lacking = 1
        for place, row in enumerate(self._rows):
            tokens = rows.tokens[place, : rows.length[place]]
            accepted = tokens[row.length : row.length + len(row.drafts)]
            agrees = accepted == np.asarray(row.drafts[: len(accepted)], np.int64)
            row.length = min(row.length + int(np.cumprod(agrees).sum()), len(tokens) - 1)
            if len(tokens) - row.length > most:
                for start in range(row.length, len(tokens) - 1, _CHUNK):
                    prompt = self._replace_unknown_ids(tokens[: min(start + _CHUNK, len(tokens) - 1)])
                    self._runner.prefill([place], [prompt], [start], np.array([NO_LORA]))
                row.length = len(tokens) - 1
            lacking = max(lacking, len(tokens) - row.length)
        return lacking

    def _decode(self, ids: np.ndarray, positions: np.ndarray) -> torch.Tensor:
        """Compute [n, T] tokens. Returns logits after the last ones, [n, V of the draft model]."""
        return self._runner.decode(self._replace_unknown_ids(ids), positions, np.full(len(ids), NO_LORA), len(ids))[
            :, -1
        ]

    def _replace_unknown_ids(self, ids: np.ndarray) -> np.ndarray:
        """Replace ids beyond the draft model's vocabulary; prompts may contain unused ids too."""
        return np.minimum(ids, self._last_id)


def _fit(logits: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Truncate or pad logits to the vocabulary of the engine's model (models pad their output layer differently)."""
    return F.pad(logits[:, :vocabulary], (0, max(0, vocabulary - logits.shape[1])), value=-torch.inf)


def check_same_tokens(draft: dict[str, int], own: dict[str, int], draft_path: str, own_path: str) -> None:
    """Raise ConfigError unless two vocabularies (token to id) are the same."""
    if draft == own:
        return
    different = sorted(token for token in draft.keys() | own.keys() if draft.get(token) != own.get(token))
    first = different[0]
    raise ConfigError(
        f"engine_init_kwargs.speculative_model={draft_path} must have the vocabulary of {own_path}: "
        f"{len(different):,} tokens differ, such as {first!r} ({draft.get(first)} and {own.get(first)}). Choose a "
        "smaller model of the same family, or remove it (tokens are then proposed by prompt lookup)"
    )

"""Draft model for speculative decoding: a smaller model that proposes the next tokens of running requests.

A draft is drawn from the draft model with the random number that the engine's model uses at the same place, and is kept
if that model draws the same token (`speculation.py`): the coupling of "drafter-invariant" speculative decoding
(Daliri, Musco, Suresh 2024). So answers have the distribution of the engine's model exactly, and beyond that do not
depend on drafts at all. Rejection sampling with the draft's probabilities (Leviathan et al. 2023) has the former alone:
there a token depends on whether it was drafted, and so on how many requests happen to run beside it.

Dimensions: n rows, T tokens of a pass, K drafts of a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from skyrl_train.errors import ConfigError
from skyrl_train.inference_engines.native.loading import context_length_of
from skyrl_train.inference_engines.native.requests import NO_LORA, Request
from skyrl_train.inference_engines.native.rows import RowTable
from skyrl_train.inference_engines.native.runner import ModelRunner
from skyrl_train.inference_engines.native.sampling import sample, uniforms

_CHUNK = 2048
"""Tokens of a request that are computed in one pass where the draft model has fallen behind."""


@dataclass(eq=False)
class _Row:
    """State of a row of the draft model's cache."""

    request: Request
    length: int = 0
    """Tokens of the request whose keys and values are there."""
    drafts: Sequence[int] = ()
    """Drafts behind them whose keys and values are there as well."""


class DraftModel:
    """A model with keys and values of its own for up to `max_rows` running requests. Its weights stay as they were
    loaded.

    Rows are those of the core's table, which moves rows only to lower places; each call finds out what has changed.

    Args:
        model: loaded with the native attention, on its device, in eval mode
        max_rows: requests that are drafted together
        max_length: of prompt and response

    Raises:
        ConfigError: a model with linear attention, whose state cannot go back behind a rejected draft, or with a
            context that is too short.
    """

    def __init__(self, model: PreTrainedModel, *, max_rows: int, max_length: int):
        name = f"engine_init_kwargs.speculative_model={model.config.name_or_path}"
        limit = context_length_of(model, None)
        if limit < max_length:
            raise ConfigError(
                f"{name} has a context of {limit} tokens, and the engine of {max_length}: set generator.max_model_len "
                "(or a longer context of the draft model), or leave it out"
            )
        self._runner = ModelRunner(
            model, max_num_seqs=max_rows, max_length=max_length, max_cache_tokens=None, max_loras=1
        )
        if self._runner.has_states:
            raise ConfigError(f"{name} has linear attention, whose state cannot go back behind a rejected draft")
        self._last_id = model.config.get_text_config().vocab_size - 1
        self._rows: list[_Row] = []

    def drafts(self, rows: RowTable, nums: Sequence[int]) -> list[np.ndarray]:
        """Return `nums[i]` drafts of each running request, as many rows as there are."""
        count, most = len(rows), max(nums)
        if not most:
            return [rows.tokens[0, :0]] * count
        lengths, device, cache = rows.length[:count], self._runner.device, self._runner.cache
        cache.reserve(self._runner.filled(count), int(lengths.max()) + most)
        widest = self._follow(rows)
        # Rows that lack fewer tokens than others compute known ones again, to the same keys and values.
        positions = lengths[:, None] - widest + np.arange(widest)
        logits = self._decode(rows.tokens[np.arange(count)[:, None], positions], positions)
        # Settings that look at single tokens make drafts less likely, never wrong.
        batch = replace(rows.sampling(device), repetition_penalty=None, recorded=None)
        drafts = np.zeros((count, most), np.int64)
        for offset in range(most):
            # The number that the verifying model will draw with at this place: alike distributions draw the same token.
            uniform = None if batch.all_greedy else uniforms(rows.key[:count], lengths + offset)
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
        """Give the memory of keys and values back."""
        self._runner.cache.release()
        self._rows = []

    def to(self, device: torch.device) -> None:
        """Move the weights. Only while nothing is drafted."""
        self._runner.model.to(device)  # pyright: ignore[reportArgumentType]

    def _follow(self, rows: RowTable) -> int:
        """Bring rows to the places that their requests have now, and compute what they lack but for the last tokens.

        Returns: the most tokens that a row lacks, its last one included: 1 or 2.
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
                    prompt = self._known(tokens[: min(start + _CHUNK, len(tokens) - 1)])
                    self._runner.prefill([place], [prompt], [start], np.array([NO_LORA]))
                row.length = len(tokens) - 1
            lacking = max(lacking, len(tokens) - row.length)
        return lacking

    def _decode(self, ids: np.ndarray, positions: np.ndarray) -> torch.Tensor:
        """Compute [n, T] tokens. Returns: [n, V of the draft model] logits behind the last ones."""
        return self._runner.decode(self._known(ids), positions, np.full(len(ids), NO_LORA), len(ids))[:, -1]

    def _known(self, ids: np.ndarray) -> np.ndarray:
        """Replace ids that only the engine's model has: prompts may hold those without a token, too."""
        return np.minimum(ids, self._last_id)


def _fit(logits: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Cut off what the engine's model does not have, or add what only it has (rows that fill up the output layer)."""
    return F.pad(logits[:, :vocabulary], (0, max(0, vocabulary - logits.shape[1])), value=-torch.inf)


def check_same_tokens(draft: dict[str, int], own: dict[str, int], draft_path: str, own_path: str) -> None:
    """Raise ConfigError unless two vocabularies (token to id) are the same."""
    if draft == own:
        return
    different = sorted(token for token in draft.keys() | own.keys() if draft.get(token) != own.get(token))
    first = different[0]
    raise ConfigError(
        f"engine_init_kwargs.speculative_model={draft_path} must have the tokens of {own_path}: {len(different):,} "
        f"differ, such as {first!r} ({draft.get(first)} and {own.get(first)}). Choose a smaller model of the same "
        "family, or leave it out (tokens are then proposed by prompt lookup)"
    )

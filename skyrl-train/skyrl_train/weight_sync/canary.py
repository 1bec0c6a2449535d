"""A few fixed tokens whose log-probs trainer and engine must agree on: the proof that weights which arrived are those
that the engine computes with. Knows neither of them."""

from collections.abc import Sequence
from statistics import median

import torch

from skyrl_train.errors import WeightSyncError

NUM_CANARIES, CANARY_LENGTH = 4, 16

TOLERANCES = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.3}
"""The largest mean difference of log-probs [nats] that the number format explains, of any model. Random tokens have
logits up to about 20 below the best, which bfloat16 (8 bits) rounds by up to 0.08 at each of several places. An output
layer or a block that kept its random weights differs by whole nats."""

FLOORS = {"float32": 1e-4, "float16": 2e-3, "bfloat16": 0.02}
"""Least tolerance, however small the measured difference [nats]: a token that goes to another expert."""
_NUM_MEASURED = 5
_MARGIN = 10.0

LogProbs = Sequence[Sequence[float]]
"""Log-probs of each canary's tokens but the first."""


def canary_prompts(vocab_size: int, max_length: int) -> list[list[int]]:
    """The same random tokens at every call. [NUM_CANARIES][CANARY_LENGTH], shorter only in a shorter context."""
    generator = torch.Generator().manual_seed(20_260_101)
    # At least two tokens: the first has no log-prob. One place of the context is left for the token that the engine
    # must generate.
    length = max(2, min(CANARY_LENGTH, max_length - 1))
    return torch.randint(vocab_size, (NUM_CANARIES, length), generator=generator).tolist()


def mean_difference(expected: LogProbs, found: LogProbs) -> float:
    """Mean absolute difference over all tokens [nats]; infinite where a number is missing or not finite."""
    if [len(row) for row in expected] != [len(row) for row in found]:
        return float("inf")
    gap = (torch.tensor([*map(list, expected)]) - torch.tensor([*map(list, found)])).abs().mean().item()
    # NaN is not above any tolerance in a comparison, and would pass.
    return gap if gap == gap else float("inf")


class CanaryTolerance:
    """The largest mean difference of log-probs that a sync may leave: ten times that of the first syncs.

    The first one, into random weights, may differ by what the number formats explain. The measure is the median of the
    first few, relative to the size of the log-probs, which grow as a model becomes sure, and their rounding with them.
    It stays as it was then: a difference that grows slowly is what a layer that is not updated looks like.

    Args:
        formats: number formats of trainer and engine.
        fixed: holds instead (`generator.weight_sync_canary_tolerance`).
    """

    def __init__(self, formats: Sequence[str], fixed: float | None = None):
        self._fixed = fixed
        self._most = max(TOLERANCES[name] for name in formats)
        self._least = max(FLOORS[name] for name in formats)
        self._measured: list[float] = []

    def now(self, expected: LogProbs) -> float:
        """Return the tolerance for these log-probs of the trainer [nats]."""
        if self._fixed is not None:
            return self._fixed
        if not self._measured:
            return self._most
        # The median: one of the first syncs may hit a token that goes to another expert.
        measured = _MARGIN * median(self._measured) * _size(expected)
        return min(self._most, max(self._least, measured))

    def update(self, gap: float, expected: LogProbs) -> None:
        """Adjust the tolerance after a sync that passed."""
        # Measured only at the beginning: a tolerance that followed the gap would learn to accept a growing one.
        if len(self._measured) < _NUM_MEASURED:
            self._measured.append(gap / _size(expected))


def _size(log_probs: LogProbs) -> float:
    """Mean absolute value, not below 1 nat."""
    values = [abs(value) for row in log_probs for value in row]
    return max(1.0, sum(values) / max(1, len(values)))


def check_canaries(expected: LogProbs, of_engines: Sequence[LogProbs], tolerance: float, version: int) -> float:
    """The largest `mean_difference` of an engine.

    Raises:
        WeightSyncError: it is above `tolerance`.
    """
    gaps = [mean_difference(expected, found) for found in of_engines]
    for index, gap in enumerate(gaps):
        if gap > tolerance:
            raise WeightSyncError(
                f"after the sync of version {version}, engine {index} gives other log-probs than the trainer: they "
                f"differ by {gap:.3g} on average over {sum(map(len, expected))} fixed tokens; "
                f"{tolerance:.3g} is allowed (generator.weight_sync_canary_tolerance; null: ten times the difference "
                "of the first syncs). The fingerprints of the weights agreed, so the engine computes with other "
                "weights where they cannot be read (metric weight_sync/held_share), or in another way: "
                "`python -m skyrl_train.entrypoints.main_mismatch` tells which"
            )
    return max(gaps, default=0.0)

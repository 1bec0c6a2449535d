"""Canary check: fixed tokens whose log-probs must agree between trainer and engine, which proves that an engine
computes with the received weights. Independent of both."""

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
    """Return fixed random tokens [NUM_CANARIES][CANARY_LENGTH], shorter only for a shorter context."""
    generator = torch.Generator().manual_seed(20_260_101)
    # At least two tokens: the first has no log-prob. One position of the context is reserved for the token that the
    # engine must generate.
    length = max(2, min(CANARY_LENGTH, max_length - 1))
    return torch.randint(vocab_size, (NUM_CANARIES, length), generator=generator).tolist()


def mean_difference(expected: LogProbs, found: LogProbs) -> float:
    """Compute the mean absolute difference over all tokens [nats]; infinite if a number is missing or not finite."""
    if [len(row) for row in expected] != [len(row) for row in found]:
        return float("inf")
    gap = (torch.tensor([*map(list, expected)]) - torch.tensor([*map(list, found)])).abs().mean().item()
    # NaN is not greater than any tolerance and would pass the comparison.
    return gap if gap == gap else float("inf")


class CanaryTolerance:
    """Maximum mean difference of log-probs after a sync: ten times the difference of the first syncs.

    The first sync may differ by the rounding of the number formats. The reference is the median of the first syncs,
    relative to the size of the log-probs, since rounding errors scale with it. It is not updated later: a slowly
    growing difference indicates a layer that is not updated.

    Args:
        formats: number formats of trainer and engine.
        fixed: constant tolerance used instead (`generator.weight_sync_canary_tolerance`).
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
        # The median, since in one of the first syncs a token may be routed to another expert.
        measured = _MARGIN * median(self._measured) * _mean_size(expected)
        return min(self._most, max(self._least, measured))

    def update(self, gap: float, expected: LogProbs) -> None:
        """Update the tolerance after a successful sync."""
        # Measured only at the beginning: a tolerance that follows the gap would accept a growing gap.
        if len(self._measured) < _NUM_MEASURED:
            self._measured.append(gap / _mean_size(expected))


def _mean_size(log_probs: LogProbs) -> float:
    """Return the mean absolute value, at least 1 nat."""
    values = [abs(value) for row in log_probs for value in row]
    return max(1.0, sum(values) / max(1, len(values)))


def check_canaries(expected: LogProbs, of_engines: Sequence[LogProbs], tolerance: float, version: int) -> float:
    """Return the largest `mean_difference` of all engines.

    Raises:
        WeightSyncError: the difference is above `tolerance`.
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

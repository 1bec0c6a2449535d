"""A few fixed tokens whose log-probs trainer and engine must agree on: the proof that weights which arrived are those
that the engine computes with. Knows neither of them."""

from collections.abc import Sequence

import torch

from skyrl_train.errors import WeightSyncError

NUM_CANARIES, CANARY_LENGTH = 4, 16

TOLERANCES = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.3}
"""The largest mean difference of log-probs [nats] that the number format explains. Random tokens have logits up to
about 20 below the best, which bfloat16 (8 bits) rounds by up to 0.08 at each of several places. An output layer or a
block that kept its old weights differs by whole nats."""

LogProbs = Sequence[Sequence[float]]
"""Of each canary's tokens but its first."""


def canary_prompts(vocab_size: int, max_length: int) -> list[list[int]]:
    """The same random tokens at every call. [NUM_CANARIES][CANARY_LENGTH], shorter only in a shorter context."""
    dice = torch.Generator().manual_seed(20_260_101)
    length = max(2, min(CANARY_LENGTH, max_length - 1))
    return torch.randint(vocab_size, (NUM_CANARIES, length), generator=dice).tolist()


def mean_difference(expected: LogProbs, found: LogProbs) -> float:
    """Mean absolute difference over all tokens [nats]; infinite where a number is missing or not finite."""
    if [len(row) for row in expected] != [len(row) for row in found]:
        return float("inf")
    gap = (torch.tensor([*map(list, expected)]) - torch.tensor([*map(list, found)])).abs().mean().item()
    return gap if gap == gap else float("inf")


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
                f"generator.weight_sync_canary_tolerance allows {tolerance:g}. The fingerprints of the weights agreed, "
                "so the engine computes with others than it was given (a layer that its loader left as it was), or in "
                "another way: `python -m skyrl_train.entrypoints.main_mismatch` tells which"
            )
    return max(gaps, default=0.0)

"""Random data of every loss, for the tiny model."""

import numpy as np

from tx.tinker.types import LOSSES as LOSSES
from tx.tinker.types import Datum

VOCABULARY = 99


def data_of(loss: str, lengths: list[int], seed: int) -> list[Datum]:
    draw, data = np.random.default_rng(seed), []
    for length in lengths:
        tokens = draw.integers(4, VOCABULARY, size=length + 1)
        inputs = {"weights": draw.random(length)}
        if loss != "cross_entropy":
            inputs = {"logprobs": draw.normal(size=length) - 4, "advantages": draw.normal(size=length)}
        if loss == "gspo":
            inputs["sequence_ratio_mask"] = (draw.random(length) < 0.7) * 1.0
        arrays = {name: array.astype(np.float32) for name, array in inputs.items()}
        data.append(Datum(tokens[:-1], {"target_tokens": tokens[1:], **arrays}))
    return data

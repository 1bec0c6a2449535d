"""Random data of every loss and sample requests, for the tiny model."""

from typing import Any

import numpy as np

from tx.tinker.types import LOSSES as LOSSES
from tx.tinker.types import Datum, SampleParams, SampleSpec

VOCABULARY = 99
PROMPT = [50, 7, 33, 90, 14, 14, 62]


def data_of(loss: str, lengths: list[int], seed: int, vocabulary: int = VOCABULARY) -> list[Datum]:
    draw, data = np.random.default_rng(seed), []
    for length in lengths:
        tokens = draw.integers(4, vocabulary, size=length + 1)
        inputs = {"weights": draw.random(length)}
        if loss != "cross_entropy":
            inputs = {"logprobs": draw.normal(size=length) - 4, "advantages": draw.normal(size=length)}
        if loss == "gspo":
            inputs["sequence_ratio_mask"] = (draw.random(length) < 0.7) * 1.0
        arrays = {name: array.astype(np.float32) for name, array in inputs.items()}
        data.append(Datum(tokens[:-1], {"target_tokens": tokens[1:], **arrays}))
    return data


def spec(
    num_samples: int = 1, prompt: list[int] = PROMPT, *, scores: bool = False, top: int = 0, **params: Any
) -> SampleSpec:
    given = SampleParams(**{"seed": 3, "max_tokens": 24, "stop_at_eos": False} | params)
    return SampleSpec(
        prompt=prompt, num_samples=num_samples, params=given, prompt_logprobs=scores, topk_prompt_logprobs=top
    )

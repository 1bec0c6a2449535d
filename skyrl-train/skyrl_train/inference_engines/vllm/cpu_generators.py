"""Fix of seeded requests with long prompts in vLLM on a CPU.

vLLM also samples a token for a request with a partially computed prompt, discards it, and rewinds the request's
generator by an offset (`vllm/v1/worker/gpu_model_runner.py`, `_bookkeeping_sync`). CPU generators have no offset, and
the worker crashes. Here such a generator is not used until the prompt is complete.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch
    from vllm.v1.outputs import SamplerOutput
    from vllm.v1.sample.metadata import SamplingMetadata


def save_generators_of_partial_prompts(runner: Any) -> None:
    """Patch a vLLM model runner on a CPU as described above."""
    forward, bookkeeping = runner.sampler.forward, runner._bookkeeping_sync

    def spared_forward(
        logits: "torch.Tensor", sampling_metadata: "SamplingMetadata", *args: object, **kwargs: object
    ) -> "SamplerOutput":
        kept = _select_complete_prompts(runner)
        if len(kept) < len(sampling_metadata.generators):
            sampling_metadata = replace(sampling_metadata, generators=kept)
        return forward(logits, sampling_metadata, *args, **kwargs)

    def spared_bookkeeping(*args: object, **kwargs: object) -> object:
        everything = runner.input_batch.generators
        runner.input_batch.generators = _select_complete_prompts(runner)
        try:
            return bookkeeping(*args, **kwargs)
        finally:
            runner.input_batch.generators = everything

    runner.sampler.forward = spared_forward
    runner._bookkeeping_sync = spared_bookkeeping


def _select_complete_prompts(runner: Any) -> "dict[int, torch.Generator]":
    batch = runner.input_batch
    partial = set(np.nonzero(runner.discard_request_mask.np[: batch.num_reqs])[0].tolist())
    return {row: generator for row, generator in batch.generators.items() if row not in partial}

"""Log-probs of several targets per row, in chunks, with and without an adapter, equal torch's."""

import numpy as np
import pytest
import torch

from skyrl_train.models.token_log_probs import LogitRule
from tx.tinker.backends.torch.adapters import FrozenProduct
from tx.tinker.backends.torch.head import Head, Targets
from tx.tinker.backends.torch.parts import Matrices, Part
from tx.tinker.types import Datum

RULES = [LogitRule(), LogitRule(multiplier=0.5), LogitRule(multiplier=2.0, softcap=3.0)]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("chunk_size", [32, 1024])
@pytest.mark.parametrize("num_targets", [None, 1, 3])
def test_logprobs_and_gradients_match_whole_logits(rule: LogitRule, chunk_size: int, num_targets: int | None) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(96, 16, requires_grad=True)
    weight, bias = torch.randn(50, 16), torch.randn(50)
    a, b = torch.randn(4, 16, requires_grad=True), torch.randn(4, 50, requires_grad=True)
    shape = (80,) if num_targets is None else (80, num_targets)  # the last 16 rows are filler
    words = np.random.default_rng(0).integers(50, size=shape)
    logits = hidden @ weight.t() + bias + 8 * (hidden @ a.t()) @ b
    logits = logits * rule.multiplier
    if rule.softcap is not None:
        logits = rule.softcap * (logits / rule.softcap).tanh()
    expected = logits[:80].log_softmax(-1).gather(1, torch.tensor(words).reshape(80, -1)).flatten()
    gradient = torch.randn(len(expected))
    expected.backward(gradient)

    found = Matrices(torch.zeros(4, 16), torch.zeros(4, 50))
    part = Part(0, 96, Matrices(a.detach(), b.detach()), 8.0, found)
    targets = Targets.of([Datum(np.zeros(80, int), {"target_tokens": words})])
    scored = Head(FrozenProduct(weight, bias), rule, chunk_size).score(hidden.detach(), targets, part)
    torch.testing.assert_close(scored.log_probs, expected.detach(), rtol=1e-4, atol=1e-4)
    of_hidden = scored.backward(gradient)
    for ours, theirs in ((of_hidden, hidden), (found.a, a), (found.b, b)):
        torch.testing.assert_close(ours, theirs.grad, rtol=1e-3, atol=1e-3)


def test_logits_of_single_chunk_are_in_memory() -> None:
    """4096 rows of 8192 words would be 128 MiB; the largest tensor made is a chunk's 1 MiB."""
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # torch's own signature
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                largest = max(largest, result.untyped_storage().nbytes())
            return result

    hidden, weight = torch.randn(4096, 4), torch.randn(8192, 4)
    words = np.zeros(4096, int)
    targets = Targets.of([Datum(words, {"target_tokens": words})])
    with Watch():
        scored = Head(FrozenProduct(weight, None), LogitRule(), 32).score(hidden, targets, None)
        scored.backward(torch.ones(4096))
    assert largest == 32 * 8192 * 4

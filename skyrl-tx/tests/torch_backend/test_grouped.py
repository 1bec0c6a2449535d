"""Adapters of many models and experts by one product each: the numbers of one product for each of them."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tx.tinker.backends.torch import adapters, grouped
from tx.tinker.backends.torch.adapters import FrozenProduct, compute_adapted_product
from tx.tinker.backends.torch.parts import Matrices, Part
from tx.tinker.backends.torch.training import TorchTraining
from tx.tinker.types import AdamParams, Datum, LoraSpec, PassOutput, TrainingPass

Make = Callable[[str], Path]
Supervised = Callable[..., list[Datum]]

WIDTH, OUT = 48, 64
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def parts_of(dtype: torch.dtype) -> list[Part]:
    """Make parts with a gap between them, of several ranks (one not aligned) and columns; two share B and its
    gradient."""
    torch.manual_seed(0)

    def matrices(rank: int, out: int) -> Matrices:
        return Matrices(torch.randn(rank, WIDTH).to(dtype) / 7, torch.randn(rank, out).to(dtype) / 7)

    def gradient(of: Matrices) -> Matrices:
        return Matrices(*map(torch.zeros_like, of))

    made = []
    rows = [(0, 32, 8), (32, 96, 8), (128, 160, 8), (160, 192, 8), (192, 224, 16), (224, 256, 16), (256, 288, 5)]
    for start, end, rank in rows:
        for columns in (slice(0, 32), slice(32, 64)):
            of_part = matrices(rank, 32)
            made.append(Part(start, end, of_part, 32 / rank, gradient(of_part), columns))
    shared, first = made[6], made[4]
    made[6] = shared._replace(
        matrices=shared.matrices._replace(b=first.matrices.b), gradient=shared.gradient._replace(b=first.gradient.b)
    )
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_product_matches_separate_products_with_gradients(dtype: torch.dtype) -> None:
    results, product = (
        [],
        FrozenProduct(torch.randn(OUT, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype), None),
    )
    for is_grouped in (False, True):
        parts = parts_of(dtype)
        x = torch.randn(320, WIDTH, generator=torch.Generator().manual_seed(2)).to(dtype).requires_grad_()
        y = compute_adapted_product(x, product, parts, torch.zeros((), requires_grad=True), is_grouped)
        y.backward(torch.randn(320, OUT, generator=torch.Generator().manual_seed(3)).to(dtype))
        plain = compute_adapted_product(x.detach(), product, parts, None, is_grouped)
        assert torch.equal(plain, y)
        results.append([y.detach(), x.grad, *(matrix for part in parts for matrix in part.gradient or ())])
    groups, rest = grouped.group_parts(parts_of(dtype))
    assert [len(group.parts) for group in groups] == [2] * 6 and len(rest) == 2
    for one_by_one, together in zip(*results, strict=True):
        assert one_by_one is not None and one_by_one.any()
        scale = one_by_one.abs().max().item()
        torch.testing.assert_close(together, one_by_one, rtol=0, atol=TOLERANCE[dtype] * scale)


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_grouping_setting_trains_same_models(
    name: str, model_folder: Make, supervised: Supervised, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = []
    monkeypatch.setattr(adapters, "add_gradients", lambda *args: called.append(1) or grouped.add_gradients(*args))
    outputs = []
    for setting in (False, True):
        backend = TorchTraining(model_folder(name), grouped_adapters=setting)
        passes = []
        for i, model in enumerate(("a", "b", "c")):
            backend.create(model, LoraSpec(rank=8, seed=i))
            passes.append(TrainingPass(model, supervised([20, 30], i), "cross_entropy"))
        for _ in range(2):
            results = backend.run(passes)
            for model in "abc":
                backend.optim_step(model, AdamParams(learning_rate=0.02, eps=1e-3))
        assert bool(called) == setting
        outputs.append([each for result in results if isinstance(result, PassOutput) for each in result.logprobs])
    assert len(outputs[0]) == 6
    for one_by_one, together in zip(*outputs, strict=True):
        np.testing.assert_allclose(together, one_by_one, rtol=1e-4, atol=1e-4)

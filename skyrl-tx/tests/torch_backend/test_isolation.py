"""Results of a model do not depend by a bit on the models that share its pass: whatever their lengths, ranks, losses or
NaNs.
"""

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from random_data import LOSSES, data_of

from tx.errors import ModelError
from tx.tinker.backends.base import Failure
from tx.tinker.backends.torch.training import TorchTraining
from tx.tinker.types import AdamParams, Datum, LoraSpec, PassOutput, TrainingPass

Make = Callable[[str], Path]

VOCAB = 67


def tenants(count: int, draw: random.Random) -> dict[str, tuple[LoraSpec, TrainingPass]]:
    """Models of random ranks and layers, each with a request of its own kind; some of single tokens."""
    found = {}
    for i in range(count):
        attn, mlp, unembed = (draw.random() < 0.75 for _ in range(3))
        parts = {"train_attn": attn or not unembed, "train_mlp": mlp, "train_unembed": unembed}
        lora = LoraSpec(rank=draw.choice([1, 2, 3, 5, 8, 16, 33]), seed=draw.randrange(100), **parts)
        loss = draw.choice(LOSSES)
        lengths = [draw.choice([1, 2, 3, draw.randint(1, 90)]) for _ in range(draw.randint(1, 4))]
        data = data_of(loss, lengths, draw.randrange(10**6), VOCAB)
        found[str(i)] = lora, TrainingPass(str(i), data, loss)
    return found


def add(backend: TorchTraining, model_id: str, lora: LoraSpec, fill: float | None = None) -> None:
    """A model with a B that is not zero; or whose weights are all `fill`."""
    backend.create(model_id, lora)
    adapter = backend.adapters[model_id]
    noise = torch.randn(adapter.weights.shape, generator=torch.Generator().manual_seed(lora.seed))
    adapter.weights.add_(noise, alpha=0.1)
    if fill is not None:
        adapter.weights.fill_(fill)
    adapter.changed()


def same_bits(a: torch.Tensor | np.ndarray, b: torch.Tensor | np.ndarray) -> bool:
    return np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.first_case
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "qwen3_moe", "phi3", "sliding"])
@pytest.mark.parametrize("seed", [0, 1])
def test_pass_of_many_models_matches_separate_passes_bit_for_bit(name: str, seed: int, model_folder: Make) -> None:
    draw = random.Random(seed)
    together = TorchTraining(model_folder(name), tokens_per_micro_batch=10**6)
    alone = TorchTraining(model_folder(name))
    for count in (2, 5, 16):
        models = tenants(count, draw)
        broken = str(draw.randrange(count))
        for model_id, (lora, _) in models.items():
            for backend in (together, alone):
                add(backend, model_id, lora, float("nan") if model_id == broken else None)
        passes = [each for _, each in models.values()]
        steps = [AdamParams(learning_rate=0.01, weight_decay=0.1 * i) for i in range(count)]
        for _ in range(2):  # the second pass begins from weights that the first one moved
            for each, joint in zip(passes, together.run(passes), strict=True):
                (single,) = alone.run([each])
                assert isinstance(joint, PassOutput) and isinstance(single, PassOutput)
                assert all(map(same_bits, joint.logprobs, single.logprobs))
                assert repr(joint.metrics) == repr(single.metrics)
                a, b = (backend.adapters[each.model_id].gradient for backend in (together, alone))
                assert a is not None and b is not None and same_bits(a, b)
            for each, adam in zip(passes, steps, strict=True):
                if each.model_id != broken:
                    assert together.optim_step(each.model_id, adam) == alone.optim_step(each.model_id, adam)
                    a, b = (backend.adapters[each.model_id].weights for backend in (together, alone))
                    assert same_bits(a, b) and bool(a.isfinite().all())


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
def test_forward_matches_forward_backward_bit_for_bit(name: str, model_folder: Make) -> None:
    backend = TorchTraining(model_folder(name))
    add(backend, "m", LoraSpec(rank=4))
    data = data_of("ppo", [1, 40, 7], 0, VOCAB)
    forward, both = (backend.run([TrainingPass("m", data, "ppo", {}, only)])[0] for only in (True, False))
    assert isinstance(forward, PassOutput) and isinstance(both, PassOutput)
    assert all(map(same_bits, forward.logprobs, both.logprobs)) and forward.metrics == both.metrics


def test_gradient_checkpointing_changes_no_bit(model_folder: Make) -> None:
    data, gradients = data_of("cross_entropy", [30, 5], 0, VOCAB), []
    for checkpointing in (False, True):
        backend = TorchTraining(model_folder("qwen3"), gradient_checkpointing=checkpointing)
        add(backend, "m", LoraSpec(rank=4))
        backend.run([TrainingPass("m", data, "cross_entropy")])
        gradients.append(backend.adapters["m"].gradient)
    assert same_bits(*gradients)


def test_passes_are_shared_up_to_token_limit(model_folder: Make) -> None:
    backend = TorchTraining(model_folder("llama"), tokens_per_micro_batch=64)
    sizes: list[int] = []
    embedding = backend._base.model.get_input_embeddings()
    embedding.register_forward_hook(lambda _module, inputs, _output: sizes.append(inputs[0].numel()))
    for i in range(4):
        add(backend, str(i), LoraSpec(rank=4))
    passes = [
        TrainingPass(str(i), data_of("cross_entropy", [n], i, VOCAB), "cross_entropy")
        for i, n in enumerate((32, 32, 100, 5))
    ]
    assert all(isinstance(result, PassOutput) for result in backend.run(passes))
    assert sizes == [64, 128, 32]


# ---- failures


def run_beside(backend: TorchTraining, bad: TrainingPass, model_folder: Path) -> Exception:
    """Return the error of one model between two healthy ones, whose results equal separate passes."""
    for model_id in ("a", "b", bad.model_id):
        add(backend, model_id, LoraSpec(rank=4))
    healthy = [TrainingPass(i, data_of("cross_entropy", [9, 4], n, VOCAB), "cross_entropy") for n, i in enumerate("ab")]
    first, failure, last = backend.run([healthy[0], bad, healthy[1]])
    assert isinstance(failure, Failure) and backend.adapters[bad.model_id].gradient is None
    other = TorchTraining(model_folder)
    for each, result in zip(healthy, (first, last), strict=True):
        add(other, each.model_id, LoraSpec(rank=4))
        (expected,) = other.run([each])
        assert isinstance(result, PassOutput) and isinstance(expected, PassOutput)
        assert all(map(same_bits, result.logprobs, expected.logprobs))
        a, b = (owner.adapters[each.model_id].gradient for owner in (backend, other))
        assert a is not None and b is not None and same_bits(a, b)
    return failure.error


def datum(tokens: list[int], **inputs: list[float]) -> Datum:
    arrays = {name: np.array(values, np.float32) for name, values in inputs.items()}
    ids = np.array(tokens)
    return Datum(ids, {"target_tokens": ids, **arrays})


@pytest.mark.parametrize(
    "bad, says",
    [
        (
            TrainingPass("x", [datum([1, 67])], "cross_entropy"),
            r"data\[0\].model_input",
        ),
        (TrainingPass("x", [datum([1, -1])], "cross_entropy"), "got -1"),
        (TrainingPass("x", [], "cross_entropy"), "at least one datum"),
        (TrainingPass("x", [datum([])], "cross_entropy"), "must be 1 to 512 tokens, the context; got 0"),
        (TrainingPass("x", [datum([1] * 513)], "cross_entropy"), "got 513"),
        (TrainingPass("x", [Datum(np.array([1]), {})], "cross_entropy"), "target_tokens"),
        (TrainingPass("x", [datum([1, 2], weights=[1])], "cross_entropy"), r"\['weights'\] must have the shape"),
        (
            TrainingPass("x", [datum([1, 2], wieghts=[1, 1])], "cross_entropy"),
            r"\['wieghts'\] is no input of cross_entropy",
        ),
        (TrainingPass("x", [datum([1], advantages=[1])], "ppo"), "must have 'logprobs' for ppo"),
        (TrainingPass("x", [datum([1])], "pppo"), "loss_fn"),
        (TrainingPass("x", [datum([1])], "cross_entropy", {"beta": 1.0}), r"loss_fn_config\['beta'\]"),
    ],
)
def test_invalid_request_fails_alone_with_reason(bad: TrainingPass, says: str, model_folder: Make) -> None:
    error = run_beside(TorchTraining(model_folder("llama")), bad, model_folder("llama"))
    assert isinstance(error, ModelError) and error.category == "user"
    with pytest.raises(ModelError, match=says):
        raise error


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_request_breaking_pass_is_found_and_fails_alone(when: str, model_folder: Make) -> None:
    backend = TorchTraining(model_folder("llama"))

    def no_memory(_module: object, inputs: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor | None:
        if not bool((inputs[0] == 66).any()):
            return None
        if when == "forward":
            raise MemoryError("no room for token 66")
        output.requires_grad_().register_hook(raise_it)
        return output

    def raise_it(_gradient: torch.Tensor) -> None:
        raise MemoryError("no room for token 66")

    backend._base.model.get_input_embeddings().register_forward_hook(no_memory)
    bad = TrainingPass("x", [datum([66, 66])], "cross_entropy")
    assert "no room" in str(run_beside(backend, bad, model_folder("llama")))


def test_unloaded_model_fails_alone(model_folder: Make) -> None:
    backend = TorchTraining(model_folder("llama"))
    add(backend, "a", LoraSpec(rank=4))
    backend.forget("never was there")
    fine, failed = (TrainingPass(i, [datum([1, 2])], "cross_entropy") for i in ("a", "gone"))
    results = backend.run([failed, fine])
    assert isinstance(results[0], Failure) and isinstance(results[1], PassOutput)

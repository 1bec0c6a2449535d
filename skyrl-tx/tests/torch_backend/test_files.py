"""Saved state is restored bit for bit, and engines can load saved adapters."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from skyrl_train.inference_engines.base import InferenceEngineInput
from skyrl_train.inference_engines.native.engine import NativeInferenceEngine
from skyrl_train.inference_engines.native.lora_loading import read_lora
from skyrl_train.weight_sync.base import LoraLoadRequest
from tx.errors import ModelError
from tx.tinker.backends.torch.adapters import Adapter
from tx.tinker.backends.torch.training import TorchTraining
from tx.tinker.types import AdamParams, Datum, LoraSpec, PassOutput, TrainingPass

LORA = LoraSpec(rank=5, seed=1)
ADAM = AdamParams(learning_rate=0.02, weight_decay=0.01)
Make = Callable[[str], Path]
Supervised = Callable[..., list[Datum]]


def train(backend: TorchTraining, data: list[Datum], steps: int, *, half_a_step: bool = False) -> None:
    for _ in range(steps):
        backend.run([TrainingPass("m", data, "cross_entropy")])
        backend.optim_step("m", ADAM)
    if half_a_step:
        backend.run([TrainingPass("m", data, "cross_entropy")])


def new(folder: Path, lora: LoraSpec = LORA) -> TorchTraining:
    backend = TorchTraining(folder)
    backend.create("m", lora)
    return backend


def state(backend: TorchTraining) -> dict[str, object]:
    adapter = backend.adapters["m"]
    vectors = {name: getattr(adapter, name) for name in ("weights", "mean", "square", "gradient")}
    as_bytes = {name: None if vector is None else vector.numpy().tobytes() for name, vector in vectors.items()}
    return as_bytes | {"step": adapter.step}


@pytest.mark.parametrize("steps, half", [(0, False), (0, True), (2, False), (2, True)])
def test_restored_model_continues_identically(
    steps: int, half: bool, model_folder: Make, supervised: Supervised, tmp_path: Path
) -> None:
    data = supervised([9, 4])
    backend = new(model_folder("qwen3"))
    train(backend, data, steps, half_a_step=half)
    backend.save("m", tmp_path, state=True)
    restored = TorchTraining(model_folder("qwen3"))
    restored.restore("m", LORA, tmp_path)
    assert state(restored) == state(backend)
    for each in (backend, restored):
        each.optim_step("m", ADAM)
        train(each, data, 2)
    assert state(restored) == state(backend)


def test_load_restores_optimizer_on_request_and_drops_gradient(
    model_folder: Make, supervised: Supervised, tmp_path: Path
) -> None:
    saved = new(model_folder("llama"))
    train(saved, supervised([9]), 2)
    saved.save("m", tmp_path, state=True)
    backend = new(model_folder("llama"), LoraSpec(rank=5, seed=2))
    train(backend, supervised([9], seed=1), 1, half_a_step=True)
    backend.load("m", tmp_path, optimizer=True)
    assert state(backend) == state(saved)
    train(backend, supervised([9]), 1, half_a_step=True)
    backend.load("m", tmp_path, optimizer=False)
    assert state(backend) == {**state(saved), "mean": None, "square": None, "step": 0}


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3_moe", "phi3"])
def test_native_engine_reads_saved_adapter(
    name: str, model_folder: Make, supervised: Supervised, tmp_path: Path
) -> None:
    backend = new(model_folder(name))
    train(backend, supervised([9]), 1)
    backend.save("m", tmp_path, state=True)
    layers = read_lora(str(tmp_path), AutoModelForCausalLM.from_pretrained(model_folder(name)), max_rank=8)
    adapter: Adapter = backend.adapters["m"]
    ours = adapter.group_by_site(adapter.weights)
    assert set(layers) == set(ours) and "lm_head" in layers
    for site, matrices in layers.items():
        assert torch.equal(matrices.a, ours[site].a) and torch.equal(matrices.b, ours[site].b.mT)
        assert matrices.scaling == 32 / 5


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
async def test_native_engine_samples_with_training_logprobs(
    name: str, model_folder: Make, supervised: Supervised, tmp_path: Path
) -> None:
    backend = new(model_folder(name))
    train(backend, supervised([9, 30]), 3)
    backend.save("m", tmp_path, state=False)
    engine = NativeInferenceEngine(str(model_folder(name)))
    try:
        await engine.load_lora(LoraLoadRequest(name="m", path=str(tmp_path), version=1))
        params = {"max_tokens": 40, "ignore_eos": True, "seed": 3}
        prompt = [5, 9, 12]
        request = InferenceEngineInput(prompt_token_ids=[prompt], sampling_params=params, lora_name="m")
        answer = await engine.generate_batch(request)
    finally:
        await engine.teardown()
    tokens = np.array(prompt + answer["response_ids"][0])
    datum = Datum(tokens[:-1], {"target_tokens": tokens[1:]})
    (result,) = backend.run([TrainingPass("m", [datum], "cross_entropy", forward_only=True)])
    assert isinstance(result, PassOutput)
    np.testing.assert_allclose(answer["response_logprobs"][0], result.logprobs[0][len(prompt) - 1 :], atol=2e-4)


@pytest.mark.parametrize(
    "attn, mlp, unembed, targets",
    [
        (True, False, False, ["k_proj", "o_proj", "q_proj", "v_proj"]),
        (False, True, False, ["down_proj", "gate_proj", "up_proj"]),
        (False, False, True, ["lm_head"]),
    ],
)
def test_only_requested_modules_are_trained(
    attn: bool, mlp: bool, unembed: bool, targets: list[str], model_folder: Make, supervised: Supervised, tmp_path: Path
) -> None:
    lora = LoraSpec(rank=2, train_attn=attn, train_mlp=mlp, train_unembed=unembed)
    backend = new(model_folder("llama"), lora)
    train(backend, supervised([9]), 1)
    backend.save("m", tmp_path, state=False)
    assert sorted(json.loads((tmp_path / "adapter_config.json").read_text())["target_modules"]) == targets
    trained = {name.split(".")[-3] for name, b in load_file(tmp_path / "adapter_model.safetensors").items() if b.any()}
    assert trained == set(targets)


def damage(folder: Path, how: str) -> None:
    weights, optimizer = folder / "adapter_model.safetensors", folder / "optimizer.safetensors"
    tensors = load_file(weights)
    first = next(iter(tensors))
    if how == "no files":
        weights.unlink()
    elif how == "no optimizer":
        optimizer.unlink()
    elif how == "cut off":
        weights.write_bytes(weights.read_bytes()[:-10])
    elif how == "optimizer cut off":
        optimizer.write_bytes(optimizer.read_bytes()[:-10])
    elif how == "a layer less":
        save_file({name: tensor for name, tensor in tensors.items() if name != first}, weights)
    elif how == "a layer more":
        save_file(tensors | {"base_model.model.x.lora_A.weight": torch.ones(5, 5)}, weights)
    elif how == "another shape":
        save_file(tensors | {first: torch.ones(5, 5)}, weights)
    elif how == "not finite":
        save_file(tensors | {first: torch.full_like(tensors[first], torch.nan)}, weights)


@pytest.mark.parametrize(
    "how, says",
    [
        ("no files", "no adapter could be read"),
        ("no optimizer", "has no optimizer"),
        ("cut off", "no adapter could be read"),
        ("optimizer cut off", "damaged"),
        ("a layer less", "is missing in the checkpoint"),
        ("a layer more", "missing in the model"),
        ("another shape", r"\[5, 5\] in the checkpoint"),
        ("not finite", "not finite"),
    ],
)
def test_damaged_checkpoint_is_refused_and_model_unchanged(
    how: str, says: str, model_folder: Make, supervised: Supervised, tmp_path: Path
) -> None:
    saved = new(model_folder("llama"))
    train(saved, supervised([9]), 1)
    saved.save("m", tmp_path, state=True)
    damage(tmp_path, how)
    backend = new(model_folder("llama"))
    train(backend, supervised([4]), 1, half_a_step=True)
    before = state(backend)
    with pytest.raises(ModelError, match=says) as refused:
        backend.load("m", tmp_path, optimizer=True)
    assert str(tmp_path) not in str(refused.value), "clients need not know the server's folders"
    assert state(backend) == before


def test_checkpoint_of_other_rank_is_refused_naming_both(model_folder: Make, tmp_path: Path) -> None:
    new(model_folder("llama"), LoraSpec(rank=3)).save("m", tmp_path, state=False)
    with pytest.raises(ModelError, match=r"rank 3 .* rank 5"):
        new(model_folder("llama")).load("m", tmp_path, optimizer=False)


def test_new_adapter_is_determined_by_seed_and_layer_and_is_identity(
    model_folder: Make, supervised: Supervised
) -> None:
    a, same, other = (new(model_folder("llama"), LoraSpec(rank=4, seed=seed)) for seed in (7, 7, 8))
    assert state(a) == state(same) != state(other)
    part = new(model_folder("llama"), LoraSpec(rank=4, seed=7, train_attn=False))
    whole = a.adapters["m"].group_by_site(a.adapters["m"].weights)
    for site, matrices in part.adapters["m"].group_by_site(part.adapters["m"].weights).items():
        assert torch.equal(matrices.a, whole[site].a) and not bool(matrices.b.any())
        assert 0.9 < float(matrices.a.abs().max()) * matrices.a.shape[1] ** 0.5 <= 1
    outputs = [each.run([TrainingPass("m", supervised([9]), "cross_entropy")])[0] for each in (a, other)]
    assert isinstance(outputs[0], PassOutput) and isinstance(outputs[1], PassOutput)
    assert (outputs[0].logprobs[0] == outputs[1].logprobs[0]).all()

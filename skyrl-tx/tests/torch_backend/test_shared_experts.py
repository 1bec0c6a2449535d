"""Adapters with one matrix for all experts of a layer: counted, trained, saved, loaded and sampled from."""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from skyrl_train.inference_engines.base import InferenceEngineInput
from skyrl_train.inference_engines.native.engine import NativeInferenceEngine
from skyrl_train.inference_engines.native.lora_loading import read_lora
from skyrl_train.weight_sync.base import LoraLoadRequest
from tx.errors import ModelError
from tx.tinker.backends.torch import files
from tx.tinker.backends.torch.adapters import Adapter, Site
from tx.tinker.backends.torch.training import TorchTraining
from tx.tinker.types import AdamParams, Datum, LoraSpec, PassOutput, TrainingPass

Make = Callable[[str], Path]
Supervised = Callable[..., list[Datum]]

LORA = LoraSpec(rank=4, seed=3, share_experts=True)
ADAM = AdamParams(learning_rate=0.02)
EXPERT = re.compile(r"\.experts\.\d+\.(\w+_proj\.lora_[AB])")
SHARED = {"gate_proj.lora_A", "up_proj.lora_A", "down_proj.lora_B"}


def run(backend: TorchTraining, data: list[Datum], *, forward_only: bool = False) -> PassOutput:
    (result,) = backend.run([TrainingPass("m", data, "cross_entropy", forward_only=forward_only)])
    assert isinstance(result, PassOutput), result
    return result


def trained(folder: Path, data: list[Datum], lora: LoraSpec = LORA, dtype: str = "float32") -> TorchTraining:
    backend = TorchTraining(folder, dtype=dtype)
    backend.create("m", lora)
    for _ in range(2):
        run(backend, data)
        backend.optim_step("m", ADAM)
    return backend


def test_shared_experts_reduce_qwen3_30b_a3b_to_hosted_service_count() -> None:
    """The service counts, for each unit of rank, the width of the model once and that of each expert for each of the
    three projections (`get_lora_param_count` of tinker-cookbook)."""
    width, of_expert, experts = 2048, 768, 128
    sizes = {"gate_proj": (width, of_expert), "up_proj": (width, of_expert), "down_proj": (of_expert, width)}
    sites = [Site(f"model.layers.0.mlp.experts.{name}", "mlp", *each, experts) for name, each in sizes.items()]
    meta = torch.device("meta")
    whole, shared = (
        Adapter(LoraSpec(rank=1), each, meta, torch.float32).num_weights
        for each in (sites, [site.to_shared_experts() for site in sites])
    )
    assert shared == 3 * (width + experts * of_expert)
    assert whole / shared == pytest.approx(3.6, abs=0.01)


def test_shared_matrix_gradient_is_sum_over_experts(model_folder: Make, supervised: Supervised, tmp_path: Path) -> None:
    """An adapter with a copy for each expert is loaded from the files of one that shares."""
    data = supervised([9, 33, 2, 40])
    ours = trained(model_folder("qwen3_moe"), data)
    ours.save("m", tmp_path, state=False)
    copies = TorchTraining(model_folder("qwen3_moe"))
    copies.create("m", LoraSpec(rank=4, seed=8))
    files.read_into(copies.adapters["m"], tmp_path, optimizer=False)  # a load would take the layout too
    for a, b in zip(run(ours, data).logprobs, run(copies, data).logprobs, strict=True):
        assert np.array_equal(a, b)
    found, expected = (
        adapter.group_by_site(adapter.gradient)
        for adapter in (each.adapters["m"] for each in (ours, copies))
        if adapter.gradient is not None
    )
    for name, theirs in expected.items():
        a, b = found[name]
        if a.dim() != theirs.a.dim():
            torch.testing.assert_close(a, theirs.a.sum(dim=0), rtol=1e-4, atol=1e-4)
        elif b.dim() != theirs.b.dim():
            torch.testing.assert_close(b, theirs.b.sum(dim=0), rtol=1e-4, atol=1e-4)
        else:
            assert torch.equal(a, theirs.a) and torch.equal(b, theirs.b)
    down = "model.layers.0.mlp.experts.down_proj"
    assert (found[down].b.dim(), expected[down].b.dim()) == (2, 3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_shared_expert_state_resumes_exactly_and_files_hold_expert_copies(
    dtype: str, model_folder: Make, supervised: Supervised, tmp_path: Path
) -> None:
    data = supervised([9, 33])
    first = trained(model_folder("qwen3_moe"), data, dtype=dtype)
    run(first, data)
    first.save("m", tmp_path, state=True)
    groups: dict[str, list[torch.Tensor]] = {}
    for name, tensor in load_file(tmp_path / "adapter_model.safetensors").items():
        if matched := EXPERT.search(name):
            groups.setdefault(matched[1], []).append(tensor)
    assert all(len(tensors) == 6 for tensors in groups.values())
    same = {name for name, tensors in groups.items() if all(torch.equal(each, tensors[0]) for each in tensors)}
    assert same == SHARED and len(groups) == 6
    second = TorchTraining(model_folder("qwen3_moe"), dtype=dtype)
    second.restore("m", LORA, tmp_path)
    for each in (first, second):
        each.optim_step("m", ADAM)
        run(each, data)
        each.optim_step("m", ADAM)
    a, b = (each.adapters["m"].vectors(state=True) for each in (first, second))
    assert a.keys() == b.keys() and all(torch.equal(a[kind], b[kind]) for kind in a)


def test_checkpoint_with_contradicting_optimizer_is_refused(
    model_folder: Make, supervised: Supervised, tmp_path: Path
) -> None:
    folder, data = model_folder("qwen3_moe"), supervised([20])
    for name, share in (("shared", True), ("whole", False)):
        (tmp_path / name).mkdir()
        lora = LoraSpec(rank=4, seed=1, share_experts=share)
        trained(folder, data, lora).save("m", tmp_path / name, state=True)
    (tmp_path / "shared" / files.STATE_FILE).replace(tmp_path / "whole" / files.STATE_FILE)
    model = trained(folder, data)
    before = model.adapters["m"].weights.clone()
    with pytest.raises(ModelError, match="other experts differ"):
        model.load("m", tmp_path / "whole", optimizer=False)
    assert torch.equal(model.adapters["m"].weights, before)


@pytest.mark.first_case
@pytest.mark.parametrize("state", [True, False], ids=["with optimizer", "weights alone"])
@pytest.mark.parametrize("share", [True, False], ids=["shared", "whole"])
def test_model_adopts_checkpoint_layout_and_keeps_it_in_snapshots(
    share: bool, state: bool, model_folder: Make, supervised: Supervised, tmp_path: Path
) -> None:
    folder, data = model_folder("qwen3_moe"), supervised([20])
    for name in ("checkpoint", "snapshot"):
        (tmp_path / name).mkdir()
    first = trained(folder, data, LoraSpec(rank=4, seed=1, share_experts=share))
    first.save("m", tmp_path / "checkpoint", state=state)
    created = LoraSpec(rank=4, seed=2, share_experts=not share)
    second, third = trained(folder, data, created), TorchTraining(folder)
    second.load("m", tmp_path / "checkpoint", optimizer=state)
    second.save("m", tmp_path / "snapshot", state=True)
    third.restore("m", created, tmp_path / "snapshot")
    if not state:
        first.load("m", tmp_path / "checkpoint", optimizer=False)  # a new optimizer, as the others have
    for each in (first, second, third):
        assert each.adapters["m"].lora.share_experts == share
        run(each, data)
        each.optim_step("m", ADAM)
    a, b, c = (each.adapters["m"].weights for each in (first, second, third))
    assert torch.equal(a, b) and torch.equal(a, c)


async def test_native_engine_samples_shared_experts_with_training_logprobs(
    model_folder: Make, supervised: Supervised, tmp_path: Path
) -> None:
    backend = trained(model_folder("qwen3_moe"), supervised([9, 30]))
    backend.save("m", tmp_path, state=False)
    layers = read_lora(str(tmp_path), AutoModelForCausalLM.from_pretrained(model_folder("qwen3_moe")), max_rank=8)
    assert layers["model.layers.0.mlp.experts.down_proj"].b.unique(dim=0).shape[0] == 1
    engine = NativeInferenceEngine(str(model_folder("qwen3_moe")))
    try:
        await engine.load_lora(LoraLoadRequest(name="m", path=str(tmp_path), version=1))
        params, prompt = {"max_tokens": 20, "ignore_eos": True, "seed": 3}, [5, 9, 12]
        request = InferenceEngineInput(prompt_token_ids=[prompt], sampling_params=params, lora_name="m")
        answer = await engine.generate_batch(request)
    finally:
        await engine.teardown()
    response = answer["response_ids"][0]
    tokens = np.array([*prompt, *response])
    (log_probs,) = run(backend, [Datum(tokens[:-1], {"target_tokens": tokens[1:]})], forward_only=True).logprobs
    given = (answer["response_logprobs"] or [])[0]
    np.testing.assert_allclose(given, log_probs[len(prompt) - 1 :], rtol=1e-4, atol=1e-4)

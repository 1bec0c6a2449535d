"""An adapter is what peft takes it for: the same log-probs, the same gradients, from the folder that was saved."""

import warnings

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tx.tinker.backends.torch.files import _build_named_matrices
from tx.tinker.backends.torch.training import TorchTraining
from tx.tinker.types import AdamParams, LoraSpec, PassOutput, TrainingPass

LORA = LoraSpec(rank=5, seed=3)
ARCHITECTURES = ["llama", "qwen2", "qwen3", "qwen3_moe", "phi3", "sliding"]


def run(backend, model_id, data, loss="cross_entropy", **options):
    (result,) = backend.run([TrainingPass(model_id, data, loss, **options)])
    if not isinstance(result, PassOutput):
        raise result.error
    return result


def trained(folder, data, lora=LORA, steps=3, **settings):
    """A backend with a model "m" whose B is not zero any more."""
    backend = TorchTraining(folder, **settings)
    backend.create("m", lora)
    for _ in range(steps):
        run(backend, "m", data)
        backend.optim_step("m", AdamParams(learning_rate=0.02))
    return backend


def in_peft(folder, adapter, dtype=torch.float32):
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    if any(hasattr(module, "_is_expert_parallel") for module in base.modules()):
        base.set_experts_implementation("eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it speaks of tied embeddings, which our adapters leave alone
        return PeftModel.from_pretrained(base, adapter, is_trainable=True)


def of_experts(name, gradient, num_experts):
    """Each expert's part of what peft has for all, under the name that it has in files; gate and up are one to peft,
    their B the blocks of a matrix."""
    layer, kind = name.removesuffix(".default.weight").rsplit(".lora_", 1)
    if not layer.removesuffix(".base_layer").endswith(".experts"):
        yield name, gradient
        return
    projections = ["gate_proj", "up_proj"] if layer.endswith(".base_layer") else ["down_proj"]
    layer = layer.removesuffix(".base_layer")
    if kind == "A":
        stacked = gradient.unflatten(0, (num_experts, len(projections), -1))  # [E, 2, r, in]
    else:
        num = len(projections)
        blocks = gradient.unflatten(0, (num, -1)).unflatten(2, (num, -1, num_experts))  # [2, out, 2, r, E]
        stacked = torch.stack([blocks[i, :, i].permute(2, 0, 1) for i in range(num)], dim=1)  # [E, 2, out, r]
    for expert in range(num_experts):
        for i, projection in enumerate(projections):
            yield f"{layer}.{expert}.{projection}.lora_{kind}.default.weight", stacked[expert, i]


def log_probs_in(model, datum):
    logits = model(input_ids=torch.tensor(datum.tokens)[None]).logits[0].float()
    return logits.log_softmax(-1).gather(1, torch.tensor(datum.inputs["target_tokens"])[:, None])[:, 0]


@pytest.mark.first_case
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_peft_loads_saved_adapter_with_same_logprobs_and_gradients(name, model_folder, supervised, tmp_path):
    data = supervised([9, 1, 33, 2, 40])
    backend = trained(model_folder(name), data)
    backend.save("m", tmp_path, state=False)
    peft = in_peft(model_folder(name), tmp_path)
    expected = [log_probs_in(peft, datum) for datum in data]
    result = run(backend, "m", data)
    for ours, theirs in zip(result.logprobs, expected, strict=True):
        torch.testing.assert_close(torch.from_numpy(ours), theirs.detach(), rtol=1e-4, atol=2e-4)

    loss = -sum((torch.tensor(d.inputs["weights"]) * lp).sum() for d, lp in zip(data, expected, strict=True))
    assert result.metrics["loss:sum"] == pytest.approx(loss.item(), rel=1e-4, abs=1e-3)
    loss.backward()
    adapter = backend.adapters["m"]
    ours = {
        name.replace("weight", "default.weight"): x
        for name, x in _build_named_matrices(adapter, adapter.gradient).items()
    }
    theirs = {name: p.grad for name, p in peft.named_parameters() if p.requires_grad}
    theirs = {name: x for each in theirs.items() for name, x in of_experts(*each, num_experts=6)}
    assert set(ours) == set(theirs)
    for key, gradient in theirs.items():
        scale = gradient.abs().max().item()
        torch.testing.assert_close(ours[key], gradient, rtol=1e-3, atol=1e-3 * scale + 1e-6)

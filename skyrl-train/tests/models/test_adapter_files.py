"""Adapters that leave as folders: whole or absent, in the engines' dtype, and read by whoever reads peft's."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from skyrl_train.config import LoRAConfig
from skyrl_train.errors import ConfigError
from skyrl_train.inference_engines.base import InferenceEngineInput
from skyrl_train.inference_engines.native.engine import NativeInferenceEngine
from skyrl_train.inference_engines.native.lora_loading import read_lora
from skyrl_train.models.adapter_files import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    gather_adapter_tensors,
    read_adapter,
    save_adapter,
    write_adapter_version,
)
from skyrl_train.models.causal_lm import load_causal_lm
from skyrl_train.models.lora import add_adapters, find_adapters
from skyrl_train.weight_sync.base import LoraLoadRequest
from skyrl_train.weight_sync.fingerprint import differences, fingerprints_of

CPU = torch.device("cpu")


def adapted(path: str, **config) -> PreTrainedModel:
    """A model whose adapters are far from where they began: as after training."""
    torch.manual_seed(1)
    model = load_causal_lm(path, device=CPU)
    add_adapters(model, LoRAConfig(**{"rank": 4, "alpha": 8, **config}))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for adapter in find_adapters(model):
            for matrix in adapter.matrices.values():
                matrix.add_(torch.randn(matrix.shape, generator=generator) * 0.1)
    return model


def test_returned_tensors_equal_file_in_engine_dtype(tiny_model, tmp_path):
    model = adapted(tiny_model)
    written = write_adapter_version(model, tmp_path, 1, torch.bfloat16, rank=0)
    file = load_file(tmp_path / "1" / WEIGHTS_FILE)
    assert {tensor.dtype for tensor in file.values()} == {torch.bfloat16}
    assert file.keys() == written.keys() == dict(gather_adapter_tensors(model, torch.bfloat16)).keys()
    assert all(torch.equal(file[name], tensor) for name, tensor in written.items())
    name = "base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"
    up_proj = next(adapter for adapter in find_adapters(model) if adapter.layer == "model.layers.1.mlp.up_proj")
    assert torch.equal(file[name], up_proj.b.detach().bfloat16())


def test_exported_tensors_are_not_views_of_trained_weights(tiny_model, tmp_path):
    model = adapted(tiny_model)
    written = write_adapter_version(model, tmp_path, 1, torch.float32, rank=0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert all(tensor.abs().max() > 0 for tensor in written.values())


def test_last_two_versions_are_kept(tiny_model, tmp_path):
    """Also where the numbers have more digits: 10 comes after 9. What is no version is left alone."""
    model = adapted(tiny_model)
    (tmp_path / "notes").mkdir()
    for version in (8, 9, 10, 11):
        write_adapter_version(model, tmp_path, version, torch.float32, rank=0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["10", "11", "notes"]
    files = sorted(path.name for path in (tmp_path / "11").iterdir())
    assert files == [CONFIG_FILE, WEIGHTS_FILE]


def test_crashed_writer_leaves_previous_adapter_or_none(tiny_model, tmp_path, monkeypatch):
    model = adapted(tiny_model)
    fsync = os.fsync

    def full_disk(descriptor):
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="no space left"):
        write_adapter_version(model, tmp_path, 1, torch.float32, rank=0)
    with pytest.raises(ValueError, match="no adapter could be read from"):
        read_adapter(tmp_path / "1")
    monkeypatch.setattr(os, "fsync", fsync)
    write_adapter_version(model, tmp_path, 1, torch.float32, rank=0)
    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="no space left"):
        write_adapter_version(model, tmp_path, 1, torch.float32, rank=0)
    assert len(read_adapter(tmp_path / "1").tensors) == 28


@pytest.mark.parametrize("init_method", ["pissa", "pissa_niter_4", "olora"])
def test_adapters_with_weight_modifying_init_are_rejected(tiny_model, tmp_path, init_method):
    model = adapted(tiny_model, init_method=init_method)
    with pytest.raises(ConfigError, match=f"init_method='{init_method}'"):
        write_adapter_version(model, tmp_path, 1, torch.float32, rank=0)


@pytest.mark.parametrize("init_method", ["kaiming", "gaussian", "orthogonal"])
def test_native_engine_loads_written_adapter(tiny_model, tmp_path, init_method):
    """The layer of every adapter, alpha / rank = 2."""
    model = adapted(tiny_model, init_method=init_method)
    write_adapter_version(model, tmp_path, 1, torch.float32, rank=0)
    base = AutoModelForCausalLM.from_pretrained(tiny_model)
    layers = read_lora(str(tmp_path / "1"), base, max_rank=4)
    assert set(layers) == {adapter.layer for adapter in find_adapters(model)}
    for adapter in find_adapters(model):
        assert layers[adapter.layer].scaling == 2.0
        assert torch.equal(layers[adapter.layer].a, adapter.a)
        assert torch.equal(layers[adapter.layer].b, adapter.b)


async def test_engine_matches_policy_after_verified_adapter_sync(chat_model, tmp_path):
    """A sync of adapters alone: written, loaded, fingerprints compared; then log-probs are the policy's."""
    model = adapted(chat_model)
    written = write_adapter_version(model, tmp_path, 7, torch.float32, rank=0)
    engine = NativeInferenceEngine(chat_model, max_lora_rank=4)
    try:
        report = await engine.load_lora(LoraLoadRequest(name="policy", path=str(tmp_path / "7"), version=7))
        answer = await engine.generate_batch(
            InferenceEngineInput(
                prompt_token_ids=[[5, 9, 12, 30]], sampling_params={"max_tokens": 12}, lora_name="policy"
            )
        )
    finally:
        await engine.teardown()
    assert differences(fingerprints_of(written.items(), 7, "sampled"), report.fingerprints) == ""
    assert set(answer["weight_versions"][0]) == {7}
    [ids], log_probs = answer["response_ids"], answer["response_logprobs"]
    assert log_probs is not None
    with torch.no_grad():
        expected = model(torch.tensor([[5, 9, 12, 30, *ids]])).logits[0, 3:-1].log_softmax(-1)
    torch.testing.assert_close(
        torch.tensor(log_probs[0]), expected.gather(1, torch.tensor(ids)[:, None])[:, 0], atol=1e-5, rtol=0
    )


def test_checkpoint_adapter_names_base_model_and_is_float32(tiny_model, tmp_path):
    save_adapter(adapted(tiny_model), tmp_path / "adapter", "some/model")
    assert json.loads((tmp_path / "adapter" / CONFIG_FILE).read_text())["base_model_name_or_path"] == "some/model"
    tensors = load_file(tmp_path / "adapter" / WEIGHTS_FILE).values()
    assert {tensor.dtype for tensor in tensors} == {torch.float32}

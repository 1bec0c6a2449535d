"""Settings, models and layers that are taken or refused, and how a request is cut."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GptOssConfig, MambaConfig, MixtralConfig, T5Config

from skyrl_train.errors import ConfigError
from tx.errors import ModelError
from tx.tinker.backends.torch.layout import build_layout, compute_padded_length
from tx.tinker.backends.torch.settings import TrainingSettings
from tx.tinker.backends.torch.training import TorchTraining
from tx.tinker.types import AdamParams, Datum, LoraSpec, PassOutput, TrainingPass

Make = Callable[[str], Path]
Supervised = Callable[..., list[Datum]]


@pytest.mark.parametrize(
    "settings, says",
    [
        ({"tokens_per_microbatch": 5}, "tokens_per_micro_batch"),
        ({"xyz": 5}, "backend_config.xyz"),
        ({"dtype": "float16"}, "dtype must be one of"),
        ({"device": "gpu"}, "device must be"),
        ({"device": "cuda:77"}, "this machine has"),
        ({"max_lora_rank": 0}, "must be 1 or greater; got 0"),
        ({"chunk_size": 100}, "multiple of 32"),
        ({"gradient_checkpointing": 1}, "gradient_checkpointing"),
        ({"num_processes": 0}, "must be 1 or greater"),
        ({"num_processes": True}, "must be .*; got True"),
        ({"process_timeout_seconds": -1}, "process_timeout_seconds"),
    ],
)
def test_wrong_settings_are_refused_by_name(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        TrainingSettings.from_dict(settings)


@pytest.mark.parametrize(
    "lora, says",
    [
        (LoraSpec(rank=0), "from 1 to 128"),
        (LoraSpec(rank=129), "from 1 to 128"),
        (LoraSpec(train_attn=False, train_mlp=False, train_unembed=False), "nothing to train"),
    ],
)
def test_impossible_adapters_are_refused(lora: LoraSpec, says: str, model_folder: Make) -> None:
    with pytest.raises(ModelError, match=says):
        TorchTraining(model_folder("llama")).create("m", lora)


def test_experts_named_differently_in_files_have_no_adapters(tmp_path: Path) -> None:
    """Such weights would be unreadable."""
    shape = dict(vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_local_experts=2)
    config = MixtralConfig(**shape, num_attention_heads=2, num_key_value_heads=1, head_dim=8)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    backend = TorchTraining(tmp_path)
    backend.create("m", LoraSpec())
    with pytest.raises(ModelError, match="train_mlp"):
        backend.create("n", LoraSpec(train_attn=False, train_unembed=False))


def test_unsupported_models_are_refused(tmp_path: Path) -> None:
    GptOssConfig(quantization_config={"quant_method": "mxfp4"}).save_pretrained(tmp_path / "quantized")
    with pytest.raises(ConfigError, match="mxfp4"):
        TorchTraining(tmp_path / "quantized")
    MambaConfig(hidden_size=16, num_hidden_layers=1, vocab_size=50).save_pretrained(tmp_path / "mamba")
    AutoModelForCausalLM.from_config(MambaConfig.from_pretrained(tmp_path / "mamba")).save_pretrained(
        tmp_path / "mamba"
    )
    with pytest.raises(ConfigError, match="cannot be trained here"):
        TorchTraining(tmp_path / "mamba")
    T5Config().save_pretrained(tmp_path / "encoder")
    with pytest.raises(ConfigError, match="encoder"):
        TorchTraining(tmp_path / "encoder")


def test_gpt2_is_trained_too(model_folder: Make, supervised: Supervised) -> None:
    """Layers that keep their weights transposed, q, k and v in one, positions learnt."""
    backend = TorchTraining(model_folder("gpt2"))
    backend.create("m", LoraSpec(rank=4))
    losses = []
    for _ in range(3):
        (result,) = backend.run([TrainingPass("m", [_plain(d) for d in supervised([20, 30])], "cross_entropy")])
        assert isinstance(result, PassOutput)
        losses.append(result.metrics["loss:sum"])
        backend.optim_step("m", AdamParams(learning_rate=0.01))
    assert losses[0] > losses[1] > losses[2]


def test_bfloat16_computes_nearly_same(model_folder: Make, supervised: Supervised) -> None:
    data, results = [_plain(d) for d in supervised([20, 30])], []
    for dtype in ("float32", "bfloat16"):
        backend = TorchTraining(model_folder("llama"), dtype=dtype)
        backend.create("m", LoraSpec(rank=4))
        (result,) = backend.run([TrainingPass("m", data, "cross_entropy")])
        assert isinstance(result, PassOutput)
        results.append((result.metrics["loss:sum"], backend.optim_step("m", AdamParams())["grad_norm:mean"]))
        assert backend.adapters["m"].weights.dtype == torch.float32
    assert results[1] == pytest.approx(results[0], rel=0.1)


def _plain(datum: Datum) -> Datum:
    return Datum(datum.tokens, {"target_tokens": datum.inputs["target_tokens"]})


def test_requests_are_cut_by_length_alone(model_folder: Make, supervised: Supervised) -> None:
    backend = TorchTraining(model_folder("llama"), tokens_per_micro_batch=10)
    data = supervised([3, 3, 4, 1, 25, 2, 9])
    batches = backend.micro_batches(data)
    assert [[len(datum.tokens) for datum in batch] for batch in batches] == [[3, 3, 4], [1], [25], [2], [9]]
    assert list(itertools.chain(*batches)) == data


def test_padding_depends_on_datum_length_and_is_small() -> None:
    for length in range(1, 5000):
        padded = compute_padded_length(length)
        assert padded >= length and padded % 32 == 0 and padded - length < max(32, length / 8 + 1)


def test_models_start_at_block_boundary_and_tokens_map_back() -> None:
    draw = np.random.default_rng(0)
    data = [[Datum(draw.integers(9, size=n), {}) for n in lengths] for lengths in ([1], [33, 2, 64], [32], [100, 7])]
    layout = build_layout(data, torch.device("cpu"))
    assert all(segment.start % 32 == segment.end % 32 == 0 for segment in layout.segments)
    tokens = layout.input_ids[0].float()[:, None, None].requires_grad_()
    there = layout.rows.to_slots(tokens)
    back = layout.rows.to_tokens(there)
    for each, segment in zip(data, layout.segments, strict=True):
        own = np.concatenate([datum.tokens for datum in each])
        assert back[segment.start : segment.start + segment.num_tokens, 0, 0].tolist() == own.tolist()
    back.sum().backward()
    assert tokens.grad is not None
    real = torch.cat([torch.arange(segment.start, segment.start + segment.num_tokens) for segment in layout.segments])
    assert tokens.grad[real].eq(1).all() and tokens.grad.sum() == len(real)


@pytest.mark.parametrize("name", ["qwen2", "qwen3_moe", "gpt2"])
def test_base_model_weights_keep_transformers_names_and_values(name: str, model_folder: Make) -> None:
    ours = TorchTraining(model_folder(name)).base_model.state_dict()
    theirs = AutoModelForCausalLM.from_pretrained(model_folder(name)).state_dict()
    assert list(ours) == list(theirs) and all(torch.equal(ours[key], theirs[key]) for key in theirs)

"""Models divided by megatron-core train as one rank of FSDP2 does, whatever the layout."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from skyrl_train.algorithms.losses import PolicyLossRegistry
from skyrl_train.config.training_backends import TrainingBackendRegistry
from skyrl_train.training_backends.base import RankInfo
from skyrl_train.training_batch import MicroBatch
from skyrl_train.workers.objectives.policy import PolicyObjective
from skyrl_train.workers.policy_worker import PolicyWorker
from skyrl_train_testing.backend_checks import (
    NUM_STEPS,
    check_training_backend,
    make_backend_batch,
    make_settings,
    run_step,
)
from skyrl_train_testing.backend_layouts import FLOAT32, BackendRanks, Layout, check_layout, run_steps_with_moves
from skyrl_train_testing.tiny_models import build_tiny_qwen3


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, save_mixture: Callable[..., str]) -> dict[str, str]:
    """Tiny models, whose number of words no layout divides."""
    folder = tmp_path_factory.mktemp("megatron")
    # Larger weights make the third step depend on the rounding of the first.
    shape: dict[str, Any] = dict(hidden_size=32, scale=2.0, vocab_size=67, max_position_embeddings=128)
    build_tiny_qwen3(**shape).save_pretrained(folder / "dense")
    build_tiny_qwen3(**shape, tie_word_embeddings=False).save_pretrained(folder / "untied")
    build_tiny_qwen3(**shape, num_hidden_layers=3).save_pretrained(folder / "three layers")
    for name, model in (("llama", tiny_llama()), ("qwen2", tiny_qwen2())):
        model.save_pretrained(folder / name)
    heads = dict(num_key_value_heads=2, num_attention_heads=4, vocab_size=67)
    save_mixture(folder / "mixture", scale=2.0, norm_topk_prob=True, **heads)
    save_mixture(folder / "half mixture", scale=2.0, mlp_only_layers=[0], **heads)
    names = ("dense", "untied", "three layers", "llama", "qwen2", "mixture", "half mixture")
    return {name: str(folder / name) for name in names}


SIZES: dict[str, Any] = dict(
    vocab_size=67,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
)


def tiny_llama() -> LlamaForCausalLM:
    """A Llama whose rotary embedding is scaled as that of Llama 3.1."""
    scaling = {"rope_type": "llama3", "rope_theta": 100.0, "factor": 8.0, "low_freq_factor": 1.0}
    scaling |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8}
    return randomly(LlamaForCausalLM, LlamaConfig(**SIZES, rope_parameters=scaling))


def tiny_qwen2() -> Qwen2ForCausalLM:
    """A Qwen2 with biases that are not zero."""
    return randomly(Qwen2ForCausalLM, Qwen2Config(**SIZES, tie_word_embeddings=True))


def randomly(kind: Any, config: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = kind(config)
        for parameter in model.parameters():
            parameter.data.add_(0.1 * torch.randn_like(parameter))
    return model


def layout(num_ranks: int, *, recompute: bool = False, model: Any = "policy", **megatron: Any) -> Layout:
    settings = {"strategy": "megatron", "gradient_checkpointing": recompute, model: {"megatron_config": megatron}}
    return Layout(num_ranks, settings, model=model)


TENSOR: dict[str, Any] = {"tensor_model_parallel_size": 2}
STAGES: dict[str, Any] = {"pipeline_model_parallel_size": 2}
EXPERTS: dict[str, Any] = {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}


def test_single_rank_passes_invariance_checks(tiny_model: str):
    check_training_backend(TrainingBackendRegistry.get("megatron"), tiny_model, settings={"strategy": "megatron"})


@pytest.mark.slow
@pytest.mark.process
def test_two_ranks_match_single_fsdp2_rank(models: dict[str, str], ranks: BackendRanks):
    check_layout(ranks, models["dense"], layout(2, **TENSOR))


LAYOUTS = [  # slow: each kind of division once; what the model's family or a combination adds is full
    ("dense", layout(2)),
    ("dense", layout(4, **TENSOR, **STAGES)),
    ("mixture", layout(2, **TENSOR, **EXPERTS)),
]
OTHER_LAYOUTS = [
    ("untied", layout(2, model="critic", recompute=True)),
    ("half mixture", layout(2, **STAGES)),
    ("dense", layout(2, **STAGES)),
    ("dense", layout(2, **TENSOR, recompute=True)),
    (
        "dense",
        layout(
            2,
            **STAGES,
            recompute=True,
            transformer_config_kwargs={
                "recompute_granularity": "selective",
                "recompute_method": None,
                "recompute_num_layers": None,
            },
        ),
    ),
    (
        "three layers",
        layout(2, **STAGES, transformer_config_kwargs={"num_layers_in_first_pipeline_stage": 1}),
    ),
    ("untied", layout(2, **STAGES)),
    ("llama", layout(2, **STAGES)),
    ("qwen2", layout(2, **TENSOR)),
    ("untied", layout(4, **TENSOR)),
    ("mixture", layout(2)),
    ("mixture", layout(2, **TENSOR)),
    ("mixture", layout(2, **EXPERTS)),
    ("mixture", layout(4, **STAGES, **EXPERTS)),
    ("mixture", layout(4, **TENSOR, **EXPERTS)),
    ("dense", layout(4, **TENSOR, **STAGES, model="critic")),
    ("mixture", layout(2, **TENSOR, **EXPERTS, model="critic")),
    ("dense", layout(4, **TENSOR, **STAGES, model="ref")),
]


@pytest.mark.parametrize(
    ("model", "division"),
    [
        *(pytest.param(*each, id=str(each), marks=pytest.mark.slow) for each in LAYOUTS),
        *(pytest.param(*each, id=str(each), marks=pytest.mark.full) for each in OTHER_LAYOUTS),
    ],
)
def test_layout_matches_single_fsdp2_rank(model: str, division: Layout, models: dict[str, str], ranks: BackendRanks):
    # Values are no log-probs: terms of their sum cancel, and at the third step the rounding of the first shows in it.
    tolerance = replace(FLOAT32, scores=3e-5) if division.model == "critic" else FLOAT32
    check_layout(ranks, models[model], division, tolerance=tolerance)


@pytest.mark.usefixtures("group_of_one")
def test_expert_load_matches_fsdp2(models: dict[str, str]):
    counted = []
    for strategy in ("fsdp2", "megatron"):
        cfg = make_settings(models["half mixture"], {"strategy": strategy, "gradient_checkpointing": True})
        backend = TrainingBackendRegistry.get(strategy)(cfg, "policy", NUM_STEPS)
        backend.join(RankInfo())
        backend.load_model()
        parts = [MicroBatch((0, 1, 2)), MicroBatch((3, 4, 5, 6)), MicroBatch((0,), is_dummy=True)]
        objective = PolicyObjective(cfg.trainer.algorithm, PolicyLossRegistry.get("regular"))
        counted.append(backend.forward_backward(make_backend_batch(), parts, objective).router)
    expected, found = counted
    assert found.num_tokens == expected.num_tokens and torch.equal(found.counts, expected.counts)
    torch.testing.assert_close(found.probability_sums, expected.probability_sums)


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("name", ["llama", "qwen2", "untied", "half mixture"])
def test_model_of_each_family_is_certified(name: str, models: dict[str, str], caplog: pytest.LogCaptureFixture):
    backend = TrainingBackendRegistry.get("megatron")(
        make_settings(models[name], {"strategy": "megatron"}), "ref", None
    )
    backend.join(RankInfo())
    with caplog.at_level("INFO"):
        backend.load_model()
    [line] = [record.message for record in caplog.records if record.message.startswith("Certificate of")]
    number = len(list(backend.transformer.parameters()))
    assert f"{number} weights bit-equal after the round trip, log-probs within" in line


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("bf16", [False, True])
def test_export_contains_float32_weights(bf16: bool, chat_model: str, tmp_path: Path):
    """The optimizer steps float32 weights, also where the model computes with their bfloat16 values."""
    cfg = make_settings(chat_model, {"strategy": "megatron", "bf16": bf16})
    worker = PolicyWorker(cfg, PolicyLossRegistry.get("regular"), NUM_STEPS)
    worker.init_model(RankInfo())
    outcome = run_step(worker.backend, make_backend_batch())
    worker.save_hf_model(str(tmp_path / "export"), AutoTokenizer.from_pretrained(chat_model))
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float32)
    for name, weight in exported.named_parameters():
        assert torch.equal(weight, outcome.weights[name]), name
    assert not torch.equal(exported.model.norm.weight, exported.model.norm.weight.bfloat16())


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("bf16", [False, True])
def test_offloaded_state_is_restored_bit_exact(bf16: bool, tiny_model: str):
    cfg = make_settings(tiny_model, {"strategy": "megatron", "bf16": bf16})
    backend = TrainingBackendRegistry.get("megatron")(cfg, "policy", NUM_STEPS)
    backend.join(RankInfo())
    with patch.object(type(backend), "frees_device", True):
        backend.load_model()
        run_step(backend, make_backend_batch())
        backend.offload()
        buffers = backend.optimizer.model.buffers
        assert {data.untyped_storage().size() for b in buffers for data in (b.param_data, b.grad_data)} == {0}
        backend.onload()
    stayed, *others = run_steps_with_moves(backend, Layout(1))
    assert all(torch.equal(moved[name], weight) for moved in others for name, weight in stayed.items())

"""Rows for `trainer.{policy,critic,ref}.megatron_config`. Divisions over several ranks train in
`tests/training_backends/test_megatron.py`; here one rank shows that it would refuse them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from effects import Bench, OneChoice, Row, See, Settings, refusal
from rows_trainer import CRITIC, KL
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from skyrl_train.config.training_backends import TrainingBackendRegistry
from skyrl_train.training_backends.base import RankInfo

MEGATRON = {"trainer.strategy": "megatron"}


def loaded(name: Any, see: Callable[[Any], Any]) -> See:
    """A property of a model on one rank of this process."""

    def seen(bench: Bench, settings: Settings) -> Any:
        make = TrainingBackendRegistry.get("megatron")
        backend = make(bench.config(settings), name, None if name == "ref" else 1)
        backend.join(RankInfo())
        backend.load_model()
        return see(backend)

    return seen


def with_mixture(see: See) -> See:
    """The same of a mixture of experts."""

    def seen(bench: Bench, settings: Settings) -> Any:
        path = bench.folder / "mixture"
        if not path.exists():
            sizes: dict[str, Any] = dict(vocab_size=64, hidden_size=16, intermediate_size=32, moe_intermediate_size=8)
            sizes |= dict(num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, num_experts=2)
            config = Qwen3MoeConfig(**sizes, num_experts_per_tok=1, head_dim=8)
            Qwen3MoeForCausalLM(config).save_pretrained(path)
        return see(bench, {**settings, "trainer.policy.model.path": str(path), "trainer.critic.model.path": str(path)})

    return seen


def averages_in_collective(backend: Any) -> bool:
    """(A device that only this function believes in: gloo has no averages.)"""
    from skyrl_train.training_backends.megatron.optimizer import build_ddp_config

    return build_ddp_config(backend.trained_megatron.ddp_config, torch.device("cuda")).average_in_collective


def empties_cache(backend: Any) -> int:
    calls = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "empty_cache", lambda: calls.append(1))
        patch.setattr(backend, "device", torch.device("cuda"))
        backend.optimizer_step()
    return len(calls)


def rows(name: str) -> list[Row | OneChoice]:
    section, given = f"trainer.{name}.megatron_config", MEGATRON | {"ref": KL, "critic": CRITIC, "policy": {}}[name]
    sizes = ["tensor_model", "pipeline_model", "context", "expert_model", "expert_tensor"]
    settings = [f"{size}_parallel_size" for size in sizes]
    return [
        *(Row(f"{section}.{setting}", 2, refusal, given) for setting in settings),
        Row(
            f"{section}.model_config_kwargs",
            {"rms_norm_eps": 0.1},
            loaded(name, lambda backend: backend.config.layernorm_epsilon),
            given,
        ),
        Row(
            f"{section}.transformer_config_kwargs",
            {"deallocate_pipeline_outputs": True},
            loaded(name, lambda backend: backend.config.deallocate_pipeline_outputs),
            given,
        ),
        OneChoice(f"{section}.moe_token_dispatcher_type", "allgather"),
    ]


def trained_rows(name: str) -> list[Row]:
    section, given = f"trainer.{name}.megatron_config", MEGATRON | (CRITIC if name == "critic" else {})
    return [
        Row(
            f"{section}.ddp_config.grad_reduce_in_fp32",
            False,
            loaded(name, lambda backend: [str(buffer.grad_dtype) for buffer in backend.optimizer.model.buffers]),
            given | {"trainer.bf16": True},
        ),
        Row(f"{section}.ddp_config.average_in_collective", False, loaded(name, averages_in_collective), given),
        Row(f"{section}.ddp_config.overlap_grad_reduce", True, refusal, given),
        Row(f"{section}.ddp_config.overlap_param_gather", True, refusal, given),
        Row(
            f"{section}.freeze_moe_router",
            True,
            with_mixture(loaded(name, lambda backend: [name for name, _ in backend.training_state()])),
            given,
        ),
        Row(f"{section}.empty_cuda_cache", False, loaded(name, empties_cache), given),
    ]


ROWS = [*rows("policy"), *rows("critic"), *rows("ref"), *trained_rows("policy"), *trained_rows("critic")]

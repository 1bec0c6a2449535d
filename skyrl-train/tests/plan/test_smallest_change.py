"""The smallest change with which a run fits: what is found really fits, and nothing of it can be left out."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as settings_of_search
from hypothesis import strategies as st
from settings_of_plans import settings, shape

from skyrl_inspect.plan.changes import apply_overrides, find_smallest_change, format_overrides
from skyrl_train.errors import ConfigError
from skyrl_train.memory_plan.devices import Device
from skyrl_train.memory_plan.memory import estimate_memory

LARGE = dict(parameters=7_000_000_000, trained=7_000_000_000, layer=200_000_000, outside=1_400_000_000)
LARGE |= dict(num_layers=28, hidden=3584, words=152_064, query=3584, key=512, num_key_value_heads=4, num_heads=28)
LARGE |= dict(feed_forward=18_944, active=7_000_000_000, is_tied=False)


def device(gigabytes: float) -> Device:
    return Device("of a test", "cuda", gigabytes * 1e9, 1e15, 1e12, 1e11)


def run(**overrides: object) -> Any:
    world = {
        "trainer.placement.device": "cuda", "trainer.placement.policy_num_gpus_per_node": 8,
        "generator.backend": "vllm", "generator.num_inference_engines": 8, "generator.max_input_length": 2048,
        "generator.sampling_params.max_generate_length": 8192, "trainer.logprobs_chunk_size": 1024,
    }  # fmt: skip
    return settings(**(world | overrides))


def accept(_: object) -> None:
    """Refuse nothing."""


def test_smaller_micro_batch_is_first_remedy():
    cfg = run(**{"trainer.micro_train_batch_size_per_gpu": 16})
    found = find_smallest_change(cfg, {"policy": shape(**LARGE)}, device(80), accept)
    assert found is not None and format_overrides(found) == "trainer.micro_train_batch_size_per_gpu=8"


def test_overrides_are_written_as_they_are_pasted():
    overrides = {"trainer.gradient_checkpointing": True, "trainer.max_tokens_per_microbatch": None, "a.b": 0.5}
    assert (
        format_overrides(overrides)
        == "trainer.gradient_checkpointing=true trainer.max_tokens_per_microbatch=null a.b=0.5"
    )


def test_refused_change_is_skipped():
    cfg = run(**{"trainer.micro_train_batch_size_per_gpu": 16})

    def refuse(overrides: Any) -> None:
        if "trainer.micro_train_batch_size_per_gpu" in overrides:
            raise ConfigError("not here")

    found = find_smallest_change(cfg, {"policy": shape(**LARGE)}, device(80), refuse)
    assert found is not None and "micro_train" not in format_overrides(found)


def test_search_does_not_change_settings():
    cfg = run()
    changed = apply_overrides(cfg, {"trainer.policy.fsdp_config.cpu_offload": True, "generator.max_num_seqs": 3})
    assert changed.trainer.policy.fsdp_config.cpu_offload and changed.generator.max_num_seqs == 3
    assert not cfg.trainer.policy.fsdp_config.cpu_offload and cfg.generator.max_num_seqs == 1024
    assert changed.environment is cfg.environment


def test_nothing_is_found_where_nothing_helps():
    assert find_smallest_change(run(), {"policy": shape(**LARGE)}, device(2), accept) is None


CHOICES = {
    "trainer.micro_train_batch_size_per_gpu": st.sampled_from([1, 4, 16, 64]),
    "trainer.gradient_checkpointing": st.booleans(),
    "trainer.logprobs_chunk_size": st.sampled_from([1024, 16384]),
    "generator.gpu_memory_utilization": st.sampled_from([0.3, 0.6, 0.95]),
    "trainer.policy.optimizer_config.offload_after_step": st.booleans(),
    "trainer.policy.fsdp_config.fsdp_size": st.sampled_from([-1, 2, 8]),
    "trainer.policy.fsdp_config.reshard_after_forward": st.booleans(),
    "trainer.strategy": st.sampled_from(["fsdp2", "deepspeed", "megatron"]),
    "trainer.max_tokens_per_microbatch": st.sampled_from([None, 40_960, 163_840]),
}


@settings_of_search(deadline=None, max_examples=12)
@given(overrides=st.fixed_dictionaries(CHOICES), gigabytes=st.sampled_from([24, 40, 80, 140]))
def test_found_change_is_minimal(overrides: dict[str, Any], gigabytes: int):
    cfg, shapes, gpu = run(**overrides), {"policy": shape(**LARGE)}, device(gigabytes)
    if not estimate_memory(cfg, shapes, gpu).shortages:  # type: ignore[arg-type]
        return
    found = find_smallest_change(cfg, shapes, gpu, accept)  # type: ignore[arg-type]
    if found is None:
        return
    changes = found
    assert not estimate_memory(apply_overrides(cfg, changes), shapes, gpu).shortages  # type: ignore[arg-type]
    # A tensor-parallel engine and the number of engines, or nodes, change together: one move.
    together = [name for name in changes if "engine" in name or "num_nodes" in name or "expert" in name]
    for name in set(changes) - set(together):
        rest = {other: value for other, value in changes.items() if other != name}
        assert not rest or estimate_memory(apply_overrides(cfg, rest), shapes, gpu).shortages  # type: ignore[arg-type]


@pytest.mark.parametrize("strategy", ["fsdp2", "deepspeed", "megatron"])
def test_backends_have_different_remedies(strategy: str):
    cfg = run(**{"trainer.strategy": strategy, "trainer.policy.deepspeed_config.zero_optimization.stage": 0})
    cfg.trainer.policy.fsdp_config.fsdp_size = 1
    wanted = {"fsdp2": "fsdp_size=-1", "deepspeed": "zero_optimization.stage=", "megatron": "model_parallel_size="}
    gigabytes = 50 if strategy == "megatron" else 80
    found = find_smallest_change(cfg, {"policy": shape(**LARGE)}, device(gigabytes), accept)
    assert found is not None and wanted[strategy] in format_overrides(found)

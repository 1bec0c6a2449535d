"""Estimates of memory: sums that one can check by hand."""

from dataclasses import replace
from typing import Literal

import pytest
from settings_of_plans import settings, shape

from skyrl_train.memory_plan.backends import deepspeed, fsdp2, megatron
from skyrl_train.memory_plan.devices import Device, find_device
from skyrl_train.memory_plan.memory import compute_cache_bytes, estimate_engine, estimate_memory, estimate_worker_phases

GPU = Device("a small one", "cuda", memory=10_000.0 + 3e9, flops=1e12, bandwidth=1e12, link=1e11)


def test_fsdp2_shards_state_and_gathers_two_layers():
    cfg = settings(**{"trainer.placement.policy_num_gpus_per_node": 2})
    division = fsdp2(cfg, "policy", shape(), "cuda")
    assert (division.weights, division.gradients, division.optimizer) == (2000, 2000, 4000)
    assert division.gathered == 2 * 200 + 2 * 2 * 400  # bfloat16: outside of layers, a layer and the next one's buffer
    assert division.layer_reduction == 4 * 400 + 4 * 400 // 2  # float32: the whole gradient, and the rank's half
    assert division.layer_buffer == 4 * 400 and division.copies_reduced == 0
    assert division.final_reduction == (2 + 4) * 200 + 4 * 200 // 2
    assert division.resting == 8000


def test_fsdp_size_sets_ranks_per_replica():
    world = {"trainer.placement.policy_num_gpus_per_node": 8, "trainer.policy.fsdp_config.fsdp_size": 2}
    division = fsdp2(settings(**world), "policy", shape(), "cuda")
    assert division.weights == 2000
    assert division.copies_reduced == 4 * 800 // 2  # of all layers, summed over the copies


def test_reshard_after_forward_false_keeps_whole_model():
    world = {"trainer.placement.policy_num_gpus_per_node": 2}
    whole = settings(**world, **{"trainer.policy.fsdp_config.reshard_after_forward": False})
    assert fsdp2(whole, "policy", shape(), "cuda").gathered == 2 * 1000 + 2 * 400


def test_offloaded_state_uses_host_memory_on_gpu_only():
    cfg = settings(**{"trainer.policy.fsdp_config.cpu_offload": True})
    [*_, train] = estimate_worker_phases(cfg, "policy", shape(), "cuda")
    assert train.host == 16 * 1000 and "weights" not in train.parts
    [*_, train] = estimate_worker_phases(cfg, "policy", shape(), "cpu")
    assert train.host == 0 and train.parts["weights"] == 4000


def test_adapters_alone_have_gradients_and_moments():
    division = fsdp2(settings(), "policy", shape(trained=50), "cuda")
    assert (division.weights, division.gradients, division.optimizer) == (2200, 200, 400)
    assert division.head_gradient == 0


@pytest.mark.parametrize(
    ("stage", "weights", "gradients", "optimizer"),
    [
        (0, 4000, 4000, 8000),  # every rank holds all, and steps on the weights themselves
        (1, 4000, 4000, (8 + 4) * 250),  # a quarter of the moments and of the float32 weights
        (2, 4000, 1000, (8 + 4) * 250),
        (3, 1000, 1000, (8 + 4) * 250),
    ],
)
def test_zero_stages_shard_increasing_state(stage: int, weights: int, gradients: int, optimizer: int):
    cfg = settings(**{
        "trainer.placement.policy_num_gpus_per_node": 4,
        "trainer.policy.deepspeed_config.zero_optimization.stage": stage,
        "trainer.policy.deepspeed_config.torch_autocast.enabled": True,
    })  # fmt: skip
    division = deepspeed(cfg, "policy", shape(), "cpu")
    assert (division.weights, division.gradients, division.optimizer) == (weights, gradients, optimizer)


def test_deepspeed_offloaded_optimizer_leaves_gpu():
    zero = "trainer.policy.deepspeed_config.zero_optimization"
    cfg = settings(**{
        "trainer.strategy": "deepspeed", f"{zero}.stage": 2, f"{zero}.offload_optimizer.device": "cpu",
        "trainer.policy.deepspeed_config.torch_autocast.enabled": True,
    })  # fmt: skip
    [*_, train] = estimate_worker_phases(cfg, "policy", shape(), "cuda")
    assert "optimizer" not in train.parts and "gradients" not in train.parts
    # Moments, float32 weights, a buffer of updated ones; gradients, and their sum; two gradients of the embedding.
    assert train.host == (8 + 4 + 4) * 1000 + (4 + 4) * 1000 + 2 * 4 * 20 * 10


def test_megatron_divides_layers_experts_and_optimizer_state():
    mixture = shape(parameters=9000, trained=9000, layer=4400, experts=8000, active=3000, num_experts=8)
    cfg = settings(**{
        "trainer.placement.policy_num_gpus_per_node": 8,
        "trainer.policy.megatron_config.tensor_model_parallel_size": 2,
        "trainer.policy.megatron_config.expert_model_parallel_size": 4,
        "trainer.policy.megatron_config.expert_tensor_parallel_size": 1,
    })  # fmt: skip
    division = megatron(cfg, "policy", mixture, "cuda")
    dense, experts = 800 // 2 + 200 // 2, 8000 // 4
    assert division.weights == 2 * (dense + experts)  # whole on every data-parallel rank
    assert division.gradients == 4 * (dense + experts)
    # Float32 weights and moments: dense ones over 8 / 2 = 4 ranks, those of experts over 8 / 4 = 2.
    assert division.optimizer == 12 * (dense // 4 + experts // 2)


def test_gradient_checkpointing_stores_layer_inputs_only():
    def activations(checkpointing: bool, rows: int) -> float:
        cfg = settings(
            **{"trainer.gradient_checkpointing": checkpointing, "trainer.micro_train_batch_size_per_gpu": rows}
        )
        many = shape(num_layers=50, words=0)
        [*_, train] = estimate_worker_phases(cfg, "policy", many, "cuda")
        return train.parts["activations"]

    assert activations(True, 8) == 2 * activations(True, 4)
    # Else of all 50 layers what their backward needs: residuals, norms, attention, four times the feed-forward width;
    # and the states before the log-probs.
    needed = 2 * 10 + 16 * 10 + 2 * (3 * 8 + 2 * 4) + 4 * 2 * 16
    assert activations(False, 4) == 50 * (2 * 10 + needed) * 400 + (2 + 8 + 3 * 2) * 10 * 400


def test_token_budget_equals_rows_with_same_tokens():
    rows = estimate_worker_phases(settings(**{"trainer.micro_train_batch_size_per_gpu": 4}), "policy", shape(), "cuda")
    budget = estimate_worker_phases(settings(**{"trainer.max_tokens_per_microbatch": 400}), "policy", shape(), "cuda")
    assert rows == budget


def test_sequence_parallel_ranks_share_tokens():
    def tokens(size: int) -> float:
        cfg = settings(**{
            "trainer.placement.policy_num_gpus_per_node": 4, "trainer.policy.sequence_parallel_size": size,
            "trainer.micro_train_batch_size_per_gpu": 40,
        })  # fmt: skip
        return estimate_worker_phases(cfg, "policy", shape(words=0), "cuda")[-1].parts["activations"]

    assert tokens(4) == tokens(1) / 4


def test_engine_cache_is_memory_left_by_weights():
    cfg = settings(**{
        "generator.backend": "vllm", "generator.gpu_memory_utilization": 0.5, "generator.max_num_seqs": 4,
        "generator.max_num_batched_tokens": 10,
    })  # fmt: skip
    device = Device("", "cuda", memory=2.1e9, flops=1, bandwidth=1, link=1)
    plan = estimate_engine(cfg, shape(), device)
    assert plan.bytes_a_token == 2 * 2 * 4 * 2  # keys and values, bfloat16, 4 numbers, two layers
    assert plan.weights == 2000
    assert plan.total == pytest.approx(0.5 * 2.1e9 - 1e9)
    assert plan.answers == 4 and plan.wanted == 24  # as many as max_num_seqs allows
    # Batches of 1, 2, 4 and 8 in parts, the first three as a whole; two layers.
    assert plan.graphs == 7 * 2 * 0.4e6
    cfg.generator.enforce_eager = True
    eager = estimate_engine(cfg, shape(), device)
    assert (eager.graphs, eager.cache) == (0, plan.cache + plan.graphs)


def test_native_engine_plans_graphs_on_gpus():
    cfg = settings(**{"generator.backend": "native", "generator.max_num_seqs": 8})
    # 4, 6 and 8 rows, 256 keys; two layers; float32 logits of 8 rows.
    assert estimate_engine(cfg, shape(), GPU).graphs == 3 * 2 * 0.4e6 + 4 * 8 * shape().words
    assert estimate_engine(cfg, shape(), replace(GPU, kind="cpu")).graphs == 0
    cfg.generator.enforce_eager = True
    assert estimate_engine(cfg, shape(), GPU).graphs == 0


def test_engines_keep_host_weights_for_partial_syncs_and_sglang():
    def host(strategy: str, backend: str = "vllm") -> float:
        cfg = settings(**{
            "generator.backend": backend, "trainer.placement.device": "cuda",
            "generator.weight_sync_strategy": strategy, "trainer.placement.policy_num_gpus_per_node": 4,
        })  # fmt: skip
        return estimate_memory(cfg, {"policy": shape()}, GPU).host

    assert host("delta") - host("auto") == 4 * 2000
    assert host("auto", "sglang") == host("delta")


def test_tensor_parallel_engine_holds_at_least_one_kv_head():
    def bytes_a_token(size: int) -> float:
        cfg = settings(**{"generator.backend": "vllm", "generator.inference_engine_tensor_parallel_size": size})
        return estimate_engine(cfg, shape(num_heads=8), GPU).bytes_a_token

    assert [bytes_a_token(size) for size in (1, 2, 4)] == [32, 16, 16]


def test_engine_cache_below_one_response_is_shortage():
    cfg = settings(**{"generator.backend": "vllm", "trainer.placement.device": "cuda"})
    plan = estimate_memory(cfg, {"policy": shape()}, Device("", "cuda", 1.2e9, 1, 1, 1))
    assert any("a completion of 100 tokens" in each for each in plan.shortages)
    assert plan.excess > 0


def test_resident_optimizer_state_counts_during_generation():
    def generate(offload: bool) -> float:
        cfg = settings(**{
            "generator.backend": "vllm", "trainer.placement.device": "cuda",
            "trainer.policy.optimizer_config.offload_after_step": offload,
        })  # fmt: skip
        return estimate_memory(cfg, {"policy": shape()}, GPU).phases[0].parts.get("asleep", 0.0)

    assert (generate(True), generate(False)) == (0.0, 8000.0)


def test_models_of_their_own_devices_do_not_share_them():
    cfg = settings(**{
        "generator.backend": "vllm", "trainer.placement.device": "cuda", "trainer.placement.colocate_all": False,
        "trainer.placement.colocate_policy_ref": False, "trainer.algorithm.use_kl_loss": True,
    })  # fmt: skip
    plan = estimate_memory(cfg, {"policy": shape(), "ref": shape()}, GPU)
    assert {phase.parts["libraries"] for phase in plan.phases} == {1e9}
    assert "sync weights" not in {phase.name for phase in plan.phases}


def test_processes_of_machine_share_memory():
    cfg = settings(**{"trainer.placement.policy_num_gpus_per_node": 4, "generator.backend": "native"})
    device = Device("cpu", "cpu", 1e10, 1, 1, 1)
    plan = estimate_memory(cfg, {"policy": shape()}, device)
    assert plan.machine > 4 * device.libraries and not plan.shortages
    small = Device("cpu", "cpu", 2e9, 1, 1, 1)
    assert any("all processes" in each for each in estimate_memory(cfg, {"policy": shape()}, small).shortages)


def test_native_prefix_cache_adds_to_running_requests():
    """At most all tokens of a step: as many as the running requests have when all run at the same time."""
    device, native = Device("cpu", "cpu", 1e10, 1, 1, 1), {"generator.backend": "native"}
    off, on, bounded = (
        estimate_engine(settings(**native, **more), shape(), device).cache
        for more in (
            {"generator.enable_prefix_caching": False},
            {},
            {"generator.engine_init_kwargs": {"prefix_cache_gib": 1e-7}},
        )
    )
    assert on == 2 * off and bounded == off + 1e-7 * 2**30


def test_custom_backend_is_not_estimated():
    from skyrl_train.config.training_backends import TrainingBackendRegistry, TrainingBackendTraits

    registration = TrainingBackendRegistry.build_decorator
    registration("plan_test_backend", requires=TrainingBackendTraits())(lambda *_: None)
    try:
        plan = estimate_memory(settings(**{"trainer.strategy": "plan_test_backend"}), {"policy": shape()}, GPU)
    finally:
        TrainingBackendRegistry.unregister("plan_test_backend")
    assert plan.workers == {"policy": ()} and "not estimated" in plan.notes[0]


def test_local_processor_is_device():
    device = find_device("cpu")
    assert device.kind == "cpu" and device.memory > 1e8


def test_linear_attention_states_and_latent_vectors_are_counted():
    hybrid = shape(num_layers=4, num_linear_layers=3, state_inputs=24, state=50)
    # One layer of keys and values of 4 numbers each; three states, of which the recurrence is in float32.
    assert compute_cache_bytes(hybrid, 2) == (2 * 2 * 4, 3 * (2 * 24 + 4 * 50))
    assert compute_cache_bytes(hybrid, 2, tensor=2) == (2 * 2 * 2, 3 * (2 * 24 + 4 * 50) / 2)
    cfg = settings(**{"generator.backend": "native"})
    engine = estimate_engine(cfg, hybrid, find_device("cpu"))
    assert engine.cache == 24 * (100 * 2 * 2 * 4 + 3 * (2 * 24 + 4 * 50))
    vllm = settings(**{"generator.backend": "vllm", "trainer.placement.device": "cuda"})
    large = Device("one", "cuda", memory=4e9, flops=1e12, bandwidth=1e12, link=1e11)
    found = estimate_engine(vllm, replace(hybrid, state=10**6), large)
    assert found.answers == int(found.cache // (100 * 2 * 2 * 4 + 3 * (2 * 24 + 4 * 10**6)))
    # Latent vectors are whole on each device.
    assert compute_cache_bytes(shape(latent=6), 2, tensor=2) == (2 * 6 * 2, 0)


def test_native_packed_weights_count_on_cpu_only():
    def weights(kind: Literal["cpu", "cuda"]) -> float:
        cfg = settings(**{"generator.backend": "native", "trainer.placement.device": kind})
        return estimate_engine(cfg, found, Device("one", kind, 1e10, 1, 1, 1)).weights

    for found in (shape(is_tied=False), shape(is_tied=True)):
        number = weights("cuda") / found.parameters
        packed = found.parameters - found.experts - (0 if found.is_tied else found.words * found.hidden)
        assert packed > 0 and weights("cpu") == weights("cuda") + number * packed

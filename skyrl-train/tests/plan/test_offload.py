"""What models that share a GPU with an engine move to host memory, by the planner's estimates."""

from typing import Any

import pytest
from settings_of_plans import settings, shape

from skyrl_train.memory_plan.devices import find_device
from skyrl_train.memory_plan.memory import estimate_memory
from skyrl_train.memory_plan.model_shape import ModelShape
from skyrl_train.memory_plan.offload import decide_offload, decide_offload_of_run


def qwen(
    parameters: int, layers: int, hidden: int, feed_forward: int, heads: int, key: int, *, tied: bool
) -> ModelShape:
    words = 151_936
    outside = (1 if tied else 2) * words * hidden
    sizes: dict[str, Any] = dict(parameters=parameters, trained=parameters, active=parameters, outside=outside)
    sizes |= dict(layer=(parameters - outside) // layers, num_layers=layers, hidden=hidden, words=words, is_tied=tied)
    return shape(
        **sizes, query=hidden, key=key, num_heads=heads, num_key_value_heads=key // 128 or 2, feed_forward=feed_forward
    )


HALF = qwen(494_032_768, 24, 896, 4864, 14, 128, tied=True)
SMALL = qwen(1_543_714_304, 28, 1536, 8960, 12, 256, tied=True)
LARGE = qwen(7_615_616_512, 28, 3584, 18_944, 28, 512, tied=False)
ADAPTERS = ModelShape(**(vars(LARGE) | {"trained": 80_740_352}))
KL = {"trainer.algorithm.use_kl_loss": True}


def run(num_gpus: int = 1, **overrides: object) -> Any:
    """128 prompts x 8 samples of 512 + 1024 tokens."""
    world = {
        "trainer.placement.device": "cuda", "trainer.placement.policy_num_gpus_per_node": num_gpus,
        "trainer.placement.ref_num_gpus_per_node": num_gpus, "generator.num_inference_engines": num_gpus,
        "generator.backend": "vllm", "trainer.train_batch_size": 128, "trainer.policy_mini_batch_size": 128,
        "generator.n_samples_per_prompt": 8, "generator.max_input_length": 512,
        "generator.sampling_params.max_generate_length": 1024, "trainer.logprobs_chunk_size": 1024,
    }  # fmt: skip
    return settings(**(world | overrides))


@pytest.mark.parametrize(
    ("device", "model", "num_gpus", "overrides", "mode"),
    [
        ("h100-80", HALF, 1, {}, "keep"),
        ("h100-80", HALF, 1, KL, "keep"),
        ("h100-80", HALF, 1, {"generator.backend": "native"}, "keep"),
        ("h100-80", SMALL, 1, {}, "keep"),
        ("h100-80", SMALL, 1, {"trainer.strategy": "megatron"}, "keep"),
        ("h100-80", SMALL, 1, {"trainer.strategy": "deepspeed"}, "keep"),
        ("h100-80", ADAPTERS, 1, {}, "keep"),
        ("h100-80", LARGE, 1, {}, "optimizer"),
        ("h100-80", LARGE, 2, {}, "optimizer"),
        ("h100-80", LARGE, 8, {}, "keep"),
        ("h200", LARGE, 2, {}, "keep"),
        ("rtx4090", HALF, 1, {}, "keep"),
        ("rtx4090", SMALL, 1, {}, "optimizer"),
        ("rtx4090", SMALL, 1, KL, "all"),
        ("rtx4090", ADAPTERS, 1, {}, "all"),
    ],
)
def test_decision_moves_least_that_fits(
    device: str, model: ModelShape, num_gpus: int, overrides: dict[str, Any], mode: str
):
    cfg = run(num_gpus, **overrides)
    decision = decide_offload(cfg, {"policy": model, "ref": model}, find_device(device))
    assert decision.mode == mode, str(decision)


def test_engine_gets_what_models_at_rest_leave():
    shapes, device = {"policy": SMALL}, find_device("h100-80")
    cfg = run()
    decision = decide_offload(cfg, shapes, device)
    assert decision.gpu_memory_utilization is not None
    assert cfg.generator.gpu_memory_utilization == 0.8 and "0.8" in str(decision), "the settings of the run stay"
    plan = estimate_memory(decision.apply(cfg), shapes, device)
    [generate, *others] = plan.phases
    assert generate.parts["asleep"] == 12 * SMALL.parameters
    assert plan.engine is not None and plan.engine.answers >= plan.engine.wanted
    # The engine's fraction, models at rest and the library of the worker fill the device, up to the margin.
    filled = decision.gpu_memory_utilization * device.memory + generate.parts["asleep"] + device.libraries
    assert 0.9 * device.usable < filled < device.usable
    assert not plan.shortages and all("asleep" not in phase.parts for phase in others)
    assert plan.host == 0, "nothing moves"


@pytest.mark.parametrize("mode", ["keep", "optimizer", "all"])
def test_set_mode_is_used_and_decision_is_reported(mode: str):
    cfg = run(**{"trainer.placement.offload": mode})
    decision = decide_offload(cfg, {"policy": LARGE}, find_device("h100-80"))
    assert decision.mode == mode and str(decision).startswith(f"trainer.placement.offload: {mode}")


def test_optimizer_that_never_moves_counts_in_every_mode():
    stays = {"trainer.policy.optimizer_config.offload_after_step": False}
    plans = [
        estimate_memory(run(**{"trainer.placement.offload": mode}, **stays), {"policy": HALF}, find_device("h100-80"))
        for mode in ("keep", "optimizer", "all")
    ]
    assert [plan.phases[0].parts["asleep"] / HALF.parameters for plan in plans] == [12, 12, 8]


def test_models_with_devices_of_their_own_need_no_decision():
    apart = {"trainer.placement.colocate_all": False, "trainer.placement.colocate_policy_ref": False}
    for cfg in (run(**apart), run(**apart, **KL)):
        decision = decide_offload(cfg, {"policy": HALF, "ref": HALF}, find_device("h100-80"))
        assert (decision.mode, decision.reason) == ("all", "") and decision.apply(cfg) is cfg


def test_policy_and_reference_keep_shared_device_without_engines():
    cfg = run(**{"trainer.placement.colocate_all": False}, **KL)
    decision = decide_offload(cfg, {"policy": SMALL, "ref": SMALL}, find_device("h100-80"))
    assert decision.mode == "keep" and decision.gpu_memory_utilization is None
    cfg = run(**{"trainer.placement.colocate_all": False}, **KL)
    assert decide_offload(cfg, {"policy": LARGE, "ref": LARGE}, find_device("h100-80")).mode != "keep"


def test_run_on_cpu_decides_without_reading_models():
    cfg = run(**{"trainer.placement.device": "cpu", "trainer.policy.model.path": "/no/such"})
    assert decide_offload_of_run(cfg).apply(cfg) is cfg


def test_unknown_model_or_gpu_keeps_former_behavior():
    cfg = run(**{"trainer.policy.model.path": "/no/such"})
    decision = decide_offload_of_run(cfg)
    assert decision.mode == "all" and decision.gpu_memory_utilization is None

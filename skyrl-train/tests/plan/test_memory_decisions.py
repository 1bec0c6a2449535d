"""Settings that the planner chooses: what models that share a GPU move to host memory, and gradient checkpointing."""

from typing import Any

import pytest
from settings_of_plans import settings, shape

from skyrl_train.memory_plan.decisions import CHECKPOINTING, OFFLOAD, decide_memory, decide_memory_of_run
from skyrl_train.memory_plan.devices import find_device
from skyrl_train.memory_plan.memory import estimate_memory
from skyrl_train.memory_plan.model_shape import ModelShape


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
APART = {"trainer.placement.colocate_all": False, "trainer.placement.colocate_policy_ref": False}
AUTO = {CHECKPOINTING: "auto"}
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
    decision = decide_memory(cfg, {"policy": model, "ref": model}, find_device(device))
    assert decision.settings[OFFLOAD] == mode, str(decision)


def test_engine_gets_what_models_at_rest_leave():
    shapes, device = {"policy": SMALL}, find_device("h100-80")
    cfg = run()
    decision = decide_memory(cfg, shapes, device)
    fraction = decision.settings["generator.gpu_memory_utilization"]
    assert cfg.generator.gpu_memory_utilization == 0.8 and "0.8" in str(decision), "the settings of the run stay"
    plan = estimate_memory(decision.apply(cfg), shapes, device)
    [generate, *others] = plan.phases
    assert generate.parts["asleep"] == 12 * SMALL.parameters
    assert plan.engine is not None and plan.engine.answers >= plan.engine.wanted
    # The engine's fraction, models at rest and the library of the worker fill the device, up to the margin.
    filled = fraction * device.memory + generate.parts["asleep"] + device.libraries
    assert 0.9 * device.usable < filled < device.usable
    assert not plan.shortages and all("asleep" not in phase.parts for phase in others)
    assert plan.host == 0, "nothing moves"


@pytest.mark.parametrize("mode", ["keep", "optimizer", "all"])
def test_set_mode_is_used_and_decision_is_reported(mode: str):
    cfg = run(**{"trainer.placement.offload": mode})
    decision = decide_memory(cfg, {"policy": LARGE}, find_device("h100-80"))
    assert str(decision).startswith(f"trainer.placement.offload={mode}: as set")


def test_optimizer_that_never_moves_counts_in_every_mode():
    stays = {"trainer.policy.optimizer_config.offload_after_step": False}
    plans = [
        estimate_memory(run(**{"trainer.placement.offload": mode}, **stays), {"policy": HALF}, find_device("h100-80"))
        for mode in ("keep", "optimizer", "all")
    ]
    assert [plan.phases[0].parts["asleep"] / HALF.parameters for plan in plans] == [12, 12, 8]


def test_models_with_devices_of_their_own_need_no_decision():
    for cfg in (run(**APART), run(**APART, **KL)):
        decision = decide_memory(cfg, {"policy": HALF, "ref": HALF}, find_device("h100-80"))
        assert decision.settings[OFFLOAD] == "all" and not decision.reasons and decision.apply(cfg) is cfg


def test_policy_and_reference_keep_shared_device_without_engines():
    cfg = run(**{"trainer.placement.colocate_all": False}, **KL)
    decision = decide_memory(cfg, {"policy": SMALL, "ref": SMALL}, find_device("h100-80"))
    assert decision.settings == {OFFLOAD: "keep"}
    cfg = run(**{"trainer.placement.colocate_all": False}, **KL)
    assert decide_memory(cfg, {"policy": LARGE, "ref": LARGE}, find_device("h100-80")).settings[OFFLOAD] != "keep"


@pytest.mark.parametrize(
    ("device", "model", "overrides", "is_on"),
    [
        ("h100-80", HALF, {}, False),
        ("h100-80", HALF, {"trainer.micro_train_batch_size_per_gpu": 64}, True),
        ("h100-80", SMALL, {"trainer.strategy": "megatron"}, False),
        ("h100-80", SMALL, {"trainer.max_tokens_per_microbatch": 100_000}, True),
        ("h100-80", LARGE, {}, True),
        ("h100-80", ADAPTERS, APART, False),
        ("h100-80", ADAPTERS, {**APART, "trainer.micro_train_batch_size_per_gpu": 16}, True),
        ("rtx4090", HALF, {}, False),
        ("rtx4090", SMALL, {}, True),
    ],
)
def test_checkpointing_is_off_if_activations_fit(
    device: str, model: ModelShape, overrides: dict[str, Any], is_on: bool
):
    cfg = run(**AUTO, **overrides)
    shapes, gpu = {"policy": model}, find_device(device)
    decision = decide_memory(cfg, shapes, gpu)
    assert decision.settings[CHECKPOINTING] is is_on and CHECKPOINTING in str(decision)
    assert ("trainer.gradient_checkpointing=true" in decision.list_savings()) == (not is_on)
    # What is moved is decided first: checkpointing never makes models move.
    assert decision.settings[OFFLOAD] == decide_memory(run(**overrides), shapes, gpu).settings[OFFLOAD]
    assert is_on or not estimate_memory(decision.apply(cfg), shapes, gpu).shortages


@pytest.mark.parametrize("value", [True, False])
def test_set_gradient_checkpointing_is_kept(value: bool):
    cfg = run(**{CHECKPOINTING: value})
    decision = decide_memory(cfg, {"policy": HALF}, find_device("h100-80"))
    assert CHECKPOINTING not in decision.settings and decision.apply(cfg).trainer.gradient_checkpointing is value


def test_run_on_cpu_decides_without_reading_models():
    cfg = run(**{"trainer.placement.device": "cpu", "trainer.policy.model.path": "/no/such"})
    assert decide_memory_of_run(cfg).apply(cfg) is cfg


def test_unknown_model_or_gpu_keeps_former_behavior():
    cfg = run(**{"trainer.policy.model.path": "/no/such"}, **AUTO)
    decision = decide_memory_of_run(cfg)
    assert decision.settings == {OFFLOAD: "all", CHECKPOINTING: True} and decision.reasons

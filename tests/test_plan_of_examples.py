"""Every script under examples/ passes the planner on the machines that it asks for, and published recipes fit where
they were run. Shapes come from config files of `model_configs`, which hold no weights."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from composed_scripts import EXAMPLE_ENTRY_POINTS, REPOSITORY, Command, checked_config, commands_of

from skyrl_inspect.plan.changes import apply_overrides
from skyrl_inspect.plan.speed import step_time
from skyrl_train.memory_plan.devices import find_device
from skyrl_train.memory_plan.memory import MemoryPlan, estimate_memory, list_roles
from skyrl_train.memory_plan.model_shape import ModelShape, compute_model_shape, load_model_config
from skyrl_train.memory_plan.shapes import load_shapes

CONFIGS = Path(__file__).parent / "model_configs"

SAME_SHAPE = {
    "Qwen/Qwen2.5-Math-7B": "Qwen2.5-7B",
    "Qwen/Qwen2.5-Coder-7B-Instruct": "Qwen2.5-7B",
    "all-hands/openhands-lm-7b-v0.1": "Qwen2.5-7B",
}
PARAMETERS = {  # as their model cards and the index of their files count them
    "Qwen2.5-0.5B": 494_032_768,
    "Qwen2.5-1.5B": 1_543_714_304,
    "Qwen2.5-3B": 3_085_938_688,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen2.5-32B": 32_763_876_352,
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-1.7B": 1_720_574_976,
    "Qwen3-4B": 4_022_468_096,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-14B": 14_768_307_200,
    "Qwen3-32B": 32_762_123_264,
    "Qwen3-30B-A3B": 30_532_122_624,
}
TRAINS = ("main_base", "main_distill", *EXAMPLE_ENTRY_POINTS)
SCRIPTS = sorted(REPOSITORY.glob("examples/**/run_*.sh"))


def config_file(path: str) -> Path | None:
    """Return the file with the shape of a model of the hub; None if it is not known here."""
    name = SAME_SHAPE.get(path) or path.rpartition("/")[2].removesuffix("-Base").removesuffix("-Instruct")
    file = CONFIGS / f"{name.removesuffix('-Instruct-2507')}.json"
    return file if file.is_file() else None


def trained_config(script: Path, scratch: Path, **variables: str) -> Any:
    """Return the settings of a script's training run, on GPUs unless it names a CPU or is for tiny models."""
    variables = {"NUM_GPUS": "8", **variables}
    text = script.read_text()
    # Scripts that require a model, and those that call one that does.
    is_tiny = "{MODEL:?" in text or any(
        name in f"{script} {text}" for name in ("/run_arithmetic.sh", "/run_shell_agent.sh", "/run_evaluation.sh")
    )
    if is_tiny:
        variables |= {"MODEL": "Qwen/Qwen2.5-0.5B-Instruct", "PROGRAM": "program.py"}
    for command in commands_of(script, scratch, **variables):
        if command.module.rpartition(".")[2] in TRAINS:
            names = {override.partition("=")[0] for override in command.overrides}
            overrides = command.overrides
            if not is_tiny and "trainer.placement.device" not in names and "trainer.placement.launcher" not in names:
                overrides = [*overrides, "trainer.placement.device=cuda"]
            cfg = checked_config(Command(command.module, overrides))
            if cfg.generator.backend == "native" and cfg.trainer.placement.device == "cuda":
                cfg.generator.backend = "vllm"  # as `auto` means where it is installed
            return cfg
    return None


PROCESSOR = replace(find_device("cpu"), memory=256e9)  # a workstation, whatever this machine has


def plan_of(cfg: Any) -> MemoryPlan:
    models = {getattr(cfg.trainer, role).model.path for role in list_roles(cfg)}
    files = {model: str(config_file(model)) for model in models}
    return estimate_memory(cfg, load_shapes(cfg, files), find_device("h100-80"))


@pytest.mark.parametrize("name", PARAMETERS)
def test_published_model_shape_has_expected_parameter_count(name: str):
    config = load_model_config(name, "a model", config_file=str(CONFIGS / f"{name}.json"))
    assert compute_model_shape(config).parameters == PARAMETERS[name]
    assert json.loads((CONFIGS / f"{name}.json").read_text())["vocab_size"] in (151_936, 152_064)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: str(script.relative_to(REPOSITORY / "examples")))
@pytest.mark.slow
def test_script_passes_the_planner(script: Path, tmp_path: Path):
    cfg = trained_config(script, tmp_path)
    if cfg is None:
        pytest.skip("starts no reinforcement learning of skyrl_train")
    models = [getattr(cfg.trainer, role).model.path for role in list_roles(cfg)]
    if unknown := [model for model in models if config_file(model) is None]:
        pytest.skip(f"no config file of {', '.join(unknown)}")
    device = PROCESSOR if cfg.trainer.placement.device == "cpu" else find_device("h100-80")
    shapes = load_shapes(cfg, {model: str(config_file(model)) for model in models})
    plan = estimate_memory(cfg, shapes, device)
    name = str(script.relative_to(REPOSITORY / "examples"))
    assert (plan.shortages != []) == (name in NEED_SHORTER_SAMPLES), plan.shortages
    assert step_time(cfg, shapes, device, plan.engine).total > 0


NEED_SHORTER_SAMPLES = frozenset({"recipes/dapo/run_qwen2.5_math_7b.sh"})
"""Scripts whose published micro-batches only fit as long as few samples have the maximal length."""


# ---- published recipes


@pytest.mark.parametrize(
    ("script", "gigabytes"),
    [
        ("search_r1/run_qwen2.5_3b_3_turns.sh", (10, 40)),  # 3B on 8 x H100
        ("skyrl_sql/run_qwen2.5_coder_7b.sh", (25, 60)),  # 7B on 8 x H100, 32,000 tokens a sample
        ("search_r1/run_qwen3_30b_a3b_megatron_4_turns.sh", (30, 70)),  # on 32 x H100, tensor 2, experts over 8
        ("dapo/run_qwen3_30b_a3b_base_megatron.sh", (40, 75)),  # on 16 x H100, tensor 4, experts over 8
        ("dapo/run_qwen2.5_32b.sh", (25, 70)),
    ],
)
def test_published_recipe_fits_original_hardware(script: str, gigabytes: tuple[float, float], tmp_path: Path):
    plan = plan_of(trained_config(REPOSITORY / "examples/recipes" / script, tmp_path))
    assert plan.shortages == []
    [train] = [phase for phase in plan.phases if phase.name == "train policy"]
    assert gigabytes[0] < train.total / 1e9 < gigabytes[1]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ModelShape]:
    """The settings of Search-R1 with Qwen3-30B-A3B on 32 GPUs, and the model's shape."""
    script = REPOSITORY / "examples/recipes/search_r1/run_qwen3_30b_a3b_megatron_4_turns.sh"
    cfg = trained_config(script, tmp_path_factory.mktemp("mixture"))
    return cfg, load_shapes(cfg, {"Qwen/Qwen3-30B-A3B": str(CONFIGS / "Qwen3-30B-A3B.json")})["policy"]


def test_moe_under_fsdp2_is_sharded_over_all_ranks(mixture: tuple[Any, ModelShape]):
    """SkyRL publishes that FSDP2 did not complete a step of this recipe on 32 x 80 GB, and a script that trains a model
    of these sizes with FSDP2 on 16. The arithmetic of the backend here agrees with the second: 16 bytes a parameter
    over 32 ranks are 15 GB, and whole layers, buffers and activations less than 15 more. See docs/planner.md; this test
    holds what is estimated, so that a term which is found later shows here."""
    cfg, shape = mixture
    shapes: Any = dict.fromkeys(("policy", "ref"), shape)
    plan = estimate_memory(apply_overrides(cfg, {"trainer.strategy": "fsdp2"}), shapes, find_device("h100-80"))
    [train] = [phase for phase in plan.phases if phase.name == "train policy"]
    assert 15 < train.total / 1e9 < 35
    assert train.parts["weights"] + train.parts["gradients"] + train.parts["optimizer"] == pytest.approx(
        16 * shape.parameters / 32, rel=1e-6
    )

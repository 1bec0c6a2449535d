"""`python -m skyrl_train.plan`: what a person reads in the first hour with it."""

from pathlib import Path

import pytest

from skyrl_inspect.plan.__main__ import main
from skyrl_train.config.engine_kinds import EngineRegistry

MODEL = Path(__file__).parents[3] / "tests" / "model_configs" / "Qwen2.5-7B.json"
SEVEN = [
    "trainer.policy.model.path=Qwen/Qwen2.5-7B-Instruct", f"--config-file={MODEL}",
    "trainer.placement.policy_num_gpus_per_node=8", "trainer.placement.ref_num_gpus_per_node=8",
    "generator.num_inference_engines=8", "--device=h100-80",
]  # fmt: skip


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    status = main(list(arguments))
    out, err = capsys.readouterr()
    return status, out + err


def test_plan_of_published_size_fits_and_is_complete(capsys: pytest.CaptureFixture[str]):
    status, text = plan(capsys, *SEVEN, "--price-per-hour", "2.5", "--num-prompts", "7473")
    assert status == 0 and text.endswith("fits\n")
    for words in (
        "7.616 B parameters", "generate ", "policy log-probs", "train policy", "reference log-probs", "sync weights",
        "keys and values", "completions of full length", "time of a step", "published speeds", "cost of the run",
    ):  # fmt: skip
        assert words in text, words
    assert ("engines are planned as vLLM" in text) != EngineRegistry.get_requirements("vllm").is_installed


def test_oversized_run_fits_with_smallest_change(capsys: pytest.CaptureFixture[str]):
    lengths = ["generator.sampling_params.max_generate_length=8192", "trainer.micro_train_batch_size_per_gpu=32"]
    status, text = plan(capsys, *SEVEN, *lengths)
    assert status == 1 and "DOES NOT FIT" in text
    assert "time of a step" not in text, "a step that cannot be taken has no time"
    change = text.strip().splitlines()[-1].split()
    status, text = plan(capsys, *SEVEN, *lengths, *change)
    assert status == 0, text


def test_slow_step_is_named_with_cause(capsys: pytest.CaptureFixture[str]):
    lengths = ["generator.sampling_params.max_generate_length=30000", "generator.n_samples_per_prompt=64"]
    status, text = plan(capsys, *SEVEN, *lengths, "trainer.algorithm.use_kl_loss=false")
    assert status == 0
    verdict = text.strip().splitlines()[-1]
    assert verdict.startswith("fits, but a step takes") and "`generate`" in verdict
    assert "generator.inference_engine_tensor_parallel_size" in verdict


def test_undivided_reference_is_named(capsys: pytest.CaptureFixture[str]):
    overrides = [
        "trainer.policy.model.path=Qwen/Qwen3-30B-A3B", f"--config-file={MODEL.with_name('Qwen3-30B-A3B.json')}",
        "--device=h100-80", "trainer.strategy=megatron", "trainer.placement.policy_num_gpus_per_node=8",
        "trainer.placement.ref_num_gpus_per_node=8", "generator.num_inference_engines=8",
        "trainer.policy.megatron_config.expert_model_parallel_size=8",
        "trainer.policy.megatron_config.expert_tensor_parallel_size=1", "trainer.algorithm.use_kl_loss=true",
    ]  # fmt: skip
    _, text = plan(capsys, *overrides)
    assert "each of 8 ranks holds all 61 GB" in text and "trainer.ref.megatron_config" in text
    assert "is not sharded" not in plan(capsys, *SEVEN)[1]


def test_measured_times_correct_estimate(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    from skyrl_inspect.plan.__main__ import compose_settings
    from skyrl_train.config import get_config_as_yaml_str
    from skyrl_train.utils.run_folder import RunFolder

    folder = RunFolder(tmp_path / "run")
    folder.write_config(
        get_config_as_yaml_str(compose_settings([*SEVEN[:1], *SEVEN[2:5], "trainer.placement.device=cuda"]))
    )
    folder.append_metrics(1, {"timing/train_critic_and_policy": 1234.0})
    status, text = plan(capsys, *SEVEN, "--measured", str(folder.path))
    assert status == 0 and "train 1,234 " in text and "times what a run measured" in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["trainer.algorithm.eps_clp_high=0.28"], "did you mean trainer.algorithm.eps_clip_high"),
        (["trainer.nothing=1"], "unknown setting trainer.nothing"),
        (["trainer.policy_mini_batch_size=seven"], "trainer.policy_mini_batch_size"),
        (["trainer.policy_mini_batch_size=5000"], "policy_mini_batch_size"),
        (["trainer.policy.model.path=/no/such/folder", "--device=cpu"], "no config.json in this folder"),
        (["trainer.policy.model.path=Some/Model"], "--config-file Some/Model=FILE"),
        (["--device=h1000"], "--device h1000 is not known; choose one of cpu, h100-80"),
        (["--devise=h100-80"], "unknown option --devise"),
        ([*SEVEN, "--config-file=missing.json"], "no such file"),
        ([*SEVEN, "--config-file=Other/Model=missing.json"], "no model of the run has this path"),
        ([*SEVEN, "trainer.placement.device=cpu"], "contradicts trainer.placement.device=cpu"),
        ([*SEVEN, "trainer.placement.policy_num_nodes=4", "trainer.placement.ref_num_nodes=4",
          "generator.num_inference_engines=32", "--nodes=2"], "on 32 devices.*--nodes 2 x --gpus-per-node 8 has 16"),
        ([*SEVEN, "--nodes=1", "--gpus-per-node=4"], "policy_num_gpus_per_node=8 is more than the 4 devices"),
        ([*SEVEN, "--measured=/no/run"], "is not a run folder"),
    ],
)  # fmt: skip
def test_invalid_input_is_named_with_remedy(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    import re

    status, text = plan(capsys, *arguments)
    assert status == 2
    assert re.search(said, text, re.DOTALL), text
    assert "Traceback" not in text


def test_unused_machines_are_reported(capsys: pytest.CaptureFixture[str]):
    status, text = plan(capsys, *SEVEN, "--nodes", "4")
    assert status == 0 and "takes 8 of 32 devices; to use all: trainer.placement.policy_num_nodes=4" in text

"""The whole loop in its variants: placements (with real processes), training backends, KL terms, precisions,
resumed on other ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from skyrl_inspect.dashboard.runs_folder import RunsFolder
from skyrl_inspect.dashboard.steps import StepTrajectories
from skyrl_train.entrypoints.main_generate import EvalOnlyEntrypoint
from skyrl_train.training_batch import TensorBatch
from skyrl_train.utils.run_folder import RunFolder

RAY = {"launcher": "ray"}
TWO_RANKS = {"trainer": {"placement": RAY | {"policy_num_gpus_per_node": 2}}}
TWO_VERIFIED_ENGINES = {
    "num_inference_engines": 2,
    "weight_sync_verification": "full",
    "weight_transfer_threshold_cuda_ipc_GB": 1e-5,
}
VARIANTS = {
    "weights broadcast to two engines, reference model in the loss, recomputed activations": {
        "trainer": {
            "placement": RAY | {"colocate_all": False},
            "algorithm": {"use_kl_loss": True, "kl_loss_coef": 0.1, "use_entropy_loss": True},
            "gradient_checkpointing": True,
        },
        "generator": {"num_inference_engines": 2, "weight_transfer_threshold_cuda_ipc_GB": 1e-5},
    },
    "bfloat16, adaptive KL in the reward, two epochs a batch, other reduction": {
        "trainer": {
            "bf16": True,
            "gradient_checkpointing": False,
            "update_epochs_per_batch": 2,
            "algorithm": {
                "use_kl_in_reward": True,
                "kl_ctrl": {"type": "adaptive"},
                "loss_reduction": "seq_mean_token_sum_norm",
                "advantage_batch_normalize": True,
            },
        },
        "generator": {"model_dtype": "bfloat16"},
    },
    "replicas of shards, parameters offloaded, a learning-rate schedule": {
        "trainer": {
            **TWO_RANKS["trainer"],
            "policy": {
                "fsdp_config": {"fsdp_size": 1, "cpu_offload": True, "reshard_after_forward": False},
                "optimizer_config": {"scheduler": "cosine", "num_warmup_steps": 1},
            },
            "micro_train_batch_size_per_gpu": 2,
            "dump_data_batch": True,
        }
    },
    "DeepSpeed on two ranks, which hand weights to two engines that are verified whole": {
        "trainer": {
            **TWO_RANKS["trainer"],
            "strategy": "deepspeed",
            # A low threshold: parameters of a tiny model are divided too.
            "policy": {"deepspeed_config": {"zero_optimization": {"stage3_param_persistence_threshold": 10}}},
        },
        "generator": TWO_VERIFIED_ENGINES,
    },
    "Megatron on two ranks of each layer, which hand weights to two engines that are verified whole": {
        "trainer": {
            **TWO_RANKS["trainer"],
            "strategy": "megatron",
            "policy": {"megatron_config": {"tensor_model_parallel_size": 2}},
        },
        "generator": TWO_VERIFIED_ENGINES,
    },
}


MARKS = {
    "weights broadcast": pytest.mark.slow,
    "replicas of": pytest.mark.full,
    "bfloat16": (),
    "DeepSpeed": pytest.mark.full,
    "Megatron": pytest.mark.full,
}


@pytest.mark.parametrize(
    "variant",
    [pytest.param(name, marks=mark) for name in VARIANTS for begin, mark in MARKS.items() if name.startswith(begin)],
)
def test_run_learns_and_agrees_with_engines(variant, settings, run, tmp_path):
    cfg = settings(tmp_path, VARIANTS[variant])
    steps = run(cfg)
    assert [row["step"] for row in steps] == [1, 2]
    tolerance = 0.1 if cfg.trainer.bf16 else 1e-4
    for row in steps:
        assert row["policy/grad_norm"] > 0
        assert row["policy/skipped_updates"] == 0
        assert row["policy/rollout_train_logprobs_abs_diff_max"] < tolerance
        assert row["weight_sync/buckets"] >= 1
        assert row["reward/avg_raw_reward"] > 0
    if cfg.trainer.algorithm.use_kl_loss:
        assert 0 <= steps[0]["policy/policy_kl"] < steps[1]["policy/policy_kl"]  # away from the reference
        assert steps[0]["weight_sync/buckets"] > 3
    if cfg.trainer.algorithm.use_kl_in_reward:
        assert steps[1]["loss/kl_loss_coef"] != steps[0]["loss/kl_loss_coef"]
    if cfg.trainer.dump_data_batch:
        dumped = TensorBatch.load(tmp_path / "exports" / "dumped_data" / "global_step_2_training_input.pkl")
        assert len(dumped) == 4 * 4
        assert dumped.tensor("advantages").abs().sum() > 0
    versions = {
        version
        for row in RunFolder(tmp_path).read_trajectories(2, "train")
        for version in row["tokens"]["weight_versions"]
        if version >= 0
    }
    assert versions == {1}  # step 2 is written by the weights of step 1


@pytest.mark.gpu
@pytest.mark.parametrize("launcher", ["ray", "inline"])
@pytest.mark.parametrize("bf16", [False, True])
def test_run_learns_on_gpu(bf16, launcher, settings, run, tmp_path):
    """Policy, reference and engine take turns on one device; float32 and bfloat16."""
    on_gpu = {
        "trainer": {
            "placement": {"device": "cuda", "launcher": launcher},
            "bf16": bf16,
            "algorithm": {"use_kl_loss": True, "kl_loss_coef": 0.1},
            "ckpt_interval": 1,
            "hf_save_interval": 2,
        },
        "generator": {"model_dtype": "bfloat16" if bf16 else "float32"},
    }
    steps = run(settings(tmp_path, on_gpu))
    assert [row["step"] for row in steps] == [1, 2]
    for row in steps:
        assert row["policy/grad_norm"] > 0
        assert row["policy/rollout_train_logprobs_abs_diff_max"] < (0.2 if bf16 else 1e-3)


@pytest.mark.full  # training_backends/test_layouts.py resumes under other ranks
def test_run_resumes_with_other_number_of_ranks(settings, run, merged, tmp_path):
    every_step: dict[str, Any] = {"trainer": {"ckpt_interval": 1, "hf_save_interval": 3, "max_training_steps": 3}}
    expected = run(settings(tmp_path / "whole", every_step))  # on one rank, without Ray
    first = merged(every_step, {**TWO_RANKS, "trainer": TWO_RANKS["trainer"] | {"max_training_steps": 2}})
    run(settings(tmp_path / "moved", first))
    resumed = run(settings(tmp_path / "moved", every_step))  # as the whole run from here
    assert [row["step"] for row in resumed] == [1, 2, 3]
    for name in ("policy/grad_norm", "policy/final_loss", "policy/policy_entropy", "reward/avg_raw_reward"):
        assert resumed[2][name] == pytest.approx(expected[2][name], rel=1e-3, abs=1e-5), name
    exported = Path("exports/global_step_3/policy/model.safetensors")
    weights = load_file(tmp_path / "whole" / exported)
    for name, weight in load_file(tmp_path / "moved" / exported).items():
        torch.testing.assert_close(weight, weights[name], atol=1e-4, rtol=0)


def test_standalone_evaluation_writes_pass_at_k_and_files(settings, prompts, tmp_path):
    cfg = settings(
        tmp_path,
        {
            "data": {"train_data": [], "val_data": [prompts]},
            "generator": {
                "eval_n_samples_per_prompt": 3,
                "eval_sampling_params": {"temperature": 1.0, "max_generate_length": 8},
            },
        },
    )
    EvalOnlyEntrypoint(cfg).run()
    [metrics] = RunFolder(tmp_path).read_metrics()
    assert 0 < metrics["eval/toy/avg_score"] <= 1
    assert metrics["eval/all/pass_at_3"] >= metrics["eval/all/avg_score"]
    rows = (tmp_path / "exports" / "dumped_evals" / "eval_only" / "toy.jsonl").read_text().splitlines()
    assert len(rows) == 16 * 3
    assert len(StepTrajectories(RunsFolder(tmp_path)).summary(".", "eval", 0)["rows"]) == 16 * 3

    # In the folder of a training its own trajectories stay.
    RunFolder(tmp_path).write_trajectories(1, "train", [])
    RunFolder(tmp_path).write_trajectories(0, "eval", [])
    EvalOnlyEntrypoint(cfg).run()
    assert StepTrajectories(RunsFolder(tmp_path)).summary(".", "eval", 0)["rows"] == []

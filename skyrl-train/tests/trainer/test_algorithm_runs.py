"""Whole runs of algorithms that need more than GRPO does: a critic, dynamic sampling, corrections, turns as samples, a
reference that moves on. A two-layer model, two steps; with several ranks in processes of Ray."""

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from transformers import AutoTokenizer

from skyrl_train.errors import SkyRLError
from skyrl_train.utils.run_folder import RunFolder

pytestmark = pytest.mark.timeout(600)

RAY = {"launcher": "ray"}

PPO = {"advantage_estimator": "gae", "lambd": 0.95, "value_clip": 0.5}


def assert_learns(steps: list[dict[str, float]], num_steps: int = 2) -> None:
    """A gradient in every step, from a policy whose ratios began at exactly 1."""
    assert [row["step"] for row in steps] == [*range(1, num_steps + 1)]
    for row in steps:
        assert row["policy/grad_norm"] > 0
        assert row["policy/skipped_updates"] == 0
        assert row["policy/first_ratio_max_deviation"] == 0.0, "float32 on a CPU: to the bit"
        assert row["policy/ratio_alarms"] == 0
        assert row["policy/rollout_train_logprobs_abs_diff_max"] < 1e-4
        assert row["policy/rollout_train_ess"] > 0.999


@pytest.mark.full  # test_exact_resume.py trains PPO with a critic
def test_ppo_with_critic_trains_on_two_ranks_with_token_packing(chat_model, settings, run, tmp_path: Path):
    """Three prompts of five samples: 15 rows, which divide by nothing here."""
    changes: dict[str, Any] = {
        "trainer": {
            "algorithm": PPO | {"loss_reduction": "prompt_mean"},
            "critic": {"model": {"path": chat_model}, "optimizer_config": {"lr": 1e-3}},
            "placement": RAY | {"policy_num_gpus_per_node": 2, "critic_num_gpus_per_node": 2},
            "train_batch_size": 3,
            "policy_mini_batch_size": 1,
            "critic_mini_batch_size": 3,
            "update_epochs_per_batch": 2,
            "max_tokens_per_microbatch": 100,
            "hf_save_interval": 2,
        },
        "generator": {"n_samples_per_prompt": 5},
    }
    steps = run(settings(tmp_path, changes))
    assert_learns(steps)
    for row in steps:
        assert row["critic/grad_norm"] > 0 and row["critic/critic_lr"] == 1e-3
        assert row["critic/critic_loss"] > 0 and 0 <= row["critic/values_clipfrac"] <= 1
    first, second = steps
    assert second["critic/critic_loss"] < first["critic/critic_loss"], "rewards are near 0.9 in both steps"
    exported = load_file(tmp_path / "exports" / "global_step_2" / "critic" / "model.safetensors")
    assert any(name.endswith("value_head.weight") for name in exported)


@pytest.mark.slow
def test_dynamic_sampling_works_with_token_selecting_loss_and_kl_in_reward(settings, run, tmp_path: Path):
    changes: dict[str, Any] = {
        "trainer": {
            "algorithm": {
                "dynamic_sampling": {"type": "filter"},
                "policy_loss_type": "clip_cov",
                "clip_cov": {"clip_ratio": 0.05, "clip_cov_lb": 0.0},
                "use_kl_in_reward": True,
                "kl_ctrl": {"type": "adaptive", "horizon": 100},
            },
        },
        # answers of one or two characters are all different: half of the groups teach nothing
        "generator": {"n_samples_per_prompt": 2, "sampling_params": {"max_generate_length": 3}},
    }
    steps = run(settings(tmp_path, changes))
    assert_learns(steps)
    assert sum(row["generate/num_sampled_batches"] for row in steps) > 2
    for row in steps:
        assert row["generate/num_sampled_prompts"] == 4 * row["generate/num_sampled_batches"]
    assert steps[1]["loss/kl_loss_coef"] < steps[0]["loss/kl_loss_coef"], "the divergence is below its target"
    assert sum(row["policy/loss_metrics/clip_ratio"] for row in steps) > 0, "some tokens were chosen"
    taken = sum(row["generate/num_sampled_batches"] for row in steps)
    assert steps[-1]["trainer/epoch"] == (taken - 1) // 4, "the data has 4 batches"
    rows = list(RunFolder(tmp_path).read_trajectories(2, "train"))
    rewards = [sum(row["tokens"]["rewards"]) for row in rows]
    assert len(rows) == 8 and all(a != b for a, b in zip(rewards[0::2], rewards[1::2], strict=True))


@pytest.mark.slow
def test_dynamic_sampling_error_gives_advice_when_no_group_is_informative(settings, run, tmp_path: Path):
    changes: dict[str, Any] = {
        "trainer": {"algorithm": {"dynamic_sampling": {"type": "filter", "max_sample_batches": 2}}},
        "generator": {"sampling_params": {"max_generate_length": 1}},  # a character is all different; an end is not
    }
    with pytest.raises(SkyRLError, match="max_sample_batches=2"):
        run(settings(tmp_path, changes))


@pytest.mark.slow
def test_lora_trains_with_off_policy_correction(settings, run, tmp_path: Path):
    changes: dict[str, Any] = {
        "trainer": {
            "policy": {"model": {"lora": {"rank": 4, "alpha": 8}}},
            "algorithm": {
                "policy_loss_type": "dual_clip",
                "zero_variance_filter": True,
                "overlong_buffer": {"len": 4, "penalty_factor": 0.5},
                "off_policy_correction": {"tis_ratio_type": "token", "sequence_mask_metric": "geometric"},
            },
            "hf_save_interval": 2,
        },
    }
    steps = run(settings(tmp_path, changes))
    assert_learns(steps)
    for row in steps:
        assert row["policy/loss_metrics/is_ratio_mean"] == pytest.approx(1.0, abs=1e-4)
        assert row["policy/loss_metrics/geo_sequence_mask_masked_ratio"] == 0
        assert row["loss/avg_overlong_penalty"] < 0
    folder = tmp_path / "exports" / "global_step_2" / "policy"
    assert (folder / "model.safetensors").exists() and (folder / "adapter" / "adapter_model.safetensors").exists()


@pytest.mark.first_case
@pytest.mark.parametrize("merge", [False, True])
def test_step_wise_samples_train(merge: bool, settings, run, tmp_path: Path):
    """Trajectories of one to three turns: the number of rows is what it happens to be."""
    changes: dict[str, Any] = {
        "environment": {"env_class": "up_to_three_turns"},
        "trainer": {"algorithm": {"advantage_estimator": "rloo" if merge else "turn_grpo"}},
        "generator": {
            "max_turns": 3,
            "max_input_length": 200,
            "step_wise_trajectories": True,
            "merge_stepwise_output": merge,
        },
    }
    cfg = settings(tmp_path, changes)
    assert_learns(run(cfg))
    rows = list(RunFolder(tmp_path).read_trajectories(1, "train"))
    assert sum(row["is_last_step"] for row in rows) == 16
    assert (len(rows) == 16) if merge else (len(rows) > 16)


def test_reference_is_updated_after_each_epoch_except_last(settings, run, tmp_path: Path):
    """Eight prompts a step are two steps an epoch. Just after an update the reference is what the engines hold, so the
    divergence of the first optimizer step is 0; it grows from there."""
    changes: dict[str, Any] = {
        "trainer": {
            "algorithm": {"use_kl_loss": True, "kl_loss_coef": 0.1},
            "update_ref_every_epoch": True,
            "train_batch_size": 8,
            "policy_mini_batch_size": 8,
            "epochs": 2,
            "max_training_steps": None,
            "ckpt_interval": 3,
        },
        "generator": {"n_samples_per_prompt": 2},
    }
    steps = run(settings(tmp_path, changes))
    assert [row["step"] for row in steps] == [1, 2, 3, 4]
    divergence = [row["policy/policy_kl"] for row in steps]
    assert divergence[0] == divergence[2] == 0.0 and divergence[1] > 0 and divergence[3] > 0
    assert "timing/update_ref_with_policy" in steps[1] and "timing/update_ref_with_policy" not in steps[3]
    assert (tmp_path / "ckpts" / "global_step_3" / "ref" / "model.safetensors").exists()


@pytest.mark.slow
def test_mixture_of_experts_trains_and_reports_load_balance(chat_model, save_mixture, settings, run, tmp_path: Path):
    tokenizer = AutoTokenizer.from_pretrained(chat_model)
    tokenizer.save_pretrained(tmp_path / "experts")
    folder = save_mixture(tmp_path / "experts", vocab_size=len(tokenizer), hidden_size=32, max_position_embeddings=256)
    steps = run(settings(tmp_path / "run", {"trainer": {"policy": {"model": {"path": folder}}}}))
    assert_learns(steps)
    # With perfectly even routing the auxiliary loss is the number of experts per token.
    assert all(1.9 < row["policy/router_auxiliary_loss"] < 4 for row in steps)

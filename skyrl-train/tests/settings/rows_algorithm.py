"""Rows for `trainer.algorithm`."""

import warnings
from typing import Any

import torch
from effects import Bench, Row, Settings, error, metrics, weights
from rows_trainer import CRITIC, KL

from skyrl_train.algorithms.losses import PolicyLossRegistry
from skyrl_train.workers.policy_worker import PolicyWorker

ALGORITHM = "trainer.algorithm"
TWO_EPOCHS = {"trainer.update_epochs_per_batch": 3, "trainer.policy.optimizer_config.lr": 2e-3}
"""Ratios leave 1."""
KL_IN_REWARD = {
    f"{ALGORITHM}.use_kl_in_reward": True,
    f"{ALGORITHM}.kl_loss_coef": 0.5,
    "trainer.ref.model.path": "{other_model}",
}
OTHER_REFERENCE = KL | {"trainer.ref.model.path": "{other_model}"}
ADAPTIVE = KL_IN_REWARD | {
    f"{ALGORITHM}.kl_ctrl.type": "adaptive",
    f"{ALGORITHM}.kl_ctrl.horizon": 20,
    "trainer.max_training_steps": 2,
}
OTHER_NUMBERS = {"generator.model_dtype": "bfloat16", "generator.seed": 3}
"""Engine and trainer differ."""
LONG = {"generator.sampling_params.max_generate_length": 12}
SLOW_CRITIC = CRITIC | {"trainer.critic.optimizer_config.lr": 1e-4, "trainer.update_epochs_per_batch": 3}
OLD_FORM = {f"{ALGORITHM}.use_tis": True, f"{ALGORITHM}.tis_imp_ratio_cap": 0.5}
UNIFORM = {
    "environment.env_class": "sometimes_toy",
    "generator.seed": 1,
    "generator.n_samples_per_prompt": 2,
    "trainer.train_batch_size": 4,
}
"""Some prompts have answers of one reward."""


def loss(name: str, setting: str, value: Any, given: Settings | None = None) -> Row:
    """A setting of one policy loss."""
    needs = TWO_EPOCHS | {f"{ALGORITHM}.policy_loss_type": name} | dict(given or {})
    return Row(f"{ALGORITHM}.{setting}", value, weights(), needs)


def correction(name: str, value: Any, given: Settings) -> Row:
    section = f"{ALGORITHM}.off_policy_correction"
    needs = OTHER_NUMBERS | {f"{section}.{key}": other for key, other in given.items()}
    return Row(f"{section}.{name}", value, weights(), needs)


class Drifting(PolicyWorker):
    """Policy worker whose first ratios deviate by 1 %."""

    def forward(self, batch: Any, micro_batches: Any) -> Any:
        output = super().forward(batch, micro_batches)
        output["output"] = output.tensor("output") + 0.01
        return output


def alarms(bench: Bench, settings: Settings) -> Any:
    run = bench.run({**settings, "trainer.update_epochs_per_batch": 2}, policy_worker=Drifting)
    return run.metrics[-1]["policy/ratio_alarms"], run.error


def old_form(bench: Bench, settings: Settings) -> Any:
    """Run with `use_tis` and its cap, or with neither: the cap alone is an error."""
    on = settings[f"{ALGORITHM}.use_tis"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return metrics(bench, settings if on else {**settings, f"{ALGORITHM}.tis_imp_ratio_cap": -1.0})


def dpo_loss(bench: Bench, settings: Settings) -> Any:
    """Compute the loss of one preference pair (the loss has its own entry point, with the same section)."""
    config = bench.config(settings).trainer.algorithm
    log_probs = torch.tensor([[0.5], [-0.5]])
    ones = torch.ones(2, 1)
    return PolicyLossRegistry.get("dpo")(log_probs, ones, torch.tensor([[1.0], [-1.0]]), config, ones, None)[0].tolist()


ROWS = [
    Row(f"{ALGORITHM}.advantage_estimator", "rloo", weights()),
    Row(f"{ALGORITHM}.policy_loss_type", "cispo", weights(), TWO_EPOCHS),
    Row(f"{ALGORITHM}.loss_reduction", "seq_mean_token_sum_norm", metrics, {f"{ALGORITHM}.max_seq_len": 3}),
    Row(
        f"{ALGORITHM}.max_seq_len", 3, metrics, {f"{ALGORITHM}.loss_reduction": "seq_mean_token_sum_norm"} | TWO_EPOCHS
    ),
    Row(f"{ALGORITHM}.grpo_norm_by_std", False, metrics),
    Row(f"{ALGORITHM}.advantage_batch_normalize", True, metrics),
    Row(f"{ALGORITHM}.gamma", 0.5, metrics, CRITIC),
    Row(f"{ALGORITHM}.lambd", 0.5, metrics, CRITIC),
    Row(f"{ALGORITHM}.value_clip", 1e-6, weights("critic"), SLOW_CRITIC),
    Row(f"{ALGORITHM}.value_head_prefix", "score", weights("critic"), CRITIC),
    Row(f"{ALGORITHM}.zero_variance_filter", True, metrics, UNIFORM),
    Row(f"{ALGORITHM}.zero_variance_filter_tol", 100.0, metrics, {f"{ALGORITHM}.zero_variance_filter": True}),
    loss("regular", "eps_clip_low", 0.001),
    loss("regular", "eps_clip_high", 0.001),
    loss("dual_clip", "clip_ratio_c", 1.001, {"trainer.policy.optimizer_config.lr": 0.05}),
    Row(f"{ALGORITHM}.use_tis", False, old_form, OTHER_NUMBERS | OLD_FORM),
    Row(f"{ALGORITHM}.tis_imp_ratio_cap", 2.0, old_form, OTHER_NUMBERS | OLD_FORM),
    Row(f"{ALGORITHM}.first_ratio_tolerance", 0.1, alarms),
    Row(f"{ALGORITHM}.use_kl_loss", True, weights(), KL_IN_REWARD | {f"{ALGORITHM}.use_kl_in_reward": False}),
    Row(f"{ALGORITHM}.use_kl_in_reward", True, weights(), KL_IN_REWARD | {f"{ALGORITHM}.use_kl_in_reward": False}),
    Row(f"{ALGORITHM}.kl_loss_coef", 0.1, weights(), OTHER_REFERENCE),
    Row(f"{ALGORITHM}.kl_estimator_type", "k1", metrics, OTHER_REFERENCE),
    Row(f"{ALGORITHM}.use_entropy_loss", True, weights()),
    Row(f"{ALGORITHM}.entropy_loss_coef", 1.0, weights(), {f"{ALGORITHM}.use_entropy_loss": True}),
    Row(f"{ALGORITHM}.dynamic_sampling.type", "filter", metrics, UNIFORM),
    Row(
        f"{ALGORITHM}.dynamic_sampling.max_sample_batches",
        1,
        error,
        UNIFORM | {f"{ALGORITHM}.dynamic_sampling.type": "filter"},
    ),
    Row(
        f"{ALGORITHM}.dynamic_sampling.min_replace_ratio",
        0.9,
        error,
        UNIFORM
        | {
            f"{ALGORITHM}.dynamic_sampling.type": "replace",
            f"{ALGORITHM}.dynamic_sampling.max_sample_batches": 1,
            f"{ALGORITHM}.dynamic_sampling.min_replace_ratio": 0.0,
        },
    ),
    Row(f"{ALGORITHM}.overlong_buffer.len", 4, metrics),
    Row(f"{ALGORITHM}.overlong_buffer.penalty_factor", 0.5, metrics, {f"{ALGORITHM}.overlong_buffer.len": 4}),
    Row(f"{ALGORITHM}.overlong_buffer.counts", "context", metrics, {f"{ALGORITHM}.overlong_buffer.len": 4}),
    loss("cispo", "cispo.cispo_eps_clip_low", 0.001, {f"{ALGORITHM}.cispo.cispo_eps_clip_low": 0.5}),
    loss("cispo", "cispo.cispo_eps_clip_high", 0.001),
    loss("cispo", "cispo.cispo_anchor", "rollout", OTHER_NUMBERS),
    loss("sapo", "sapo.tau_pos", 5.0),
    loss("sapo", "sapo.tau_neg", 5.0),
    loss("clip_cov", "clip_cov.clip_ratio", 0.9, {f"{ALGORITHM}.clip_cov.clip_cov_lb": -5.0}),
    loss("clip_cov", "clip_cov.clip_cov_lb", -5.0, {f"{ALGORITHM}.clip_cov.clip_ratio": 0.9}),
    loss(
        "clip_cov",
        "clip_cov.clip_cov_ub",
        -4.0,
        {f"{ALGORITHM}.clip_cov.clip_ratio": 0.9, f"{ALGORITHM}.clip_cov.clip_cov_lb": -5.0},
    ),
    loss("kl_cov", "kl_cov.kl_cov_frac", 0.9),
    loss("kl_cov", "kl_cov.ppo_kl_coef", 5.0),
    loss(
        "dppo",
        "dppo.divergence",
        "binary_kl",
        {f"{ALGORITHM}.dppo.delta_low": 0.001, f"{ALGORITHM}.dppo.delta_high": 0.001},
    ),
    loss("dppo", "dppo.mask", "two_sided", OTHER_NUMBERS | {f"{ALGORITHM}.dppo.delta_low": 0.0}),
    loss("dppo", "dppo.delta_low", 1e-4),
    loss("dppo", "dppo.delta_high", 1e-4),
    loss("decoupled_ppo", "decoupled_ppo.behavior_weight_cap", 1.0, OTHER_NUMBERS),
    Row(f"{ALGORITHM}.dpo.beta", 1.0, dpo_loss),
    correction("tis_ratio_type", "token", {}),
    correction("token_tis_ratio_clip_high", 0.5, {"tis_ratio_type": "token"}),
    correction("token_tis_ratio_clip_low", 1.01, {"tis_ratio_type": "token"}),
    correction("sequence_tis_ratio_clip_high", 0.5, {"tis_ratio_type": "sequence"}),
    correction("sequence_tis_ratio_clip_low", 1.5, {"tis_ratio_type": "sequence"}),
    correction("sequence_mask_metric", "geometric", {"geo_mask_high": 1.0, "geo_mask_low": 0.5}),
    correction("geo_mask_high", 1.0, {"sequence_mask_metric": "geometric", "geo_mask_low": 0.5}),
    correction("geo_mask_low", 1.009, {"sequence_mask_metric": "geometric"}),
    correction("product_mask_high", 1.0, {"sequence_mask_metric": "product"}),
    correction("product_mask_low", 1.9, {"sequence_mask_metric": "product"}),
    correction("token_mask_is_threshold_low", 1.0, {}),
    correction("token_mask_is_threshold_high", 1.0, {}),
    correction("outlier_token_is_threshold_low", 0.9999, {}),
    correction("outlier_token_is_threshold_high", 1.0001, {}),
    Row(f"{ALGORITHM}.kl_ctrl.type", "adaptive", metrics, {**ADAPTIVE, f"{ALGORITHM}.kl_ctrl.type": "fixed"}),
    Row(f"{ALGORITHM}.kl_ctrl.kl_target", 1e-6, metrics, ADAPTIVE),
    Row(f"{ALGORITHM}.kl_ctrl.horizon", 1000, metrics, ADAPTIVE),
]

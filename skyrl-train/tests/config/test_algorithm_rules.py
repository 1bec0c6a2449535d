"""Rules between the algorithm's settings, checked before anything starts."""

import re
from typing import Any

import pytest

from skyrl_train.algorithms.advantages import AdvantageEstimatorRegistry, register_advantage_estimator
from skyrl_train.config import AlgorithmConfig, SkyRLConfig, compose_config, validate_cfg
from skyrl_train.errors import ConfigError

CRITIC = {"critic": {"model": {"path": "tiny"}}}


def checked(algorithm: dict[str, Any], trainer: dict[str, Any] | None = None, **generator: Any) -> AlgorithmConfig:
    """The algorithm's settings after all rules; no KL term unless asked for."""
    values = {
        "trainer": {"placement": {"device": "cpu"}, "algorithm": {"use_kl_loss": False} | algorithm, **(trainer or {})},
        "generator": generator,
    }
    return validate_cfg(SkyRLConfig.from_dict(values)).trainer.algorithm


@pytest.mark.parametrize(
    "algorithm, message",
    [
        # names
        ({"advantage_estimator": "grop"}, "advantage_estimator"),
        ({"policy_loss_type": "ppo"}, "policy_loss_type"),
        # KL
        ({"use_kl_in_reward": True, "use_kl_loss": True}, "would count the KL divergence twice"),
        ({"kl_ctrl": {"type": "adaptive"}}, "needs trainer.algorithm.use_kl_in_reward=true"),
        # numbers
        ({"eps_clip_low": 1.0}, "eps_clip_low=1.0"),
        ({"policy_loss_type": "dual_clip", "clip_ratio_c": 1.0}, "clip_ratio_c=1.0"),
        ({"gamma": 1.01}, "gamma must be from 0 to 1"),
        ({"lambd": -0.1}, "lambd must be from 0 to 1"),
        ({"value_clip": 0}, "value_clip"),
        ({"first_ratio_tolerance": 0}, "first_ratio_tolerance"),
        ({"sapo": {"tau_neg": 0}}, "sapo.tau_neg"),
        ({"clip_cov": {"clip_cov_lb": 6.0}}, "clip_cov.clip_cov_lb=6.0"),
        ({"kl_cov": {"kl_cov_frac": 2}}, "kl_cov_frac"),
        ({"dppo": {"delta_low": -1}}, "dppo.delta_low"),
        # estimators
        ({"advantage_estimator": "gae"}, "trainer.critic.model.path"),
        ({"advantage_estimator": "maxrl", "use_kl_in_reward": True}, "maxrl divides by the mean reward"),
        ({"advantage_estimator": "maxrl", "overlong_buffer": {"len": 8}}, "overlong_buffer.len=8"),
        # losses
        ({"policy_loss_type": "dpo"}, "main_dpo"),
        ({"policy_loss_type": "cross_entropy"}, "does not use advantages"),
        # off-policy correction
        (
            {"off_policy_correction": {"geo_mask_low": 1.1}},
            "geo_mask_low=1.1",
        ),
        (
            {"off_policy_correction": {"outlier_token_is_threshold_low": 2.0, "outlier_token_is_threshold_high": 1.0}},
            "the range would be empty",
        ),
        (
            {"off_policy_correction": {"token_tis_ratio_clip_low": 3.0}},
            "token_tis_ratio_clip_low=3.0",
        ),
        ({"off_policy_correction": {"sequence_tis_ratio_clip_low": -1}}, "sequence_tis_ratio_clip_low"),
        (
            {
                "off_policy_correction": {"tis_ratio_type": "token"},
                "policy_loss_type": "cispo",
                "cispo": {"cispo_anchor": "rollout"},
            },
            "tis_ratio_type=token",
        ),
        ({"off_policy_correction": {"token_tis_ratio_clip_high": 0}}, "token_tis_ratio_clip_high"),
        (
            {"off_policy_correction": {"tis_ratio_type": "token"}, "policy_loss_type": "rollout_is"},
            "tis_ratio_type=token",
        ),
        (
            {"off_policy_correction": {"tis_ratio_type": "sequence"}, "policy_loss_type": "kl_cov"},
            "tis_ratio_type=sequence",
        ),
        ({"use_tis": True}, "trainer.algorithm.tis_imp_ratio_cap"),
        ({"tis_imp_ratio_cap": 2.0}, "trainer.algorithm.use_tis=true"),
        (
            {"use_tis": True, "tis_imp_ratio_cap": 2.0, "off_policy_correction": {"tis_ratio_type": "sequence"}},
            "use_tis=true",
        ),
        # sampling
        ({"overlong_buffer": {"len": 1025}}, "overlong_buffer.len=1025"),
        ({"overlong_buffer": {"len": 0}}, "overlong_buffer.len"),
        ({"dynamic_sampling": {"min_replace_ratio": 1.5}}, "min_replace_ratio"),
    ],
)
def test_contradictory_settings_are_rejected(algorithm: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        checked(algorithm)


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "maxrl", "reinforce++_baseline", "turn_grpo"])
def test_group_relative_estimator_rejects_single_sample_groups(estimator: str):
    message = f"advantage_estimator={re.escape(estimator)} compares .*n_samples_per_prompt=1"
    with pytest.raises(ConfigError, match=message):
        checked({"advantage_estimator": estimator}, n_samples_per_prompt=1)
    checked({"advantage_estimator": "reinforce++"}, n_samples_per_prompt=1)


@pytest.mark.parametrize("sampling", [{"dynamic_sampling": {"type": "filter"}}, {"zero_variance_filter": True}])
def test_informative_group_requires_two_samples(sampling: dict[str, Any]):
    with pytest.raises(ConfigError, match=r"n_samples_per_prompt"):
        checked({"advantage_estimator": "reinforce++"} | sampling, n_samples_per_prompt=1)
    checked(sampling)


@pytest.mark.parametrize("loss", ["rollout_is", "dppo", "decoupled_ppo"])
def test_rollout_losses_require_rollout_log_probs(loss: str):
    with pytest.raises(ConfigError, match=f"policy_loss_type={loss} .*logprobs=null"):
        checked({"policy_loss_type": loss}, sampling_params={"logprobs": None})
    checked({"policy_loss_type": loss})


def test_rollout_anchored_cispo_requires_rollout_log_probs():
    cispo = {"policy_loss_type": "cispo", "cispo": {"cispo_anchor": "rollout"}}
    with pytest.raises(ConfigError, match="policy_loss_type=cispo"):
        checked(cispo, sampling_params={"logprobs": None})
    checked(cispo)
    checked({"policy_loss_type": "cispo"}, sampling_params={"logprobs": None})


def test_off_policy_correction_requires_rollout_log_probs():
    correction = {"off_policy_correction": {"sequence_mask_metric": "geometric"}}
    with pytest.raises(ConfigError, match="off_policy_correction"):
        checked(correction, sampling_params={"logprobs": None})
    checked(correction)
    checked(correction | {"policy_loss_type": "clip_cov"})  # masks go with every loss


@pytest.mark.parametrize("estimator, trainer", [("gae", CRITIC), ("reinforce++", {})])
def test_step_wise_samples_require_outcome_estimator(estimator: str, trainer: dict[str, Any]):
    with pytest.raises(ConfigError, match="step_wise_trajectories"):
        checked({"advantage_estimator": estimator}, trainer, step_wise_trajectories=True)
    checked({"advantage_estimator": "turn_grpo"}, step_wise_trajectories=True)


def test_merged_turns_reject_turn_level_comparison():
    with pytest.raises(ConfigError, match="turn_grpo"):
        checked({"advantage_estimator": "turn_grpo"}, step_wise_trajectories=True, merge_stepwise_output=True)
    checked({}, step_wise_trajectories=True, merge_stepwise_output=True)


def test_dynamic_sampling_rejects_step_wise_trajectories():
    with pytest.raises(ConfigError, match=r"dynamic_sampling\.type=replace"):
        checked({"dynamic_sampling": {"type": "replace"}}, step_wise_trajectories=True)


def test_critic_is_rejected_when_estimator_ignores_values():
    checked({"advantage_estimator": "gae"}, CRITIC)
    with pytest.raises(ConfigError, match="advantage_estimator=grpo"):
        checked({}, CRITIC)

    def with_values(**_: Any) -> None: ...

    register_advantage_estimator("with_values")(with_values)  # type: ignore[arg-type]
    try:
        checked({"advantage_estimator": "with_values"}, CRITIC)  # one of a user's own may
    finally:
        AdvantageEstimatorRegistry.unregister("with_values")


def test_deprecated_token_tis_maps_to_new_setting_with_warning():
    with pytest.warns(FutureWarning, match="use_tis"):
        algorithm = checked({"use_tis": True, "tis_imp_ratio_cap": 3.0})
    assert algorithm.off_policy_correction.tis_ratio_type == "token"
    assert algorithm.off_policy_correction.token_tis_ratio_clip_high == 3.0
    assert not algorithm.use_tis  # so that settings which were checked can be checked again, without a word


@pytest.mark.parametrize("plus", ["", "+"])
def test_overlong_buffer_override_works_with_and_without_plus(plus: str):
    """Scripts for other releases append it: there it is no part of the defaults."""
    buffer = f"{plus}trainer.algorithm.overlong_buffer"
    composed = compose_config([f"{buffer}.len=512", f"{buffer}.penalty_factor=0.5"])
    settings = SkyRLConfig.from_dict(composed).trainer.algorithm.overlong_buffer
    assert (settings.len, settings.penalty_factor) == (512, 0.5)

"""Rules of the algorithm: valid combinations of estimator, loss and correction, and their requirements."""

import warnings

from skyrl_train.config.bounds import check_bounds
from skyrl_train.config.config import SkyRLConfig
from skyrl_train.config.generation import GeneratorConfig
from skyrl_train.config.requirements import AdvantageEstimatorRegistry, PolicyLossRegistry, TokenSelectorRegistry
from skyrl_train.config.rules.checks import check_not_negative, check_order, check_positive, check_rule, check_shares

_NAME = "trainer.algorithm"
_CORRECTION = f"{_NAME}.off_policy_correction"
_POSITIVE = (
    "max_seq_len",
    "kl_ctrl.horizon",
    "kl_ctrl.kl_target",
    "value_clip",
    "first_ratio_tolerance",
    "max_rollout_gap",
    "overlong_buffer.len",
    "off_policy_correction.token_tis_ratio_clip_high",
    "off_policy_correction.sequence_tis_ratio_clip_high",
    "off_policy_correction.geo_mask_high",
    "off_policy_correction.product_mask_high",
    "off_policy_correction.token_mask_is_threshold_high",
    "off_policy_correction.outlier_token_is_threshold_high",
)
_NOT_NEGATIVE = (
    "kl_loss_coef",
    "entropy_loss_coef",
    "zero_variance_filter_tol",
    "eps_clip_low",
    "eps_clip_high",
    "overlong_buffer.penalty_factor",
    "off_policy_correction.token_tis_ratio_clip_low",
    "off_policy_correction.sequence_tis_ratio_clip_low",
)
_SHARES = ("gamma", "lambd", "dynamic_sampling.min_replace_ratio")
_ORDERED = tuple(
    (f"off_policy_correction.{name}_low", f"off_policy_correction.{name}_high")
    for name in (
        "token_tis_ratio_clip",
        "sequence_tis_ratio_clip",
        "geo_mask",
        "product_mask",
        "token_mask_is_threshold",
        "outlier_token_is_threshold",
    )
)


def check_algorithm(config: SkyRLConfig) -> None:
    """Check all rules of this file."""
    _check_numbers(config)
    _check_kl(config)
    _check_registered(config)
    _check_estimator(config)
    _check_loss(config)
    _check_off_policy_correction(config)
    _check_sampling(config)


def replace_deprecated_settings(config: SkyRLConfig) -> None:
    """Replace deprecated settings by their current form, with a warning."""
    algorithm = config.trainer.algorithm
    correction, cap = algorithm.off_policy_correction, algorithm.tis_imp_ratio_cap
    if not algorithm.use_tis:
        check_rule(
            cap == -1.0,
            f"{_NAME}.tis_imp_ratio_cap={cap} is read only with {_NAME}.use_tis=true; use "
            f"{_CORRECTION}.tis_ratio_type=token and {_CORRECTION}.token_tis_ratio_clip_high={cap}",
        )
        return
    check_rule(cap > 0, f"{_NAME}.use_tis=true needs {_NAME}.tis_imp_ratio_cap, the cap of a ratio, above 0; got {cap}")
    check_rule(
        correction.tis_ratio_type in (None, "token"),
        f"{_NAME}.use_tis=true means {_CORRECTION}.tis_ratio_type=token, but it is {correction.tis_ratio_type}; "
        "remove use_tis",
    )
    warnings.warn(
        f"{_NAME}.use_tis is deprecated: using {_CORRECTION}.tis_ratio_type=token and "
        f"{_CORRECTION}.token_tis_ratio_clip_high={cap}",
        FutureWarning,
        stacklevel=4,
    )
    correction.tis_ratio_type, correction.token_tis_ratio_clip_high = "token", cap
    algorithm.use_tis, algorithm.tis_imp_ratio_cap = False, -1.0


def _check_numbers(config: SkyRLConfig) -> None:
    algorithm = config.trainer.algorithm
    check_positive(config, (f"{_NAME}.{name}" for name in _POSITIVE))
    check_not_negative(config, (f"{_NAME}.{name}" for name in _NOT_NEGATIVE))
    check_shares(config, (f"{_NAME}.{name}" for name in _SHARES))
    for low, high in _ORDERED:
        check_order(config, f"{_NAME}.{low}", f"{_NAME}.{high}")
    for name, section in algorithm.sections.items():
        check_bounds(section, f"{_NAME}.{name}")
    check_rule(
        algorithm.eps_clip_low < 1,
        f"{_NAME}.eps_clip_low={algorithm.eps_clip_low} must be below 1: the lower bound of the ratio is "
        "1 - eps_clip_low",
    )
    for setting, bound in PolicyLossRegistry.get_requirements(algorithm.policy_loss_type).above:
        value = getattr(algorithm, setting)
        check_rule(
            value > bound,
            f"{_NAME}.{setting}={value} must be above {bound:g} with {_NAME}.policy_loss_type="
            f"{algorithm.policy_loss_type}",
        )


def _check_kl(config: SkyRLConfig) -> None:
    algorithm = config.trainer.algorithm
    check_rule(
        not (algorithm.use_kl_in_reward and algorithm.use_kl_loss),
        f"{_NAME}.use_kl_in_reward and {_NAME}.use_kl_loss are both true and would count the KL divergence twice; set "
        "one of them to false",
    )
    check_rule(
        algorithm.kl_ctrl.type == "fixed" or algorithm.use_kl_in_reward,
        f"{_NAME}.kl_ctrl.type=adaptive controls the KL penalty in the reward; it needs {_NAME}.use_kl_in_reward=true "
        "(and use_kl_loss=false)",
    )


def _check_registered(config: SkyRLConfig) -> None:
    algorithm = config.trainer.algorithm
    for setting, name, registry, register in (
        ("advantage_estimator", algorithm.advantage_estimator, AdvantageEstimatorRegistry, "advantage_estimator"),
        ("policy_loss_type", algorithm.policy_loss_type, PolicyLossRegistry, "policy_loss"),
    ):
        available = registry.list_available()
        check_rule(
            name in available,
            f"{_NAME}.{setting} must be one of {', '.join(available)}; got {name!r} (register a custom one with "
            f"skyrl_train.utils.ppo_utils.register_{register} before the settings are validated)",
        )


def _check_estimator(config: SkyRLConfig) -> None:
    algorithm, generator = config.trainer.algorithm, config.generator
    estimator, critic = algorithm.advantage_estimator, config.trainer.critic.model.path
    requires = AdvantageEstimatorRegistry.get_requirements(estimator)
    chosen = f"{_NAME}.advantage_estimator={estimator}"
    check_rule(
        not requires.critic or critic is not None,
        f"{chosen} needs a critic; set trainer.critic.model.path (often the policy's model)",
    )
    check_rule(
        critic is None or requires.critic is not False,
        f"trainer.critic.model.path={critic} would train a critic that {chosen} does not use; remove it, or use "
        f"{' or '.join(_list_estimators_with_critic())}",
    )
    check_rule(
        not requires.groups or generator.n_samples_per_prompt > 1,
        f"{chosen} compares responses to one prompt, but "
        f"generator.n_samples_per_prompt={generator.n_samples_per_prompt} samples only one; set it to at least 2, or "
        "use reinforce++ or gae",
    )
    check_rule(
        not requires.whole_trajectories or not generator.has_rows_of_steps,
        f"{chosen} needs all tokens of a trajectory in one row, but {_get_step_setting(generator)} splits "
        "trajectories into rows; use another estimator, or turn the splitting off",
    )
    check_rule(
        not requires.single_turns or not generator.merge_stepwise_output,
        f"{chosen} compares turns, but generator.merge_stepwise_output=true merges several turns into a row; set the "
        "latter to false",
    )
    check_rule(
        not requires.nonnegative_scores or not algorithm.use_kl_in_reward,
        f"{chosen} divides by the mean reward of a prompt, which {_NAME}.use_kl_in_reward=true can make negative; set "
        f"{_NAME}.use_kl_loss=true instead",
    )
    check_rule(
        not requires.nonnegative_scores or algorithm.overlong_buffer.len is None,
        f"{chosen} divides by the mean reward of a prompt, which the penalty of "
        f"{_NAME}.overlong_buffer.len={algorithm.overlong_buffer.len} can make negative; remove the penalty",
    )


def _list_estimators_with_critic() -> list[str]:
    registrations = AdvantageEstimatorRegistry.list_registrations()
    return sorted(name for name, registration in registrations.items() if registration.requires.critic)


def _check_loss(config: SkyRLConfig) -> None:
    algorithm = config.trainer.algorithm
    requires = PolicyLossRegistry.get_requirements(algorithm.policy_loss_type)
    chosen = f"{_NAME}.policy_loss_type={algorithm.policy_loss_type}"
    check_rule(
        not requires.pairs,
        f"{chosen} is for preference pairs; train on them with python -m skyrl_train.entrypoints.main_dpo",
    )
    check_rule(
        requires.advantages,
        f"{chosen} does not use advantages, so rewards would have no effect; use importance_sampling for the plain "
        "policy gradient, or python -m skyrl_train.entrypoints.main_sft for demonstrations",
    )
    check_rule(
        not algorithm.loss_reads_rollout_log_probs or config.generator.sampling_params.logprobs is not None,
        f"{chosen} needs the engine's log-probs, but generator.sampling_params.logprobs=null does not record them; "
        "set it to 0",
    )
    reductions = requires.loss_reductions
    check_rule(
        reductions is None or algorithm.loss_reduction in reductions,
        f"{chosen} is defined with {_NAME}.loss_reduction={' or '.join(reductions or ())}; got "
        f"{algorithm.loss_reduction}",
    )


def _check_off_policy_correction(config: SkyRLConfig) -> None:
    algorithm = config.trainer.algorithm
    correction, loss = algorithm.off_policy_correction, algorithm.policy_loss_type
    check_rule(
        not correction.is_on or config.generator.sampling_params.logprobs is not None,
        f"{_CORRECTION} needs the engine's log-probs, but generator.sampling_params.logprobs=null does not record "
        "them; set it to 0",
    )
    if correction.tis_ratio_type is None:
        return
    check_rule(
        not algorithm.loss_reads_rollout_log_probs,
        f"{_CORRECTION}.tis_ratio_type={correction.tis_ratio_type} and {_NAME}.policy_loss_type={loss} would both "
        "correct for the behavior policy; set tis_ratio_type=null",
    )
    check_rule(
        loss not in TokenSelectorRegistry,
        f"{_CORRECTION}.tis_ratio_type={correction.tis_ratio_type} is not defined with "
        f"{_NAME}.policy_loss_type={loss}, which selects tokens by unweighted covariances; set tis_ratio_type=null "
        "(masks can be kept)",
    )


def _check_sampling(config: SkyRLConfig) -> None:
    algorithm, generator = config.trainer.algorithm, config.generator
    buffer, limit = algorithm.overlong_buffer.len, generator.sampling_params.max_generate_length
    check_rule(
        buffer is None or buffer <= limit,
        f"{_NAME}.overlong_buffer.len={buffer} must be at most generator.sampling_params.max_generate_length={limit}: "
        "the penalty applies to the last tokens of the response",
    )
    kind = algorithm.dynamic_sampling.type
    for setting, is_on in (
        (f"dynamic_sampling.type={kind}", kind is not None),
        ("zero_variance_filter=true", algorithm.zero_variance_filter),
    ):
        check_rule(
            not is_on or generator.n_samples_per_prompt > 1,
            f"{_NAME}.{setting} selects prompts whose responses differ in reward, but "
            f"generator.n_samples_per_prompt={generator.n_samples_per_prompt} samples one response per prompt; set it "
            "to at least 2, or turn this off",
        )
    check_rule(
        kind is None or not generator.has_rows_of_steps,
        f"{_NAME}.dynamic_sampling.type={kind} selects full trajectories, but {_get_step_setting(generator)} trains "
        f"on parts of them as separate samples; use {_NAME}.zero_variance_filter instead",
    )


def _get_step_setting(generator: GeneratorConfig) -> str:
    """Return the setting that makes a row less than a whole trajectory."""
    if generator.task is not None:
        return f"generator.task={generator.task}"
    if generator.harness.is_on:
        return "generator.harness"
    return "generator.step_wise_trajectories=true"

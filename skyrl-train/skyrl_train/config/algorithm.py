"""Settings of the training objective."""

from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from skyrl_train.config.base import BaseConfig
from skyrl_train.config.registry import Registration
from skyrl_train.config.requirements import AdvantageEstimatorRegistry, PolicyLossRegistry
from skyrl_train.config.typed import SECTIONS
from skyrl_train.errors import ConfigError

Section = TypeVar("Section")


@dataclass(kw_only=True)
class KLCtrlConfig(BaseConfig):
    """Controller of the KL coefficient when KL is part of the reward."""

    type: Literal["fixed", "adaptive"] = "fixed"
    """`adaptive` steers towards `kl_target` (https://arxiv.org/abs/1909.08593, section 2.2); `fixed` stays."""

    kl_target: float = 0.1
    """KL divergence that the adaptive controller steers towards."""

    horizon: int = 10000
    """Number of samples over which the adaptive controller corrects an error; larger is slower."""


@dataclass(kw_only=True)
class OffPolicyCorrectionConfig(BaseConfig):
    """Correction for a mismatch between the log-probs of rollout engine and trainer, caused by lower precision or older
    weights of the engine. rho is the ratio pi_trainer / pi_engine of a token at the start of the step.
    """

    tis_ratio_type: Literal["token", "sequence"] | None = None
    """Truncated importance sampling: multiply the loss of a token by its own rho, or by the product of rho over its
    sequence, truncated at the upper bound below. null: off."""

    token_tis_ratio_clip_high: float = 2.0
    """Upper bound of a token's ratio."""

    token_tis_ratio_clip_low: float = 0.0
    """Lower bound of a token's ratio; smaller ratios are raised to it. 0: no lower bound."""

    sequence_tis_ratio_clip_high: float = 5.0
    """Upper bound of a sequence's ratio."""

    sequence_tis_ratio_clip_low: float = 0.0
    """Lower bound of a sequence's ratio; smaller ratios are raised to it. 0: no lower bound."""

    sequence_mask_metric: Literal["product", "geometric"] | None = None
    """Mask out whole sequences by the product of their tokens' ratios, or by the geometric mean. null: off."""

    geo_mask_high: float = 1.01
    """Sequences with a larger geometric mean are masked out."""

    geo_mask_low: float = 0.99
    """Sequences with a smaller geometric mean are masked out."""

    product_mask_high: float = 2.0
    """Sequences with a larger product are masked out."""

    product_mask_low: float = 0.5
    """Sequences with a smaller product are masked out."""

    token_mask_is_threshold_low: float | None = None
    """Tokens with a smaller ratio are masked out (the rest of their sequence stays). null: no lower bound."""

    token_mask_is_threshold_high: float | None = None
    """Tokens with a larger ratio are masked out. null: no upper bound."""

    outlier_token_is_threshold_low: float | None = None
    """Sequences in which any token has a smaller ratio (1e-4, say) are masked out. null: no lower bound."""

    outlier_token_is_threshold_high: float | None = None
    """Sequences in which any token has a larger ratio (100, say) are masked out. null: no upper bound."""

    @property
    def is_on(self) -> bool:
        """Whether any correction or mask is enabled."""
        thresholds = (
            self.tis_ratio_type,
            self.sequence_mask_metric,
            self.token_mask_is_threshold_low,
            self.token_mask_is_threshold_high,
            self.outlier_token_is_threshold_low,
            self.outlier_token_is_threshold_high,
        )
        return any(threshold is not None for threshold in thresholds)


@dataclass(kw_only=True)
class DynamicSamplingConfig(BaseConfig):
    """Handling of prompts with equal rewards for all responses (DAPO, https://arxiv.org/abs/2503.14476)."""

    type: Literal["filter", "replace"] | None = None
    """`filter` drops such prompts and samples further prompts until the batch is full. `replace` substitutes copies of
    other prompts of the batch. null: they stay in the batch (with advantage 0)."""

    max_sample_batches: int = 30
    """Maximum number of batches sampled to fill one training batch; the run ends with an error beyond it. <= 0: no
    limit."""

    min_replace_ratio: float = 0.3
    """`replace` samples the whole batch again if at most this fraction of its prompts can be kept."""


@dataclass(kw_only=True)
class OverlongBufferConfig(BaseConfig):
    """Soft penalty on responses near a length limit L (DAPO, https://arxiv.org/abs/2503.14476, eq. 13). In a multi-turn
    conversation the whole response counts. The step plan logs the token counts at which the penalty begins and ends.
    """

    len: int | None = None
    """Tokens before L over which the penalty rises from 0 to `penalty_factor`. null: no penalty."""

    penalty_factor: float = 1.0
    """Amount subtracted from the reward of a response of length L."""

    counts: Literal["response", "context"] = "response"
    """Length that is compared with L. `response`: tokens of the response, with L =
    `generator.sampling_params.max_generate_length` (as in the paper). `context`: tokens of prompt and response, with L
    = `max_generate_length` + `generator.max_input_length`."""


def _list_registrations() -> list[Registration[Any, Any]]:
    return [
        *PolicyLossRegistry.list_registrations().values(),
        *AdvantageEstimatorRegistry.list_registrations().values(),
    ]


def list_registered_sections() -> dict[str, type[object]]:
    """Return the settings dataclasses of all registered losses and estimators that have settings, by name.

    Raises:
        ConfigError: a section cannot be a setting under its name.
    """
    declared = {field.name for field in fields(_DeclaredSettings)}
    sections: dict[str, type[Any]] = {}
    for entry in _list_registrations():
        if entry.settings is None:
            continue
        if not entry.name.isidentifier() or entry.name in declared or entry.name in sections:
            raise ConfigError(
                f"'{entry.name}' cannot have settings, which would be trainer.algorithm.{entry.name}: "
                + (
                    "the name is not a valid setting name"
                    if not entry.name.isidentifier()
                    else "a setting with this name exists already"
                )
                + "; register it under another name"
            )
        sections[entry.name] = entry.settings
    return sections


@dataclass(kw_only=True)
class _DeclaredSettings(BaseConfig):
    """Objective of the run: losses, advantages, corrections."""

    advantage_estimator: str = "grpo"
    """Registered name of the function that turns rewards into advantages: `grpo`, `rloo`, `maxrl`, `reinforce++`,
    `reinforce++_baseline`, `gae` (needs a critic), `turn_grpo`, `token_reward`, or a custom one."""

    policy_loss_type: str = "regular"
    """Registered name of the policy loss: `regular` (PPO's clipped surrogate), `dual_clip`, `gspo`, `cispo`, `sapo`,
    `clip_cov`, `kl_cov`, `rollout_is`, `dppo`, `decoupled_ppo`, `importance_sampling`, `cross_entropy`, `dpo` (for
    preference pairs), or a custom one."""

    loss_reduction: Literal["token_mean", "sequence_mean", "seq_mean_token_sum_norm", "prompt_mean"] = "token_mean"
    """Reduction of the token losses of a mini-batch to a scalar. `token_mean`: mean over all tokens. `sequence_mean`:
    mean over sequences of the token mean of each. `seq_mean_token_sum_norm`: mean over sequences of the token sum of
    each, divided by `max_seq_len` (Dr. GRPO). `prompt_mean`: mean over prompts of the token mean over all responses to
    each. The turns or branches of one trajectory are one sequence. The reduction spans the whole mini-batch, whatever
    the micro-batches and workers."""

    max_seq_len: int | None = None
    """Divisor of `seq_mean_token_sum_norm`, in tokens.
    null: `generator.max_input_length` + `generator.sampling_params.max_generate_length`."""

    grpo_norm_by_std: bool = True
    """Divide GRPO advantages by the standard deviation of the rewards of their group."""

    advantage_batch_normalize: bool = False
    """Normalize the advantages of a batch to mean 0 and standard deviation 1, over response tokens."""

    gamma: float = 1.0
    """Discount factor per token (`reinforce++`, `gae`) or per turn (`turn_grpo`)."""

    lambd: float = 1.0
    """Lambda of `gae`: 1 uses the returns alone, 0 the critic alone."""

    value_clip: float = 0.2
    """Clipping range of the critic's loss: a value moves at most this far from its prediction at the start of the
    step.
    """

    value_head_prefix: str = "value_head"
    """Name of the critic's output layer in its checkpoints."""

    zero_variance_filter: bool = False
    """Exclude prompts from training if all their responses have the same reward."""

    zero_variance_filter_tol: float = 1e-6
    """Largest difference between the rewards of a prompt that count as the same, with `zero_variance_filter` and
    `trainer.fully_async.sample_full_batch`."""

    dynamic_sampling: DynamicSamplingConfig = field(default_factory=DynamicSamplingConfig)

    overlong_buffer: OverlongBufferConfig = field(default_factory=OverlongBufferConfig)

    eps_clip_low: float = 0.2
    """The probability ratio is clipped at 1 - this."""

    eps_clip_high: float = 0.2
    """The probability ratio is clipped at 1 + this."""

    clip_ratio_c: float = 3.0
    """Upper bound of the loss of tokens with negative advantage A, as a multiple of |A| (`policy_loss_type=dual_clip`):
    the loss is at most -clip_ratio_c * A."""

    off_policy_correction: OffPolicyCorrectionConfig = field(default_factory=OffPolicyCorrectionConfig)

    use_tis: bool = False
    """Deprecated form of `off_policy_correction.tis_ratio_type=token` with the cap `tis_imp_ratio_cap`."""

    tis_imp_ratio_cap: float = -1.0
    """Upper bound of a token's ratio, with `use_tis`."""

    first_ratio_tolerance: float | None = None
    """Tolerance of the check that the probability ratio of every token is 1 before the first optimizer step of a
    training step; a larger deviation raises an alarm. null: 1e-4 in float32, 0.2 with `trainer.bf16`."""

    max_rollout_gap: float | None = 5.0
    """Bound on the gap between engine and trainer: the mean absolute difference of their log-probs over the tokens of a
    step, in nats. A step above it ends the run before its checkpoint. Staleness and rounding explain some tenths. null:
    no bound."""

    use_kl_loss: bool = True
    """Add the KL divergence to the reference model to the loss. Excludes `use_kl_in_reward`."""

    use_kl_in_reward: bool = False
    """Subtract the KL divergence to the reference model from the rewards. Excludes `use_kl_loss`."""

    kl_loss_coef: float = 0.001
    """Weight of the KL divergence, in the loss or in the reward (there the initial value of the controller)."""

    kl_estimator_type: Literal["k1", "k2", "k3", "k3+", "abs"] = "k3"
    """Estimator of the KL divergence from sampled tokens (http://joschu.net/blog/kl-approx.html). `k3+` has the value
    of `k3` and the gradient of `k2` (straight-through), which equals the gradient of the KL divergence."""

    kl_ctrl: KLCtrlConfig = field(default_factory=KLCtrlConfig)

    use_entropy_loss: bool = False
    """Add an entropy bonus: subtract the entropy, times `entropy_loss_coef`, from the loss."""

    entropy_loss_coef: float = 0.01
    """Weight of the entropy bonus."""

    sections: dict[str, Any] = field(default_factory=dict, metadata={SECTIONS: list_registered_sections})
    """Settings of registered losses and advantage estimators, by registered name."""

    def __post_init__(self) -> None:
        # Built-in sections always exist because they belong to the fingerprint of every run. A custom section exists
        # only if its loss or estimator is used: other registrations of a module must not change the experiment.
        used = (self.policy_loss_type, self.advantage_estimator)
        for entry in _list_registrations():
            if entry.settings is not None and (entry.is_builtin or entry.name in used):
                self.sections.setdefault(entry.name, entry.settings())

    @property
    def loss_reads_rollout_log_probs(self) -> bool:
        """Whether the policy loss itself uses the log-probs reported by the rollout engine."""
        requires = PolicyLossRegistry.get_requirements(self.policy_loss_type)
        if requires.rollout_log_probs_with is None:
            return requires.rollout_log_probs
        setting, choice = requires.rollout_log_probs_with
        return attrgetter(setting)(self) == choice

    @property
    def uses_reference_model(self) -> bool:
        """Whether a reference model is loaded at all."""
        loss = PolicyLossRegistry.get_requirements(self.policy_loss_type)
        return self.use_kl_loss or self.use_kl_in_reward or loss.reference_model


class AlgorithmConfig(_DeclaredSettings):
    """Settings of the RL objective (`trainer.algorithm`)."""

    if not TYPE_CHECKING:  # type checkers know the declared settings, and use `section` for the others

        def __init__(self, **values: Any):
            declared = {field.name for field in fields(self)}
            sections = {
                name: values.pop(name) for name in list_registered_sections() if name in values.keys() - declared
            }
            super().__init__(**values | {"sections": values.get("sections", {}) | sections})

        def __getattr__(self, name: str) -> Any:
            """Return the settings of the loss or estimator `name`. Called for names that are not declared settings."""
            sections = self.__dict__.get("sections", {})
            if name not in sections:
                settings = None if name.startswith("_") else list_registered_sections().get(name)
                if settings is None:
                    raise AttributeError(f"trainer.algorithm has no setting {name}")
                sections[name] = settings()
            return sections[name]

        def __setattr__(self, name: str, value: object) -> None:
            sections = self.__dict__.get("sections", {})
            if name in sections:
                sections[name] = value
            else:
                super().__setattr__(name, value)

    def section(self, settings: type[Section]) -> Section:
        """Return the settings of this type, which belong to the loss or estimator registered with it."""
        for value in self.sections.values():
            if isinstance(value, settings):
                return value
        for name, registered in list_registered_sections().items():
            if registered is settings:
                return self.sections.setdefault(name, settings())
        raise KeyError(f"no registered loss or estimator has settings of the type {settings.__name__}")

"""Settings of the algorithm: what is optimized."""

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
    """KL divergence that the adaptive controller aims at."""

    horizon: int = 10000
    """Samples over which the adaptive controller corrects an error; larger is slower."""


@dataclass(kw_only=True)
class OffPolicyCorrectionConfig(BaseConfig):
    """Correction of rollouts whose log-probs are not the trainer's: an engine of lower precision, or older weights. rho
    is the ratio pi_trainer / pi_engine of a token at the start of the step."""

    tis_ratio_type: Literal["token", "sequence"] | None = None
    """Truncated importance sampling: multiply the loss of a token by its own rho, or by the product of its sequence's,
    at most the cap below. null: no."""

    token_tis_ratio_clip_high: float = 2.0
    """Cap of a token's ratio."""

    token_tis_ratio_clip_low: float = 0.0
    """Smallest weight of a token: one of a smaller ratio counts as if it had this. 0: no lower bound."""

    sequence_tis_ratio_clip_high: float = 5.0
    """Cap of a sequence's ratio."""

    sequence_tis_ratio_clip_low: float = 0.0
    """Smallest weight of a sequence's tokens. 0: no lower bound."""

    sequence_mask_metric: Literal["product", "geometric"] | None = None
    """Leave out whole sequences by the product of their tokens' ratios, or by their geometric mean. null: no."""

    geo_mask_high: float = 1.01
    """Sequences with a larger geometric mean are left out."""

    geo_mask_low: float = 0.99
    """Sequences with a smaller geometric mean are left out."""

    product_mask_high: float = 2.0
    """Sequences with a larger product are left out."""

    product_mask_low: float = 0.5
    """Sequences with a smaller product are left out."""

    token_mask_is_threshold_low: float | None = None
    """Tokens with a smaller ratio are left out (the rest of their sequence stays). null: no lower bound."""

    token_mask_is_threshold_high: float | None = None
    """Tokens with a larger ratio are left out. null: no upper bound."""

    outlier_token_is_threshold_low: float | None = None
    """Sequences in which any token has a smaller ratio (1e-4, say) are left out. null: no lower bound."""

    outlier_token_is_threshold_high: float | None = None
    """Sequences in which any token has a larger ratio (100, say) are left out. null: no upper bound."""

    @property
    def is_on(self) -> bool:
        """Whether any of it is asked for."""
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
    """Treatment of prompts whose answers all have the same reward (DAPO, https://arxiv.org/abs/2503.14476)."""

    type: Literal["filter", "replace"] | None = None
    """`filter` drops such prompts and samples further ones until the batch is full; `replace` puts copies of others in
    their place. null: they stay (and have advantage 0)."""

    max_sample_batches: int = 30
    """The run ends with an error if this many batches of prompts do not fill one. <= 0: no limit."""

    min_replace_ratio: float = 0.3
    """`replace` samples the batch anew if not more than this share of its prompts can be kept."""


@dataclass(kw_only=True)
class OverlongBufferConfig(BaseConfig):
    """DAPO's soft penalty on answers near a length limit L (https://arxiv.org/abs/2503.14476, eq. 13). In a
    conversation of several turns the whole response counts. The step plan says at which token it begins and ends."""

    len: int | None = None
    """Tokens before L over which the penalty rises from 0 to `penalty_factor`. null: no penalty."""

    penalty_factor: float = 1.0
    """What is taken off the reward of an answer of length L."""

    counts: Literal["response", "context"] = "response"
    """`response` counts the response, up to L = `generator.sampling_params.max_generate_length` (the paper). `context`
    counts prompt and response, up to L = that + `generator.max_input_length`: milder, as few prompts are that long."""


def _registrations() -> list[Registration[Any, Any]]:
    return [*PolicyLossRegistry.registrations().values(), *AdvantageEstimatorRegistry.registrations().values()]


def registered_sections() -> dict[str, type[object]]:
    """Return name -> dataclass of the settings of every registered loss and estimator that has some.

    Raises:
        ConfigError: a section cannot be a setting under its name.
    """
    declared = {field.name for field in fields(_DeclaredSettings)}
    sections: dict[str, type[Any]] = {}
    for entry in _registrations():
        if entry.settings is None:
            continue
        if not entry.name.isidentifier() or entry.name in declared or entry.name in sections:
            raise ConfigError(
                f"'{entry.name}' cannot have settings, which would be trainer.algorithm.{entry.name}: "
                + ("that is no name of a setting" if not entry.name.isidentifier() else "there is such a setting")
                + "; register it under another name"
            )
        sections[entry.name] = entry.settings
    return sections


@dataclass(kw_only=True)
class _DeclaredSettings(BaseConfig):
    """Objective of the run: losses, advantages, corrections."""

    advantage_estimator: str = "grpo"
    """Registered name of the function that turns rewards into advantages: `grpo`, `rloo`, `maxrl`,
    `reinforce++`, `reinforce++_baseline`, `gae` (needs a critic), `turn_grpo`, `token_reward`, or one of your own."""

    policy_loss_type: str = "regular"
    """Registered name of the policy loss: `regular` (PPO's clipped surrogate), `dual_clip`, `gspo`, `cispo`, `sapo`,
    `clip_cov`, `kl_cov`, `rollout_is`, `dppo`, `decoupled_ppo`, `importance_sampling`, `cross_entropy`, `dpo` (for
    preference pairs), or one of your own."""

    loss_reduction: Literal["token_mean", "sequence_mean", "seq_mean_token_sum_norm", "prompt_mean"] = "token_mean"
    """How the losses of a mini-batch's tokens become one number: the mean over tokens; the mean over sequences of each
    one's token mean; the mean over sequences of each one's token sum divided by `max_seq_len` (Dr. GRPO); or the mean
    over prompts of the token mean over all answers to one. Always
    over the whole mini-batch, so neither micro-batches nor workers change it."""

    max_seq_len: int | None = None
    """Divisor of `seq_mean_token_sum_norm`, in tokens.
    null: `generator.max_input_length` + `generator.sampling_params.max_generate_length`."""

    grpo_norm_by_std: bool = True
    """Divide GRPO's advantages by the standard deviation of their group."""

    advantage_batch_normalize: bool = False
    """Shift and scale the advantages of a batch to mean 0 and standard deviation 1, over response tokens."""

    gamma: float = 1.0
    """Discount of a reward for each later token (`reinforce++`, `gae`) or turn (`turn_grpo`)."""

    lambd: float = 1.0
    """Lambda of `gae`: 1 trusts returns alone, 0 the critic alone."""

    value_clip: float = 0.2
    """The critic's loss lets a value move at most this far from where it was at the start of the step."""

    value_head_prefix: str = "value_head"
    """Name of the critic's output layer in its checkpoints."""

    zero_variance_filter: bool = False
    """Do not train on prompts whose answers all have the same reward."""

    dynamic_sampling: DynamicSamplingConfig = field(default_factory=DynamicSamplingConfig)

    overlong_buffer: OverlongBufferConfig = field(default_factory=OverlongBufferConfig)

    eps_clip_low: float = 0.2
    """The probability ratio is clipped at 1 - this."""

    eps_clip_high: float = 0.2
    """The probability ratio is clipped at 1 + this."""

    clip_ratio_c: float = 3.0
    """With `policy_loss_type=dual_clip`: the loss of a token with negative advantage A is at most -this * A."""

    off_policy_correction: OffPolicyCorrectionConfig = field(default_factory=OffPolicyCorrectionConfig)

    use_tis: bool = False
    """Old form of `off_policy_correction.tis_ratio_type=token` with the cap `tis_imp_ratio_cap`."""

    tis_imp_ratio_cap: float = -1.0
    """Cap of a token's ratio, with `use_tis`."""

    first_ratio_tolerance: float | None = None
    """Before the first optimizer step of a training step the probability ratio of every token is 1; an alarm is raised
    where it is off by more than this. null: 1e-4 in float32, 0.2 with `trainer.bf16`."""

    use_kl_loss: bool = True
    """Add the KL divergence to the reference model to the loss. Excludes `use_kl_in_reward`."""

    use_kl_in_reward: bool = False
    """Subtract the KL divergence to the reference model from the rewards. Excludes `use_kl_loss`."""

    kl_loss_coef: float = 0.001
    """Weight of the KL divergence, in the loss or in the reward (there: the controller's first value)."""

    kl_estimator_type: Literal["k1", "k2", "k3", "k3+", "abs"] = "k3"
    """Estimate of the KL divergence from sampled tokens (http://joschu.net/blog/kl-approx.html). `k3+` has the value of
    `k3` and the gradient of `k2` (straight-through), which is that of the KL divergence."""

    kl_ctrl: KLCtrlConfig = field(default_factory=KLCtrlConfig)

    use_entropy_loss: bool = False
    """Reward entropy: subtract it from the loss."""

    entropy_loss_coef: float = 0.01
    """Weight of the entropy."""

    sections: dict[str, Any] = field(default_factory=dict, metadata={SECTIONS: registered_sections})
    """Settings of losses and estimators, by the names under which these are registered."""

    def __post_init__(self) -> None:
        # This package's own sections are always there: they belong to the fingerprint of every run. One of a user's own
        # is, if its loss or estimator is used: what else a module registers must not make another experiment.
        used = (self.policy_loss_type, self.advantage_estimator)
        for entry in _registrations():
            if entry.settings is not None and (entry.is_builtin or entry.name in used):
                self.sections.setdefault(entry.name, entry.settings())

    @property
    def loss_reads_rollout_log_probs(self) -> bool:
        """Whether the policy loss itself compares with the engine's log-probs."""
        requires = PolicyLossRegistry.requirements(self.policy_loss_type)
        if requires.rollout_log_probs_with is None:
            return requires.rollout_log_probs
        setting, choice = requires.rollout_log_probs_with
        return attrgetter(setting)(self) == choice

    @property
    def uses_reference_model(self) -> bool:
        """Whether a reference model is loaded at all."""
        loss = PolicyLossRegistry.requirements(self.policy_loss_type)
        return self.use_kl_loss or self.use_kl_in_reward or loss.reference_model


class AlgorithmConfig(_DeclaredSettings):
    """Settings of the RL objective (`trainer.algorithm`)."""

    if not TYPE_CHECKING:  # type checkers know the declared settings, and `section` for the others

        def __init__(self, **values: Any):
            declared = {field.name for field in fields(self)}
            sections = {name: values.pop(name) for name in registered_sections() if name in values.keys() - declared}
            super().__init__(**values | {"sections": values.get("sections", {}) | sections})

        def __getattr__(self, name: str) -> Any:
            """Return the settings of the loss or estimator `name`: what is no declared setting."""
            sections = self.__dict__.get("sections", {})
            if name not in sections:
                settings = None if name.startswith("_") else registered_sections().get(name)
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
        """Return the settings of this type: those of the loss or estimator that was registered with it."""
        for value in self.sections.values():
            if isinstance(value, settings):
                return value
        for name, registered in registered_sections().items():
            if registered is settings:
                return self.sections.setdefault(name, settings())
        raise KeyError(f"no registered loss or estimator has settings of the type {settings.__name__}")

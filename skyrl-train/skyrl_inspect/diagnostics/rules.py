"""Rules that name failures of training. Each reads the metrics so far and states its evidence; the thresholds are held
by the planted failures and healthy runs of `tests/diagnostics`.

"Recent" are the latest three steps, all of which must agree; "at first" is the mean of the first three.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

from skyrl_inspect.diagnostics.history import (
    RECENT,
    History,
    compute_median,
    compute_noise,
    compute_peak,
    compute_start,
)

PAGE = "docs/why-it-stopped-learning.md#diagnostics"

REWARD, ENTROPY, LENGTH = "reward/avg_raw_reward", "policy/policy_entropy", "generate/avg_num_tokens"
EQUAL_GROUPS, GRADIENT, SCORE = "loss/zero_variance_share", "policy/grad_norm", "eval/all/avg_score"
SAMPLE_SIZE, LAG = "policy/rollout_train_ess", "generate/weight_version_lag_mean"


class Finding(NamedTuple):
    """What a rule has found."""

    onset: int
    """First step of the failure."""

    evidence: str
    """Sentence with the numbers."""


@dataclass(frozen=True)
class Rule:
    """A failure that metrics show."""

    name: str
    check: Callable[[History], Finding | None]
    advice: str
    """What usually helps."""

    settings: tuple[str, ...] = ()
    """Settings that usually cause it."""


@dataclass(frozen=True)
class Diagnostic:
    """A failure of a run, with its evidence."""

    name: str
    onset: int
    step: int
    """Step at which it was found."""

    evidence: str
    advice: str
    settings: tuple[str, ...]
    """Settings of the run that usually cause it, `name=value`; those that differ from the defaults first."""

    page: str

    def __str__(self) -> str:
        settings = f" Settings: {', '.join(self.settings)}." if self.settings else ""
        return f"{self.name} since step {self.onset}: {self.evidence} {self.advice}{settings} ({self.page})"


@dataclass(frozen=True)
class RunSettings:
    """Settings of a run and their defaults, by dotted name."""

    values: Mapping[str, object]
    defaults: Mapping[str, object]

    def describe(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return `name=value` of the settings that the run has; those that differ from their defaults come first, with
        the default."""
        known = [name for name in names if name in self.values]
        changed = [name for name in known if self.values[name] != self.defaults.get(name, self.values[name])]
        texts = [f"{name}={self.values[name]} (default {self.defaults[name]})" for name in changed]
        return (*texts, *(f"{name}={self.values[name]}" for name in known if name not in changed))


def find_diagnostics(history: History, settings: RunSettings | None = None) -> list[Diagnostic]:
    """Return the failures that the metrics show at their latest step."""
    found: list[Diagnostic] = []
    for rule in RULES:
        finding = rule.check(history)
        if finding is not None:
            causes = rule.settings if settings is None else settings.describe(rule.settings)
            found.append(
                Diagnostic(rule.name, finding.onset, history.step, finding.evidence, rule.advice, causes, PAGE)
            )
    return found


# ---- reward and gradient


def _check_reward_collapse(history: History) -> Finding | None:
    """The reward has lost half of its best, and more than four times its noise; or the rewards of each group are equal,
    so that the recent ones have little noise."""
    recent, earlier = history.recent(REWARD), history.earlier(REWARD)
    if not recent or not earlier:
        return None
    equal = history.recent(EQUAL_GROUPS)
    is_still = min(equal) >= 0.99 if equal else max(recent) == min(recent)
    peak = max(earlier) if is_still else compute_peak(earlier)
    drop = peak - max(recent)
    is_clear = is_still or (len(earlier) > RECENT and drop > 4 * compute_noise(earlier))
    if drop <= 0 or drop < 0.5 * abs(peak) or not is_clear:
        return None
    onset = history.find_onset(REWARD, lambda value: value <= peak - 0.5 * drop)
    return Finding(onset, f"The reward fell from {peak:.3g} to {fmean(recent):.3g}.")


def _check_no_gradient(history: History) -> Finding | None:
    """All groups have equal rewards, or the gradient is 0, and the prompts are not solved."""
    equal, norms = history.recent(EQUAL_GROUPS), history.recent(GRADIENT)
    if max(history.recent("loss/num_lone_samples") or [0.0]) > 0:  # without groups nothing is compared
        equal = []
    if _is_solved(history):
        return None
    rewards = history.recent(REWARD)
    reward = f" (reward {fmean(rewards):.3g})" if rewards else ""
    if equal and min(equal) >= 0.99:
        onset = history.find_onset(EQUAL_GROUPS, lambda share: share >= 0.99)
        return Finding(
            onset, f"In {fmean(equal):.0%} of the groups all rewards are equal{reward}: all advantages are 0."
        )
    if norms and max(norms) == 0:
        return Finding(history.find_onset(GRADIENT, lambda norm: norm == 0), f"The gradient norm is 0{reward}.")
    return None


def _check_entropy_collapse(history: History) -> Finding | None:
    """The entropy lost nine tenths, most groups have equal rewards, and a tenth or more of the prompts no reward."""
    recent, equal = history.recent(ENTROPY), history.recent(EQUAL_GROUPS)
    if not recent or not equal or not history.earlier(ENTROPY):
        return None
    start, share = compute_start(history.values(ENTROPY)), fmean(equal)
    if max(recent) >= 0.1 * start or share <= 0.75 or _is_solved(history, 0.9):
        return None
    return Finding(
        history.find_onset(ENTROPY, lambda value: value < 0.1 * start),
        f"The entropy fell from {start:.3g} to {fmean(recent):.3g} nats a token, and in {share:.0%} of the groups all "
        "rewards are equal: few groups give a training signal.",
    )


def _check_entropy_explosion(history: History) -> Finding | None:
    """The entropy tripled to half a nat a token or more, and the reward is below its start or half of its best."""
    recent, rewards = history.recent(ENTROPY), history.recent(REWARD)
    if not recent or not rewards or not history.earlier(ENTROPY):
        return None
    start, known = compute_start(history.values(ENTROPY)), history.earlier(REWARD)
    has_risen = min(recent) > max(3 * start, 0.5)
    if (
        not has_risen
        or not known
        or max(rewards) > max(compute_start(history.values(REWARD)), 0.5 * compute_peak(known))
    ):
        return None
    return Finding(
        history.find_onset(ENTROPY, lambda value: value > max(3 * start, 0.5)),
        f"The entropy rose from {start:.3g} to {fmean(recent):.3g} nats a token, and the reward is {fmean(rewards):.3g}"
        ": the policy approaches random text.",
    )


def _check_evaluation_gap(history: History) -> Finding | None:
    """The training reward rose by a quarter or more; the last two evaluations are below 0.8 of the best, or hardly
    above the first and below half of the training reward."""
    rewards, scores = history.values(REWARD), history.values(SCORE)
    if len(rewards) < 2 * RECENT or len(scores) < 3:
        return None
    start, end = compute_start(rewards), fmean(rewards[-max(RECENT, len(rewards) // 4) :])
    if end - start < max(0.25 * max(abs(start), abs(end)), 2 * compute_noise(rewards)):
        return None
    first, best, recent = scores[0], max(scores), max(scores[-2:])
    has_fallen = best - recent > max(0.2 * max(map(abs, scores)), 2 * compute_noise(scores[: scores.index(best) + 1]))
    stays_low = recent - first < 0.1 * abs(first) and end - recent > 0.5 * abs(end)
    if not has_fallen and not stays_low:
        return None
    limit = 0.8 * best if has_fallen and best > 0 else recent
    return Finding(
        history.find_onset(SCORE, lambda score: score <= limit) if has_fallen else 1,
        f"The training reward rose from {start:.3g} to {end:.3g}, but the evaluation went from {first:.3g} (best: "
        f"{best:.3g}) to {fmean(scores[-2:]):.3g}.",
    )


# ---- the update


def _check_gradient_norm(history: History) -> Finding | None:
    """The gradient norm is more than 20 times its median in two of three steps."""
    norms, usual = history.recent(GRADIENT), compute_median(value for value in history.earlier(GRADIENT) if value > 0)
    if len(history.earlier(GRADIENT)) < 5 or usual == 0 or sum(norm > 20 * usual for norm in norms) < 2:
        return None
    onset = history.find_onset(GRADIENT, lambda norm: norm > 20 * usual)
    return Finding(onset, f"The gradient norm is {max(norms):.3g}; its median was {usual:.3g}.")


def _check_learning_rate(history: History) -> Finding | None:
    """The learning rate tripled from one step to the next, to more than it ever was, and not in a warmup: it did not
    rise in the step before."""
    rates = history.values("policy/policy_lr")
    for i in range(max(2, len(rates) - RECENT), len(rates)):
        before, now = rates[i - 1], rates[i]
        if before <= rates[i - 2] and before > 0 and now > 3 * max(rates[:i]):
            return Finding(history.step - len(rates) + 1 + i, f"The learning rate rose from {before:.3g} to {now:.3g}.")
    return None


def _check_ratio_deviation(history: History) -> Finding | None:
    """Within a step, probabilities of trained tokens changed by a factor above 10, and a tenth of the tokens is
    clipped, in two of three steps."""
    name = "policy/ratio_deviation_max"
    deviations, clipped = history.recent(name), history.recent("policy/loss_metrics/clip_ratio")
    if not clipped or sum(d > 10 and c > 0.1 for d, c in zip(deviations, clipped, strict=False)) < 2:
        return None
    return Finding(
        history.find_onset(name, lambda deviation: deviation > 10),
        f"Probabilities of trained tokens change by a factor of up to {max(deviations):.3g} within a step, and "
        f"{fmean(clipped):.0%} of the tokens are clipped.",
    )


def _check_skipped_updates(history: History) -> Finding | None:
    """In two of five steps updates were skipped, because their gradients were not finite."""
    for model in ("policy", "critic", "train"):
        skipped = history.recent(f"{model}/skipped_updates", 5) or history.recent(f"{model}/skipped_updates", 2)
        if sum(number > 0 for number in skipped) >= 2:
            onset = history.step - len(skipped) + 1 + next(i for i, number in enumerate(skipped) if number > 0)
            evidence = f"{fmean(skipped):.0%} of the updates in the last {len(skipped)} steps were skipped"
            return Finding(onset, f"{evidence} ({model}): their gradients were not finite.")
    return None


def _check_kl_runaway(history: History) -> Finding | None:
    """The KL divergence from the reference is above 1 nat a token, or above 0.2 and 10 times its median."""
    name = "policy/policy_kl"
    recent, earlier = history.recent(name), history.earlier(name)
    if not recent:
        return None
    usual = compute_median(earlier)
    limit = max(0.2, 10 * usual) if len(earlier) >= 5 and usual > 0 else 1.0
    if min(recent) <= min(limit, 1.0):
        return None
    onset = history.find_onset(name, lambda kl: kl > min(limit, 1.0))
    before = f"; its median was {usual:.3g}" if earlier else ""
    return Finding(onset, f"The KL divergence from the reference is {fmean(recent):.3g} nats a token{before}.")


def _check_value_loss(history: History) -> Finding | None:
    """The critic's loss is 10 times its first value, or 10 times its median and twice its start."""
    name = "critic/critic_loss"
    recent, earlier = history.recent(name), history.earlier(name)
    if not recent or not earlier:
        return None
    limit = min(max(10 * compute_median(earlier), 2 * compute_start(earlier)), 10 * earlier[0])
    if limit <= 0 or min(recent) <= limit:
        return None
    return Finding(
        history.find_onset(name, lambda loss: loss > limit),
        f"The critic's loss is {fmean(recent):.3g}; it began at {earlier[0]:.3g}, its median was "
        f"{compute_median(earlier):.3g}.",
    )


def _check_loss_divergence(history: History) -> Finding | None:
    """The loss of supervised training is a fifth and four times its noise above its start."""
    name = "train/loss"
    recent, earlier = history.recent(name), history.earlier(name)
    if not recent or len(earlier) < RECENT:
        return None
    start, lowest = compute_start(earlier), min(earlier)
    limit = max(1.2 * start, start + 4 * compute_noise(earlier))
    if lowest < 0 or min(recent) <= limit:
        return None
    onset = history.find_onset(name, lambda loss: loss > limit)
    return Finding(onset, f"The loss rose to {fmean(recent):.3g}; it began at {start:.3g} (lowest: {lowest:.3g}).")


# ---- responses and rollouts


def _check_length_collapse(history: History) -> Finding | None:
    """Responses have less than a quarter of their first length, and the reward has not risen."""
    recent, rewards = history.recent(LENGTH), history.recent(REWARD)
    if not recent or not rewards or not history.earlier(LENGTH):
        return None
    start, first = compute_start(history.values(LENGTH)), compute_start(history.values(REWARD))
    if max(recent) >= 0.25 * start or fmean(rewards) > first + 0.1 * abs(first):
        return None
    onset = history.find_onset(LENGTH, lambda length: length < 0.25 * start)
    return Finding(
        onset,
        f"Responses shrank from {start:.3g} to {fmean(recent):.3g} tokens, and the reward went from {first:.3g} to "
        f"{fmean(rewards):.3g}.",
    )


def _check_truncation(history: History) -> Finding | None:
    """A fifth or more of the responses end at the length limit since five steps, and not fewer than at first."""
    name = "generate/stop_reason/length"
    recent = history.recent(name, 5)
    if not recent or min(recent) < 0.2 or fmean(recent[-RECENT:]) < 0.9 * compute_start(history.values(name)):
        return None
    text = f"{fmean(recent):.0%} of the responses are truncated at the length limit."
    rewarded = history.recent("generate/avg_tokens_non_zero_rewards")
    longest = history.recent("generate/max_num_tokens")
    if rewarded and longest and fmean(rewarded) < 0.5 * max(longest):
        text += (
            f" Rewarded responses have {fmean(rewarded):.3g} of up to {max(longest):.3g} tokens: the others ramble, "
            "and a higher limit would not help."
        )
    return Finding(history.find_onset(name, lambda share: share >= 0.2), text)


def _check_repetition(history: History) -> Finding | None:
    """Half or more of the 8-grams in the ends of responses repeat, twice as many as at first."""
    name = "generate/repetition"
    recent = history.recent(name)
    if not recent or min(recent) < 0.5 or min(recent) < 2 * min(history.values(name)[:RECENT]):
        return None
    return Finding(
        history.find_onset(name, lambda share: share >= 0.5),
        f"{fmean(recent):.0%} of the 8-grams at the ends of responses repeat earlier ones.",
    )


def _check_failures(history: History) -> Finding | None:
    """A fifth of all rollouts fail, or all of one environment."""
    for name in history.find_names("generate/failed_share/*"):
        recent = history.recent(name)
        if recent and min(recent) > 0.99:
            onset = history.find_onset(name, lambda share: share > 0.99)
            return Finding(onset, f"All rollouts of {name.rpartition('/')[2]} fail{_describe_failures(history)}.")
    name = "generate/failed_share"
    recent = history.recent(name)
    if not recent or min(recent) < 0.2:
        return None
    onset = history.find_onset(name, lambda share: share >= 0.2)
    return Finding(onset, f"{fmean(recent):.0%} of the rollouts fail{_describe_failures(history)}.")


def _describe_failures(history: History) -> str:
    counts = {name.rpartition("/")[2]: history.recent(name, 1) for name in history.find_names("generate/num_failed/*")}
    kinds = [f"{number[0]:g} {kind}" for kind, number in counts.items() if number and number[0] > 0]
    return f" (by cause: {', '.join(kinds)})" if kinds else ""


def _check_few_prompts(history: History) -> Finding | None:
    """Fewer than half of a batch's prompts are distinct."""
    name = "generate/distinct_prompts_share"
    recent = history.recent(name)
    if not recent or max(recent) >= 0.5:
        return None
    onset = history.find_onset(name, lambda share: share < 0.5)
    return Finding(onset, f"Only {fmean(recent):.0%} of the prompts of a batch are distinct.")


# ---- engine and trainer


def _check_stale_weights(history: History) -> Finding | None:
    """Trained tokens are of older weights, and the effective sample size is below 0.9."""
    lags, sizes = history.recent(LAG), history.recent(SAMPLE_SIZE)
    if not lags or not sizes or min(lags) <= 0 or max(sizes) >= 0.9:
        return None
    return Finding(
        history.find_onset(SAMPLE_SIZE, lambda size: size < 0.9),
        f"Trained tokens are {fmean(lags):.3g} weight versions old, and the policy has diverged from the one that "
        f"sampled them (effective sample size {fmean(sizes):.2g}, below 0.9).",
    )


def _check_engine_mismatch(history: History) -> Finding | None:
    """With equal weights, the engine's log-probs differ from the trainer's: effective sample size below 0.9, or a mean
    difference above 0.05 and five times its median."""
    lags, sizes = history.recent(LAG), history.recent(SAMPLE_SIZE)
    if lags and max(lags) > 0:
        return None
    name = "policy/rollout_train_logprobs_abs_diff_mean"
    differences, earlier = history.recent(name), history.earlier(name)
    usual = compute_median(earlier)
    limit = max(0.05, 5 * usual)
    has_grown = bool(differences) and len(earlier) >= RECENT and min(differences) > limit
    if not has_grown and not (sizes and max(sizes) < 0.9):
        return None
    onset = history.find_onset(
        name if has_grown else SAMPLE_SIZE, lambda value: value > limit if has_grown else value < 0.9
    )
    size = f", effective sample size {fmean(sizes):.2g}" if sizes else ""
    difference = fmean(differences) if differences else 0.0
    return Finding(onset, f"Log-probs of engine and trainer differ by {difference:.3g} on average{size}.")


def _is_solved(history: History, share: float = 0.95) -> bool:
    """Return whether so many prompts have a rewarded response, and the reward is near its best: an environment may
    reward every response a little."""
    rewards, names = history.recent(REWARD), history.find_names("reward/avg_pass_at_*")
    pass_rates = history.recent(names[0]) if names else []
    if not rewards or not pass_rates:
        return False
    return fmean(pass_rates) >= share and fmean(rewards) >= 0.8 * max(history.values(REWARD))


_LR, _EPOCHS = "trainer.policy.optimizer_config.lr", "trainer.update_epochs_per_batch"
_GRAD_CLIP, _KL = "trainer.policy.optimizer_config.max_grad_norm", "trainer.algorithm.kl_loss_coef"
_MAX_LENGTH = "generator.sampling_params.max_generate_length"

RULES: tuple[Rule, ...] = (
    Rule(
        "reward-collapse",
        _check_reward_collapse,
        "Look at the responses of that step; resume from the last checkpoint before it with a lower learning rate.",
        (_LR, _EPOCHS, _GRAD_CLIP, "trainer.algorithm.eps_clip_high", _KL),
    ),
    Rule(
        "no-gradient",
        _check_no_gradient,
        "No step can change the policy: use prompts of other difficulty, more samples per prompt, or check the reward.",
        ("generator.n_samples_per_prompt", "trainer.algorithm.dynamic_sampling.type", _LR),
    ),
    Rule(
        "entropy-collapse",
        _check_entropy_collapse,
        "Lower the learning rate, raise eps_clip_high, or add an entropy bonus.",
        (_LR, _EPOCHS, "trainer.algorithm.eps_clip_high", "trainer.algorithm.entropy_loss_coef"),
    ),
    Rule(
        "entropy-explosion",
        _check_entropy_explosion,
        "Lower the learning rate or the entropy bonus.",
        (_LR, "trainer.algorithm.entropy_loss_coef", "generator.sampling_params.temperature"),
    ),
    Rule(
        "evaluation-gap",
        _check_evaluation_gap,
        "Training optimizes something else than the evaluation measures: read rewarded responses, then the grader.",
    ),
    Rule("gradient-norm", _check_gradient_norm, "Look for outliers in this batch.", (_GRAD_CLIP, _LR)),
    Rule("learning-rate", _check_learning_rate, "Check the schedule, and what changed at a resume.", (_LR,)),
    Rule("ratio-deviation", _check_ratio_deviation, "The steps are too large.", (_LR, _EPOCHS, _GRAD_CLIP)),
    Rule(
        "skipped-updates",
        _check_skipped_updates,
        "Lower the learning rate; check rewards and masks.",
        (_LR, _GRAD_CLIP),
    ),
    Rule("kl-runaway", _check_kl_runaway, "Lower the learning rate or raise the KL coefficient.", (_KL, _LR)),
    Rule(
        "value-loss",
        _check_value_loss,
        "Lower the critic's learning rate; check the scale of rewards.",
        ("trainer.critic.optimizer_config.lr", "trainer.algorithm.value_clip"),
    ),
    Rule("loss-divergence", _check_loss_divergence, "Lower the learning rate; check the data.", (_LR, _GRAD_CLIP)),
    Rule(
        "length-collapse",
        _check_length_collapse,
        "Check penalties on length and the stop tokens.",
        ("trainer.algorithm.overlong_buffer.len", "trainer.algorithm.loss_reduction", _LR),
    ),
    Rule(
        "truncation",
        _check_truncation,
        "Raise the limit if right responses are cut; else mask (apply_overlong_filtering) or penalize (overlong_buffer"
        ") the truncated ones.",
        (_MAX_LENGTH, "generator.apply_overlong_filtering", "trainer.algorithm.overlong_buffer.len"),
    ),
    Rule(
        "repetition",
        _check_repetition,
        "Responses loop: penalize truncated ones, lower the learning rate, check the stop tokens.",
        ("generator.sampling_params.temperature", "generator.apply_overlong_filtering", _LR),
    ),
    Rule("rollout-failures", _check_failures, "The texts of the failures are in the trajectories of the step."),
    Rule(
        "few-prompts",
        _check_few_prompts,
        "Check the data for duplicates.",
        ("data.train_data", "trainer.train_batch_size"),
    ),
    Rule(
        "stale-weights",
        _check_stale_weights,
        "Lower the staleness or the learning rate, or use a loss that corrects for staleness.",
        ("trainer.fully_async.max_staleness_steps", "trainer.algorithm.policy_loss_type", _LR),
    ),
    Rule(
        "engine-mismatch",
        _check_engine_mismatch,
        "Compare both on recorded responses: python -m skyrl_train.entrypoints.main_mismatch RUN.",
        ("generator.model_dtype", "trainer.bf16", "generator.sampling_params.temperature"),
    ),
)

"""Diagnostics of runs that have stopped learning: rules over curves. A diagnostic states its evidence;
docs/why-it-stopped-learning.md helps to find the cause.

The start of a curve is the mean of its first tenth (at least three values), the end is the mean of its last quarter.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import filter as matching
from statistics import fmean

Read = Callable[[str], Sequence[float | None]]
"""Name of a metric -> its values by step; empty if there is none."""

MIN_STEPS = 12
"""Logged steps before which nothing is said."""


def find_diagnostics(read: Read, names: Iterable[str]) -> list[str]:
    """Return a sentence for each diagnostic, with the numbers that it is made from.

    Args:
        names: of the run's metrics.
    """
    if len(_get_numbers(read("reward/avg_raw_reward"))) < MIN_STEPS:
        return []
    solved = [read(name) for name in matching(names, "reward/avg_pass_at_*")]
    return [
        *_check_evaluation_gap(read),
        *(_check_entropy_collapse(read, solved[0]) if solved else ()),
        *_check_truncation(read),
        *_check_stale_weights(read),
    ]


def _check_evaluation_gap(read: Read) -> Iterator[str]:
    """The training reward rose by a quarter or more; the evaluation lost a fifth or more of its best score, or gained
    less than a tenth of its first and is below half of the training reward: each of the last two, as a single one may
    have been before the rise. Rewards below 0 count by their size."""
    start, end = _compute_ends(read("reward/avg_raw_reward"))
    scores = _get_numbers(read("eval/all/avg_score"))
    if len(scores) < 3 or end - start < 0.25 * max(abs(start), abs(end)):
        return
    first, best, recent = scores[0], max(scores), max(scores[-2:])
    has_fallen = best - recent > 0.2 * max(map(abs, scores))
    stays_low = recent - first < 0.1 * abs(first) and end - recent > 0.5 * abs(end)
    if has_fallen or stays_low:
        yield (
            f"The training reward rose from {start:.3g} to {end:.3g}, but the evaluation went from {first:.3g} (best: "
            f"{best:.3g}) to {fmean(scores[-2:]):.3g}: training optimizes something else than the evaluation measures."
        )


def _check_entropy_collapse(read: Read, solved: Sequence[float | None]) -> Iterator[str]:
    """The entropy lost nine tenths, most groups have equal rewards, and a tenth or more of the prompts no reward."""
    entropy, equal = read("policy/policy_entropy"), read("loss/zero_variance_share")
    if not _get_numbers(entropy) or not _get_numbers(equal) or not _get_numbers(solved):
        return
    (start, end), share, pass_rate = _compute_ends(entropy), _compute_ends(equal)[1], _compute_ends(solved)[1]
    if end < 0.1 * start and share > 0.75 and pass_rate < 0.9:
        yield (
            f"The entropy fell from {start:.3g} to {end:.3g} nats a token. In {share:.0%} of the groups all rewards "
            f"are equal, and {1 - pass_rate:.0%} of the prompts have no rewarded response: few groups give a training "
            "signal."
        )


def _check_truncation(read: Read) -> Iterator[str]:
    """A fifth or more of the answers end at the length limit."""
    cut = read("generate/stop_reason/length")
    if _get_numbers(cut) and (share := _compute_ends(cut)[1]) >= 0.2:
        yield f"{share:.0%} of the responses are truncated at the length limit."


def _check_stale_weights(read: Read) -> Iterator[str]:
    """Trained tokens are of older weights, and the policy has left these (`docs/asynchronous.md` has the bound)."""
    lag, sample_size = read("generate/weight_version_lag_mean"), read("policy/rollout_train_ess")
    if not _get_numbers(lag) or not _get_numbers(sample_size):
        return
    age, share = _compute_ends(lag)[1], _compute_ends(sample_size)[1]
    if age > 0 and share < 0.9:
        yield (
            f"Trained tokens are {age:.3g} weight versions old, and the policy has diverged from the one that sampled "
            f"them (effective sample size {share:.2g}, below 0.9)."
        )


def _get_numbers(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _compute_ends(values: Sequence[float | None]) -> tuple[float, float]:
    """Return the beginning and the end of a curve that has values."""
    numbers = _get_numbers(values)
    return fmean(numbers[: max(3, len(numbers) // 10)]), fmean(numbers[-max(1, len(numbers) // 4) :])

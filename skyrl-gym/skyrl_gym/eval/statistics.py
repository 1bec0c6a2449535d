"""Numbers with their uncertainty. Pure functions of numbers."""

import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

RESAMPLES = 2000
EXACT = "Clopper-Pearson"
BOOTSTRAP = "bootstrap"
NORMAL = "normal"


@dataclass(frozen=True)
class Estimate:
    """A mean over tasks with its confidence interval."""

    mean: float
    low: float
    high: float
    method: str
    """Method of the confidence interval: `Clopper-Pearson` (exact) if each task gives 0 or 1, else `bootstrap` over the
    tasks; `normal` for the mean of several sets."""
    num_tasks: int
    level: float = 0.95


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Compute the unbiased estimate of the probability that at least one of k samples is correct, given c correct
    samples of n (Chen et al. 2021, https://arxiv.org/abs/2107.03374, eq. 1):

        pass@k = 1 - C(n - c, k) / C(n, k)

    Raises:
        ValueError: unless 1 <= k <= n and 0 <= c <= n.
    """
    if not 1 <= k <= num_samples or not 0 <= num_right <= num_samples:
        raise ValueError(f"pass@{k} of {num_samples} samples with {num_right} right is not defined")
    return 1.0 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def estimate(values: Sequence[float], level: float = 0.95) -> Estimate | None:
    """Return the mean of one value for each task, and its interval. None if there are no tasks."""
    if not values:
        return None
    mean = math.fsum(values) / len(values)
    if all(value in (0.0, 1.0) for value in values):
        low, high = clopper_pearson(round(sum(values)), len(values), level)
        return Estimate(mean, low, high, EXACT, len(values), level)
    low, high = bootstrap(values, level)
    return Estimate(mean, low, high, BOOTSTRAP, len(values), level)


def clopper_pearson(num_right: int, num_tasks: int, level: float = 0.95) -> tuple[float, float]:
    """Compute the exact interval of a proportion (Clopper, Pearson 1934, https://doi.org/10.1093/biomet/26.4.404): the
    smallest and the largest p that would not make x of n, or something farther out, rarer than (1 - level) / 2."""
    tail = (1 - level) / 2

    def at_least(p: float) -> float:
        return _compute_binomial_sum(num_right, num_tasks, num_tasks, p)

    def at_most(p: float) -> float:
        return _compute_binomial_sum(0, num_right, num_tasks, p)

    low = 0.0 if num_right == 0 else _find_root(lambda p: at_least(p) >= tail)
    high = 1.0 if num_right == num_tasks else _find_root(lambda p: at_most(p) < tail)
    return low, high


def _compute_binomial_sum(first: int, last: int, n: int, p: float) -> float:
    """Compute P(first <= X <= last) for X ~ Binomial(n, p), 0 < p < 1."""
    log_n = math.lgamma(n + 1)
    log_p, log_q = math.log(p), math.log1p(-p)
    return math.fsum(
        math.exp(log_n - math.lgamma(x + 1) - math.lgamma(n - x + 1) + x * log_p + (n - x) * log_q)
        for x in range(first, last + 1)
    )


def _find_root(is_above: Callable[[float], bool]) -> float:
    """Find by bisection the point of (0, 1) above which a condition is true."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if is_above(middle) else (middle, high)
    return (low + high) / 2


def bootstrap(values: Sequence[float], level: float = 0.95, resamples: int = RESAMPLES) -> tuple[float, float]:
    """Bootstrap the percentile interval of the mean over tasks (Efron 1979, https://doi.org/10.1214/aos/1176344552).
    The same for the same values."""
    draw = random.Random(0)
    means = sorted(math.fsum(draw.choices(values, k=len(values))) / len(values) for _ in range(resamples))
    tail = (1 - level) / 2
    return means[math.floor(tail * resamples)], means[math.ceil((1 - tail) * resamples) - 1]


def mean_of_sets(sets: Sequence[Sequence[float]], level: float = 0.95, are_shares: bool = True) -> Estimate | None:
    """Return the mean that counts every set of tasks once, given one value for each task. None without tasks.

    The interval takes the sets as independent: half of its width is the root of the sum of squares of theirs, by the
    number of sets (Zou, Donner 2008, https://doi.org/10.1002/sim.3095). Theirs are normal approximations; a set of
    shares that are all 0 or all 1, which has no variance, has its exact interval. Sets without tasks do not count.
    """
    sets = [values for values in sets if values]
    if not sets:
        return None
    mean = statistics.fmean(map(statistics.fmean, sets))
    widths = [_compute_half_widths(values, level, are_shares) for values in sets]
    below, above = (math.sqrt(math.fsum(width**2 for width in side)) / len(sets) for side in zip(*widths, strict=True))
    return Estimate(mean, mean - below, mean + above, NORMAL, sum(map(len, sets)), level)


def _compute_half_widths(values: Sequence[float], level: float, are_shares: bool) -> tuple[float, float]:
    """Return how far the interval of a set's mean reaches below and above it."""
    mean = statistics.fmean(values)
    if are_shares and mean in (0.0, 1.0):
        low, high = clopper_pearson(round(mean * len(values)), len(values), level)
        return mean - low, high - mean
    width = statistics.NormalDist().inv_cdf((1 + level) / 2) * math.sqrt(statistics.pvariance(values) / len(values))
    return width, width


def sign_test(num_won: int, num_lost: int) -> float:
    """Compute the exact two-sided p value of the sign test: the probability of a split as uneven as this or more, if
    tasks that are no tie were won and lost with equal probability. 1 if all are ties."""
    n = num_won + num_lost
    tail = sum(math.comb(n, count) for count in range(min(num_won, num_lost) + 1))
    return min(1.0, 2 * tail / 2**n)

"""Grouping of curves into charts. Knows metric names, not how a chart is drawn."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase


@dataclass(frozen=True)
class Chart:
    """A few metrics in one picture; `*` in a pattern matches anything."""

    title: str
    patterns: tuple[str, ...]
    """The curves, the main one first."""
    band: tuple[str, str] | None = None
    """Two metrics between which the picture is shaded."""
    note: str = ""
    labels: dict[str, str] = field(default_factory=dict)
    """Names of metrics in the legend, where the last part of a metric's name is not clear enough."""


OVERVIEW: tuple[Chart, ...] = (
    Chart(
        "Reward",
        ("reward/avg_raw_reward", "eval/all/avg_score"),
        note="mean over trajectories",
        labels={"reward/avg_raw_reward": "training", "eval/all/avg_score": "evaluation"},
    ),
    Chart("Pass rate", ("reward/avg_pass_at_*", "eval/all/pass_at_*"), note="prompts with a rewarded sample"),
    Chart("Loss", ("policy/final_loss", "policy/policy_loss", "train/loss"), note="policy"),
    Chart("KL to the reference", ("policy/policy_kl", "loss/avg_kl"), note="nats a token"),
    Chart("Entropy", ("policy/policy_entropy",), note="nats a token"),
    Chart("Gradient norm", ("policy/raw_grad_norm", "policy/grad_norm"), note="before clipping"),
    Chart(
        "Response length",
        ("generate/avg_num_tokens",),
        band=("generate/min_num_tokens", "generate/max_num_tokens"),
        note="tokens, with the range",
    ),
    Chart("Groups with equal rewards", ("loss/zero_variance_share",), note="fraction of groups"),
    Chart("Clipped", ("policy/loss_metrics/*clip_ratio*", "policy/loss_metrics/*clipfrac*"), note="fraction of tokens"),
    Chart(
        "Engine against trainer",
        ("policy/rollout_train_logprobs_abs_diff_mean",),
        note="mean log-prob difference",
    ),
    Chart("Value loss", ("critic/critic_loss",), note="critic"),
    Chart("Learning rate", ("policy/policy_lr", "critic/critic_lr")),
    Chart(
        "Staleness",
        ("async/staleness_mean", "generate/weight_version_lag_mean"),
        band=("async/staleness_min", "async/staleness_max"),
        note="weight versions",
        labels={"async/staleness_mean": "groups by their oldest token", "generate/weight_version_lag_mean": "tokens"},
    ),
    Chart("Effective sample size", ("policy/rollout_train_ess",), note="fraction: current against behavior policy"),
    Chart("Stop reasons", ("generate/stop_reason/*",), note="fraction of responses"),
    Chart("Token-exact samples", ("tokens/exact_share", "tokens/trained_share"), note="fraction, recorded agents"),
    Chart("Failed and retried", ("generate/num_failed/*", "generate/num_failed", "generate/num_retries")),
)

_TOTAL = "timing/step"
_TRAINING = ("timing/train_critic_and_policy", "timing/run_training")
_STAGES_WITHIN = {"timing/policy_train": _TRAINING, "timing/critic_train": _TRAINING}
"""Timings that one of these holds already, though their names do not say so."""


def build_overview(names: Iterable[str]) -> list[dict]:
    """The charts of `OVERVIEW` that have something to show, with the metrics that they show."""
    available = sorted(names)
    charts = []
    for chart in OVERVIEW:
        metrics = [name for pattern in chart.patterns for name in available if fnmatchcase(name, pattern)]
        if metrics:
            expected = (f"expected/{metrics[0]}/low", f"expected/{metrics[0]}/high")  # of a recipe (`curve_bands`)
            bands = [names for names in (expected, chart.band) if names and all(name in available for name in names)]
            band = list(bands[0]) if bands else None
            labels = {name: chart.labels.get(name, _make_label(name)) for name in metrics}
            charts.append({"title": chart.title, "note": chart.note, "metrics": labels, "band": band})
    return charts


def _make_label(name: str) -> str:
    """The last part of a metric's name, and what it is of where that part alone is said of several things."""
    first, _, last = name.rpartition("/")
    return {"eval/all": f"evaluation, {last}"}.get(first, last)


def group_metrics(names: Iterable[str]) -> dict[str, list[str]]:
    """Group all metrics by the part of the name before the first slash (`eval/gsm8k` for evaluations of a dataset)."""
    found: dict[str, list[str]] = {}
    for name in sorted(names):
        parts = name.split("/")
        group = "/".join(parts[: 2 if parts[0] == "eval" else 1]) if len(parts) > 1 else "other"
        found.setdefault(group, []).append(name)
    return found


def list_timing_stages(names: Iterable[str]) -> list[str]:
    """The `timing/…` metrics that add up: without the whole step, and without parts of another stage."""
    timings = {name for name in names if name.startswith("timing/") and name != _TOTAL}
    return sorted(
        name
        for name in timings
        if timings.isdisjoint(_STAGES_WITHIN.get(name, ()))
        and not any(name.startswith(f"{other}/") for other in timings)
    )

"""Many episodes as a few numbers."""

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from skyrl_gym.check import spec_of
from skyrl_gym.envs.registration import env_class_of
from skyrl_gym.eval.records import EpisodeRecord
from skyrl_gym.eval.settings import EvalSettings
from skyrl_gym.eval.statistics import Estimate, estimate, pass_at_k
from skyrl_gym.metrics import default_aggregate_metrics


@dataclass(frozen=True)
class Summary:
    """Summary of an evaluation. Failed episodes count in none of the numbers but `failures`."""

    env: str
    model: str
    num_tasks: int
    num_samples: int
    num_scored: int
    """Episodes that ended with a reward."""
    pass_at: dict[int, Estimate | None]
    """pass@k by k, over the tasks with at least k scored episodes."""
    reward: Estimate | None
    """Mean over tasks of the mean over their episodes."""
    outcome_reward: Estimate | None
    failures: dict[str, int]
    """Episodes by kind of failure."""
    errors: dict[str, str]
    """One text for each kind of failure."""
    means: dict[str, float]
    """Means per episode: turns, tokens, seconds, share truncated, share with a turn cut at its token limit."""
    environment: dict[str, object]
    """The environment's own metrics."""

    @property
    def is_complete(self) -> bool:
        return self.num_scored == self.num_tasks * self.num_samples

    def as_json(self) -> dict[str, object]:
        found = asdict(self)
        found["pass_at"] = {f"pass@{k}": value for k, value in found["pass_at"].items()}
        return found


def summarize(settings: EvalSettings, num_tasks: int, records: Iterable[EpisodeRecord]) -> Summary:
    """Summarize the episodes that the settings ask for; a folder may hold more."""
    wanted = [each for each in records if each.task < num_tasks and each.sample < settings.num_samples]
    scored = [each for each in wanted if each.failure is None]
    failed = [each for each in wanted if each.failure is not None]
    by_task: defaultdict[int, list[EpisodeRecord]] = defaultdict(list)
    for record in scored:
        by_task[record.task].append(record)
    tasks = list(by_task.values())
    return Summary(
        env=settings.env,
        model=settings.model,
        num_tasks=num_tasks,
        num_samples=settings.num_samples,
        num_scored=len(scored),
        pass_at={k: _compute_pass_at(tasks, k) for k in settings.pass_k},
        reward=_mean_over_tasks(tasks, "reward"),
        outcome_reward=_mean_over_tasks(tasks, "outcome_reward"),
        failures=dict(Counter(str(each.failure) for each in failed)),
        errors={str(each.failure): str(each.error) for each in failed},
        means=_compute_means(scored),
        environment=_aggregate_environment_metrics(settings.env, scored),
    )


def _compute_pass_at(tasks: list[list[EpisodeRecord]], k: int) -> Estimate | None:
    return estimate(
        [pass_at_k(len(task), sum(bool(each.success) for each in task), k) for task in tasks if len(task) >= k]
    )


def _mean_over_tasks(tasks: list[list[EpisodeRecord]], name: str) -> Estimate | None:
    return estimate([statistics.fmean(getattr(each, name) for each in task) for task in tasks])


def _compute_means(scored: list[EpisodeRecord]) -> dict[str, float]:
    numbers = {
        "turns": [len(each.rewards) for each in scored],
        "prompt_tokens": [each.prompt_tokens for each in scored],
        "completion_tokens": [each.completion_tokens for each in scored],
        "seconds": [each.seconds for each in scored],
        "model_seconds": [each.model_seconds for each in scored],
        "truncated": [each.truncated for each in scored],
        "turn_cut_off": ["length" in each.finish_reasons for each in scored],
    }
    return {name: statistics.fmean(values) for name, values in numbers.items() if values}


def _aggregate_environment_metrics(env: str, scored: list[EpisodeRecord]) -> dict[str, object]:
    aggregate = getattr(env_class_of(spec_of(env)), "aggregate_metrics", default_aggregate_metrics)
    return dict(aggregate([each.metrics for each in scored])) if scored else {}


def table(summary: Summary) -> str:
    """Format the summary as text for people."""
    asked = summary.num_tasks * summary.num_samples
    lines = [
        f"{summary.env} with {summary.model}: {summary.num_tasks} tasks, {summary.num_samples} episodes each; "
        f"{summary.num_scored} of {asked} scored"
    ]
    named = {f"pass@{k}": value for k, value in summary.pass_at.items()}
    named |= {"reward": summary.reward, "outcome reward": summary.outcome_reward}
    lines += [f"  {name:<20}{_format_estimate(value)}" for name, value in named.items()]
    means = summary.means | {
        name: value for name, value in summary.environment.items() if isinstance(value, float | int)
    }
    lines += [f"  {name:<20}{value:.4g}" for name, value in means.items()]
    if summary.failures:
        lines.append("failed and not counted above (run again to retry):")
        lines += [f"  {kind:<20}{count}, e.g. {summary.errors[kind][:200]}" for kind, count in summary.failures.items()]
    return "\n".join(lines)


def _format_estimate(value: Estimate | None) -> str:
    if value is None:
        return "no task has enough episodes"
    interval = f"{value.level:.0%} [{value.low:.4f}, {value.high:.4f}]"
    return f"{value.mean:.4f}  {interval} ({value.method}, {value.num_tasks} tasks)"

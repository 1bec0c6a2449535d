"""Metrics of healthy runs and of runs with a failure that begins at a known step, with the noise of real runs."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

Row = dict[str, float]
Change = Callable[[Row, int, random.Random], None]
"""Changes the metrics of a step. Args: metrics, step (from 1), source of noise."""

NUM_STEPS = 40
EVAL_INTERVAL = 5


def build_run(change: Change, seed: int = 0, num_steps: int = NUM_STEPS) -> list[Row]:
    """Return the metrics of each step of a run that learns, with a change."""
    noise = random.Random(seed)
    rows: list[Row] = []
    for step in range(1, num_steps + 1):
        row = build_step(step, noise)
        change(row, step, noise)
        rows.append(row)
    return rows


def build_step(step: int, noise: random.Random) -> Row:
    """Return the metrics of a step of a run of GRPO that learns."""
    learned = 1 / (1 + math.exp(-(step - 15) / 5))
    reward = clip(0.15 + 0.6 * learned + noise.gauss(0, 0.03))
    row = {
        "reward/avg_raw_reward": reward,
        "reward/avg_pass_at_8": clip(reward + 0.2),
        "loss/zero_variance_share": clip(0.3 + 0.2 * learned + noise.gauss(0, 0.05)),
        "loss/num_lone_samples": 0.0,
        "policy/grad_norm": 0.4 * math.exp(noise.gauss(0, 0.4)),
        "policy/policy_lr": 1e-6 * min(1.0, step / 10),
        "policy/policy_entropy": 0.6 - 0.35 * learned + noise.gauss(0, 0.02),
        "policy/policy_kl": 0.001 + 0.04 * learned + abs(noise.gauss(0, 0.003)),
        "policy/ratio_deviation_max": 0.8 * math.exp(noise.gauss(0, 0.8)),
        "policy/loss_metrics/clip_ratio": abs(noise.gauss(0.01, 0.005)),
        "policy/skipped_updates": float(step == 23),
        "policy/rollout_train_ess": 0.995 - abs(noise.gauss(0, 0.003)),
        "policy/rollout_train_logprobs_abs_diff_mean": 0.012 * math.exp(noise.gauss(0, 0.3)),
        "critic/critic_loss": 0.4 * math.exp(-step / 8) + 0.05 * math.exp(noise.gauss(0, 0.4)),
        "generate/avg_num_tokens": 250 + 120 * learned + noise.gauss(0, 10),
        "generate/avg_tokens_non_zero_rewards": 230 + 120 * learned + noise.gauss(0, 10),
        "generate/max_num_tokens": 512.0,
        "generate/stop_reason/length": clip(0.15 - 0.1 * learned + noise.gauss(0, 0.02)),
        "generate/repetition": clip(0.08 + noise.gauss(0, 0.02)),
        "generate/failed_share": clip(noise.gauss(0.01, 0.01)),
        "generate/failed_share/gsm8k": clip(noise.gauss(0.01, 0.01)),
        "generate/failed_share/search": clip(noise.gauss(0.02, 0.02)),
        "generate/num_failed/tool": 3.0,
        "generate/distinct_prompts_share": 1.0,
        "generate/weight_version_lag_mean": 0.0,
    }
    if step % EVAL_INTERVAL == 0:
        row["eval/all/avg_score"] = clip(reward - 0.03 + noise.gauss(0, 0.02))
    return row


def clip(value: float, low: float = 0.0, high: float = 1.0) -> float:
    return min(high, max(low, value))


def keep(row: Row, step: int, noise: random.Random) -> None:
    """Change nothing."""


def supervised(row: Row, step: int, noise: random.Random) -> None:
    """Metrics of supervised training: two epochs."""
    row.clear()
    row["train/loss"] = (1.2 if step <= 20 else 0.9) + 1.5 * math.exp(-step / 6) + noise.gauss(0, 0.08)
    row["train/grad_norm"] = math.exp(noise.gauss(0, 0.5))


def solve(row: Row, step: int, noise: random.Random) -> None:
    """All prompts are solved after 25 steps: equal rewards, no gradient."""
    if step > 25:
        row |= {"reward/avg_raw_reward": 1.0, "reward/avg_pass_at_8": 1.0, "loss/zero_variance_share": 1.0}
        row |= {"policy/grad_norm": 0.0, "policy/policy_entropy": 0.01, "eval/all/avg_score": 1.0}


def vary(**changes: Callable[[float, int, random.Random], float]) -> Change:
    """Change single metrics: the end of a metric's name -> function of its value, the step and noise."""

    def change(row: Row, step: int, noise: random.Random) -> None:
        for ending, function in changes.items():
            for name in [name for name in row if name.rpartition("/")[2] == ending]:
                row[name] = function(row[name], step, noise)

    return change


def asynchronous(row: Row, step: int, noise: random.Random) -> None:
    row["generate/weight_version_lag_mean"] = clip(noise.gauss(1.5, 0.5), 0, 4)
    row["policy/rollout_train_ess"] = clip(noise.gauss(0.955, 0.012), 0.91, 1)


def shift_reward(row: Row, step: int, noise: random.Random) -> None:
    """Rewards of -1 and 1."""
    for name in ("reward/avg_raw_reward", "eval/all/avg_score"):
        if name in row:
            row[name] = 2 * row[name] - 1


def drop_evaluation(row: Row, step: int, noise: random.Random) -> None:
    row.pop("eval/all/avg_score", None)


HEALTHY: dict[str, Change] = {
    "learns": keep,
    "solves everything": solve,
    "small batches": vary(avg_raw_reward=lambda value, _, noise: clip(value + noise.gauss(0, 0.2))),
    "rewards of -1 and 1": shift_reward,
    "penalties only": vary(avg_raw_reward=lambda value, *_: value - 1.2, avg_score=lambda value, *_: value - 1.2),
    "rare rewards": vary(
        avg_raw_reward=lambda _, __, noise: clip(noise.gauss(0.02, 0.02)),
        avg_score=lambda _, __, noise: clip(noise.gauss(0.02, 0.01)),
    ),
    "responses grow": vary(avg_num_tokens=lambda value, step, _: value * (1 + step / 10)),
    "responses shrink as rewards rise": vary(avg_num_tokens=lambda value, step, _: value * math.exp(-step / 10)),
    "truncated at first": vary(length=lambda value, step, _: clip(0.9 * math.exp(-step / 6) + value)),
    "low entropy": vary(policy_entropy=lambda value, *_: 0.1 * value),
    "entropy doubles": vary(policy_entropy=lambda value, step, _: value * (1 + step / 20)),
    "cosine schedule": vary(policy_lr=lambda _, step, __: 1e-6 * (0.01 + math.cos(step / NUM_STEPS * math.pi / 2))),
    "warmup within two steps": vary(policy_lr=lambda _, step, __: 1e-4 if step > 1 else 2e-5),
    "warmup from 0": vary(policy_lr=lambda _, step, __: 1e-5 * min(1.0, (step - 1) / 3)),
    "KL grows": vary(policy_kl=lambda value, step, _: value * (1 + step / 10)),
    "harder prompts": vary(avg_raw_reward=lambda value, step, _: value * (0.7 if step > 25 else 1)),
    "single outliers": vary(
        grad_norm=lambda value, step, _: value * (60 if step in (11, 30) else 1),
        ratio_deviation_max=lambda value, step, _: value * (50 if step in (12, 33) else 1),
        avg_raw_reward=lambda value, step, _: 0.0 if step == 28 else value,
    ),
    "asynchronous": asynchronous,
    "some rollouts fail": vary(failed_share=lambda *args: clip(args[2].gauss(0.08, 0.03))),
    "dynamic sampling without evaluation": drop_evaluation,
    "supervised": supervised,
}


@dataclass(frozen=True)
class Failure:
    """A failure that begins at a step."""

    name: str
    """Name of the rule."""

    onset: int
    plant: Change
    """Change of each step from the onset on."""

    base: Change = keep
    delay: int = 5
    """Steps within which it is to be found."""

    def change(self, row: Row, step: int, noise: random.Random) -> None:
        self.base(row, step, noise)
        if step >= self.onset:
            self.plant(row, step - self.onset, noise)


def set_to(**values: float) -> Change:
    """Set single metrics, by the end of their names."""

    def constant(value: float) -> Callable[[float, int, random.Random], float]:
        return lambda *_: value

    return vary(**{name: constant(value) for name, value in values.items()})


def both(*changes: Change) -> Change:
    def change(row: Row, step: int, noise: random.Random) -> None:
        for each in changes:
            each(row, step, noise)

    return change


def rise(value: float, step: int, noise: random.Random) -> float:
    return value + 2 * (step + 1)


def shrink(value: float, step: int, noise: random.Random) -> float:
    return 0.2 * value


MISMATCH = set_to(rollout_train_ess=0.7, rollout_train_logprobs_abs_diff_mean=0.4)
DEAD = set_to(avg_raw_reward=0, avg_pass_at_8=0, zero_variance_share=1, grad_norm=0)
LITTLE = set_to(avg_raw_reward=0.08, avg_pass_at_8=1)

FAILURES: dict[str, Failure] = {
    "reward falls to 0": Failure("reward-collapse", 20, DEAD),
    "reward falls to 0 at step 2": Failure("reward-collapse", 2, DEAD),
    "every response is rewarded a little": Failure("reward-collapse", 2, both(DEAD, LITTLE)),
    "reward falls to a third": Failure("reward-collapse", 30, vary(avg_raw_reward=lambda value, *_: value / 3)),
    "no gradient from the beginning": Failure("no-gradient", 1, DEAD),
    "all groups equal": Failure("no-gradient", 15, set_to(zero_variance_share=1, avg_pass_at_8=0.4)),
    "gradient is 0": Failure("no-gradient", 12, set_to(grad_norm=0, avg_pass_at_8=0.6)),
    "entropy collapses": Failure(
        "entropy-collapse", 18, set_to(policy_entropy=0.02, zero_variance_share=0.9, avg_pass_at_8=0.5)
    ),
    "entropy explodes": Failure("entropy-explosion", 22, vary(policy_entropy=rise, avg_raw_reward=shrink)),
    "evaluation falls": Failure(
        "evaluation-gap", 25, vary(avg_score=lambda value, *_: 0.5 * value), delay=2 * EVAL_INTERVAL
    ),
    "gradient norm of 100 times": Failure("gradient-norm", 14, vary(grad_norm=lambda value, *_: 100 * value)),
    "learning rate of 100 times": Failure("learning-rate", 14, vary(policy_lr=lambda value, *_: 100 * value)),
    "large steps": Failure("ratio-deviation", 1, set_to(ratio_deviation_max=244, clip_ratio=0.5)),
    "updates are skipped": Failure("skipped-updates", 9, set_to(skipped_updates=1)),
    "KL runs away": Failure("kl-runaway", 20, vary(policy_kl=lambda value, step, _: 0.3 + value * 2**step)),
    "value loss diverges": Failure("value-loss", 25, vary(critic_loss=lambda value, step, _: 3 + value * 4**step)),
    "responses collapse": Failure(
        "length-collapse", 16, both(vary(avg_num_tokens=lambda value, *_: 0.02 * value), set_to(avg_raw_reward=0.1))
    ),
    "truncated from the beginning": Failure("truncation", 1, set_to(length=0.74)),
    "truncated later": Failure("truncation", 20, set_to(length=0.6)),
    "responses loop": Failure("repetition", 18, set_to(repetition=0.85)),
    "environment is down": Failure("rollout-failures", 11, set_to(search=1)),
    "a third of rollouts fail": Failure("rollout-failures", 11, set_to(failed_share=0.34)),
    "few prompts": Failure("few-prompts", 1, set_to(distinct_prompts_share=0.06)),
    "stale weights": Failure("stale-weights", 8, set_to(weight_version_lag_mean=6, rollout_train_ess=0.6)),
    "engine differs": Failure("engine-mismatch", 13, MISMATCH),
    "loss diverges": Failure("loss-divergence", 21, vary(loss=rise), supervised),
}  # fmt: skip

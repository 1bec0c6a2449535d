"""Paired comparison of two evaluations, of two checkpoints say: `python -m skyrl_gym.eval.compare FOLDER_A FOLDER_B`.

The tasks that both have are compared one by one, so what makes tasks differ in difficulty cancels out.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from skyrl_gym.error import Error
from skyrl_gym.eval.records import group_successes_by_task, read_records
from skyrl_gym.eval.statistics import BOOTSTRAP, Estimate, bootstrap, mean_of_sets, sign_test

SAME = ("--env", "--data", "--success-at")
"""Settings without which a comparison means nothing. Others may differ, and are told."""

SIGNIFICANT = 0.05

Shares = dict[int, float]
"""Share of a task's samples that are right, by task."""


@dataclass(frozen=True)
class Evaluated:
    """One evaluation's folder."""

    folder: Path
    settings: dict[str, object]
    """Settings by flag."""
    shares: Shares

    @classmethod
    def read(cls, folder: Path) -> "Evaluated":
        """Raises Error if the folder holds no evaluation."""
        try:
            settings = json.loads((folder / "settings.json").read_text())
            records, _ = read_records(folder / "episodes.jsonl")
        except (OSError, ValueError, TypeError) as failure:
            raise Error(f"{folder} is not an evaluation folder: {failure}") from failure
        shares = {task: statistics.fmean(right) for task, right in group_successes_by_task(records.values()).items()}
        return cls(folder, settings, shares)


@dataclass(frozen=True)
class Comparison:
    """B minus A over the tasks that both have."""

    name: str
    mean_a: float
    mean_b: float
    differences: tuple[float, ...]
    """B minus A of each task."""
    difference: Estimate
    """Mean of the differences; its interval is a bootstrap over the tasks."""
    num_won: int
    """Tasks of which B has the larger share right."""
    num_lost: int
    num_tied: int
    sign_p: float
    """p value of the exact two-sided sign test."""
    only_in_a: int
    """Tasks without a scored episode in B, which are left out."""
    only_in_b: int
    other_settings: tuple[str, ...]
    """Settings that differ: the difference may be due to them."""

    @property
    def verdict(self) -> str:
        """The result in words."""
        return verdict(self.difference, self.sign_p)


def verdict(difference: Estimate, sign_p: float) -> str:
    """Return the result in words. Both tests must agree: of few tasks, the interval alone is too narrow."""
    better = "B is better than A" if difference.mean > 0 else "A is better than B"
    excludes_zero = difference.low > 0 or difference.high < 0
    if excludes_zero and sign_p < SIGNIFICANT:
        return f"{better}: distinguishable from noise"
    if excludes_zero:
        return f"inconclusive: the interval excludes 0, but the sign test does not confirm it (p = {sign_p:.3g})"
    if sign_p < SIGNIFICANT:
        return f"inconclusive: the sign test finds a difference (p = {sign_p:.3g}), but the interval includes 0"
    return "not distinguishable from noise"


def compare(a: Evaluated, b: Evaluated, name: str = "") -> Comparison:
    """Compare two evaluations task by task.

    Raises:
        Error: they are of other data, environments or success, or have no task in common.
    """
    for flag in SAME:
        if a.settings.get(flag) != b.settings.get(flag):
            raise Error(
                f"{a.folder} and {b.folder} cannot be compared: {flag} is {a.settings.get(flag)!r} in one and "
                f"{b.settings.get(flag)!r} in the other; evaluate both checkpoints on the same rows"
            )
    tasks = sorted(a.shares.keys() & b.shares.keys())
    if not tasks:
        raise Error(f"{a.folder} and {b.folder} have no task with a scored episode in both")
    differences = [b.shares[task] - a.shares[task] for task in tasks]
    low, high = bootstrap(differences)
    won, lost = sum(each > 0 for each in differences), sum(each < 0 for each in differences)
    named = {*a.settings, *b.settings} - {"--model", *SAME}
    return Comparison(
        name=name or a.folder.name,
        mean_a=statistics.fmean(a.shares[task] for task in tasks),
        mean_b=statistics.fmean(b.shares[task] for task in tasks),
        differences=tuple(differences),
        difference=Estimate(statistics.fmean(differences), low, high, BOOTSTRAP, len(tasks)),
        num_won=won,
        num_lost=lost,
        num_tied=len(tasks) - won - lost,
        sign_p=sign_test(won, lost),
        only_in_a=len(a.shares.keys() - b.shares.keys()),
        only_in_b=len(b.shares.keys() - a.shares.keys()),
        other_settings=tuple(flag for flag in sorted(named) if a.settings.get(flag) != b.settings.get(flag)),
    )


def compare_folders(a: Path, b: Path) -> tuple[list[Comparison], list[str]]:
    """Compare two evaluations, or the suites that two folders of suites have in common.

    Returns: comparisons, and the suites that only one folder has.

    Raises:
        Error: as `compare`; or the folders hold no evaluations, or have no suite in common.
    """
    if (a / "settings.json").exists() or (b / "settings.json").exists():
        return [compare(Evaluated.read(a), Evaluated.read(b))], []
    suites_a, suites_b = _find_suites(a), _find_suites(b)
    common = sorted(suites_a & suites_b)
    if not common:
        found = [f"{folder} has {', '.join(sorted(has)) or 'none'}" for folder, has in ((a, suites_a), (b, suites_b))]
        raise Error(f"no evaluation is in both folders: {'; '.join(found)}")
    comparisons = [compare(Evaluated.read(a / name), Evaluated.read(b / name), name) for name in common]
    return comparisons, sorted(suites_a ^ suites_b)


def _find_suites(folder: Path) -> set[str]:
    return {path.parent.name for path in folder.glob("*/settings.json")}


def report(comparisons: Sequence[Comparison], only_in_one: Sequence[str] = ()) -> Iterator[str]:
    """Yield the lines of a report for people."""
    for each in comparisons:
        yield from _format_lines(each)
    mean = mean_of_sets([each.differences for each in comparisons], are_shares=False)
    if mean is not None and len(comparisons) > 1:
        won, lost = sum(each.num_won for each in comparisons), sum(each.num_lost for each in comparisons)
        yield f"mean of {len(comparisons)} suites, each counted once"
        yield f"  B - A     {_format_signed(mean)}"
        yield f"  tasks     B wins {won}, loses {lost}; sign test p = {sign_test(won, lost):.3g}"
        yield f"  verdict   {verdict(mean, sign_test(won, lost))}"
    if only_in_one:
        yield f"not compared, only in one folder: {', '.join(only_in_one)}"


def _format_lines(each: Comparison) -> Iterator[str]:
    yield f"{each.name}: {each.difference.num_tasks} tasks in both"
    if each.only_in_a or each.only_in_b:
        yield f"  left out  {each.only_in_a} tasks without a scored episode in B, {each.only_in_b} without one in A"
    yield f"  mean      A {each.mean_a:.4f}, B {each.mean_b:.4f}"
    yield f"  B - A     {_format_signed(each.difference)}"
    won = f"B wins {each.num_won}, loses {each.num_lost}, ties {each.num_tied}"
    yield f"  tasks     {won}; sign test p = {each.sign_p:.3g}"
    yield f"  verdict   {each.verdict}"
    if each.other_settings:
        yield f"  caution   made with different {', '.join(each.other_settings)}"


def _format_signed(value: Estimate) -> str:
    return f"{value.mean:+.4f}  {value.level:.0%} [{value.low:+.4f}, {value.high:+.4f}] ({value.method})"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Returns: 0, or 2 if the folders cannot be compared."""
    parser = argparse.ArgumentParser(
        prog="python -m skyrl_gym.eval.compare",
        description="Compare two evaluations task by task (B minus A), folders of suites suite by suite.",
    )
    parser.add_argument("a", type=Path, metavar="FOLDER_A", help="output folder of an evaluation, or of suites")
    parser.add_argument("b", type=Path, metavar="FOLDER_B", help="the same of another checkpoint")
    options = parser.parse_args(arguments)
    try:
        print("\n".join(report(*compare_folders(options.a, options.b))))
    except Error as failure:
        print(f"{type(failure).__name__}: {failure}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Print one row of a recipe's table: the published figures, ours and their 95 % intervals.

    python examples/recipes/table.py dapo qwen2.5_math_7b evaluations/dapo/qwen2.5_math_7b

The folder is what the recipe's `run_evaluation.sh` wrote (every answer with its score), or a file of trajectories of
`python -m skyrl_agent.evaluate`. Answers that failed (an engine or a server did not work) count in no figure; their
number is shown. Also writes `table.json` next to the answers.
"""

import argparse
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from skyrl_gym.eval.statistics import Estimate, estimate, mean_of_sets, pass_at_k

Answers = dict[str, dict[str, list[float]]]
"""Data source -> task -> scores of the task's answers."""


@dataclass(frozen=True)
class Figure:
    """One cell: what was published, and ours with its interval (None: not published, not measured)."""

    name: str
    published: float | None
    ours: Estimate | None


@dataclass(frozen=True)
class Recipe:
    """A table: from answers to figures, and what was published, by row."""

    figures: Callable[[Answers], dict[str, Estimate | None]]
    published: Mapping[str, Mapping[str, float]]


# ---- figures of answers


def aime_figures(answers: Answers) -> dict[str, Estimate | None]:
    """Compute pass@n, mean@n and the mean score of answers that score 1 or -1."""
    tasks = [scores for source in answers.values() for scores in source.values()]
    n = max((len(scores) for scores in tasks), default=0)
    rights = [sum(score > 0 for score in scores) for scores in tasks]
    passes = [pass_at_k(len(scores), right, len(scores)) for scores, right in zip(tasks, rights, strict=True)]
    means = [right / len(scores) for scores, right in zip(tasks, rights, strict=True)]
    return {
        f"pass@{n}": estimate(passes),
        f"mean@{n}": estimate(means),
        "score": estimate([2 * mean - 1 for mean in means]),
    }


def accuracy_by_source(sources: Sequence[str]) -> Callable[[Answers], dict[str, Estimate | None]]:
    """Return a function that computes the share of tasks answered right (score 1), by data source and the mean of all.

    The mean counts every source once; its interval takes the sources as independent (normal approximation)."""

    def figures(answers: Answers) -> dict[str, Estimate | None]:
        unknown = sorted(set(answers) - set(sources))
        shares = {
            source: [statistics.fmean(score == 1 for score in scores) for scores in answers.get(source, {}).values()]
            for source in [*sources, *unknown]
        }
        found: dict[str, Estimate | None] = {source: estimate(values) for source, values in shares.items()}
        found["mean"] = mean_of_sets([shares[source] for source in sources])
        return found

    return figures


# ---- published figures: where they are from is in docs/recipes.md

SPIDER = ("spider_dev", "spider_test", "spider_realistic", "spider_dk", "spider_syn")
SEVEN = (
    "searchR1_nq",
    "searchR1_triviaqa",
    "searchR1_popqa",
    "searchR1_hotpotqa",
    "searchR1_2wikimultihopqa",
    "searchR1_musique",
    "searchR1_bamboogle",
)


def _aime(pass_at_32: float | None, *, mean: float | None = None, score: float | None = None) -> dict[str, float]:
    if mean is None and score is not None:
        mean = (score + 1) / 2
    figures = {"pass@32": pass_at_32, "mean@32": mean, "score": None if mean is None else 2 * mean - 1}
    return {name: round(value, 4) for name, value in figures.items() if value is not None}


def _percent(sources: Sequence[str], *values: float) -> dict[str, float]:
    return {name: round(value / 100, 4) for name, value in zip([*sources, "mean"], values, strict=True)}


RECIPES = {
    "dapo": Recipe(
        aime_figures,
        {
            "qwen2.5_math_7b": _aime(0.633, score=-0.304),
            "qwen3_1.7b_base": _aime(0.4, score=-0.702),
            "qwen3_1.7b_base_later": _aime(0.366, mean=0.144),
            "qwen3_1.7b_base_zero_variance": _aime(0.433, mean=0.169),
            "qwen3_4b_base": _aime(0.6, score=-0.51),
            "qwen3_4b_base_later": _aime(None, mean=0.254),
            "qwen3_4b_base_megatron": _aime(0.633, mean=0.246),
            "qwen3_4b_base_lora": _aime(0.566, mean=0.209),
            "qwen2.5_32b": _aime(0.766, mean=0.381),
            "qwen3_30b_a3b_base_megatron": _aime(0.733, mean=0.4375),
            "qwen3_30b_a3b_base_megatron_lora": _aime(0.8, mean=0.433),
        },
    ),
    "skyrl_sql": Recipe(
        accuracy_by_source(SPIDER),
        {
            "base_1_turns": _percent(SPIDER, 77.1, 79.6, 74.2, 62.8, 66.2, 72.0),
            "single_1_turns": _percent(SPIDER, 81.2, 83.8, 76.8, 67.9, 70.1, 76.0),
            "multi_1_turns": _percent(SPIDER, 82.4, 83.7, 80.3, 70.5, 71.2, 77.6),
            "single_5_turns": _percent(SPIDER, 79.5, 82.2, 77.6, 65.6, 68.4, 74.7),
            "multi_5_turns": _percent(SPIDER, 83.9, 85.2, 81.1, 72.0, 73.7, 79.2),
        },
    ),
    "search_r1": Recipe(
        accuracy_by_source(SEVEN),
        {
            "search_r1_3_turns": _percent(SEVEN, 39.7, 56.5, 39.1, 33.1, 31.0, 12.4, 23.2, 33.6),
            "2_turns": _percent(SEVEN, 45.5, 61.3, 44.7, 33.4, 31.3, 8.6, 24.2, 35.6),
            "3_turns": _percent(SEVEN, 44.9, 61.6, 44.4, 41.7, 39.6, 17.9, 44.8, 42.1),
            "4_turns": _percent(SEVEN, 44.9, 61.1, 43.5, 40.7, 40.3, 16.3, 35.2, 40.3),
            "30b_a3b_4_turns": _percent(SEVEN, 46.3, 66.4, 44.8, 41.2, 36.1, 17.8, 48.8, 45.7),
        },
    ),
    "swe": Recipe(
        accuracy_by_source(["swe-bench"]),
        {
            "openhands_7b": {"swe-bench": 0.146},
            "qwen3_8b": {"swe-bench": 0.094},
            "qwen3_14b": {"swe-bench": 0.216},
            "qwen3_32b": {"swe-bench": 0.394},
        },
    ),
    "gsm8k": Recipe(accuracy_by_source(["openai_gsm8k"]), {}),
}


# ---- files


def read_answers(path: Path) -> tuple[Answers, int]:
    """Read the answers below a folder, or in a file of trajectories. Returns: scores, and the number of failed answers.

    Raises:
        FileNotFoundError: no answers exist.
    """
    answers: Answers = defaultdict(lambda: defaultdict(list))
    num_failed = 0
    for source, task, score in _trajectories(path) if path.is_file() else _evaluated(path):
        if score is None:
            num_failed += 1
        else:
            answers[source.replace("/", "_")][task].append(score)
    return answers, num_failed


def _evaluated(folder: Path) -> Iterator[tuple[str, str, float | None]]:
    """Yield source, task and score of each answer that `main_generate` wrote."""
    files = [file for file in folder.glob("dumped_evals/*/*.jsonl") if file.name != "aggregated_results.jsonl"]
    if not files:
        raise FileNotFoundError(f"no answers below {folder}: run the recipe's run_evaluation.sh first")
    for file in sorted(files):
        with file.open(encoding="utf-8") as lines:
            for row in map(json.loads, lines):
                # The row's number keeps apart two rows that ask the same.
                task = json.dumps([row["input_prompt"], (row["env_extras"].get("extra_info") or {}).get("index")])
                yield row["data_source"] or "unknown", task, None if row["failure"] else row["score"]


def _trajectories(file: Path) -> Iterator[tuple[str, str, float | None]]:
    """Yield source, task and score of each trajectory of an agent; a later try of one replaces the earlier."""
    from skyrl_agent.records import last_records

    for record in last_records(file).values():
        yield record.get("data_source") or "unknown", str(record["instance_id"]), record["reward"]


# ---- the table


def fill(recipe: str, row: str, answers: Answers) -> list[Figure]:
    """Return the row's cells."""
    published = RECIPES[recipe].published.get(row, {})
    ours = RECIPES[recipe].figures(answers)
    return [Figure(name, published.get(name), ours.get(name)) for name in dict.fromkeys([*published, *ours])]


def lines(row: str, figures: Iterable[Figure], num_failed: int) -> Iterator[str]:
    """Yield the table as Markdown."""
    yield f"| {row} | published | ours | 95 % interval | tasks | published lies |"
    yield "|---|---|---|---|---|---|"
    for figure in figures:
        published = "" if figure.published is None else f"{figure.published:.3f}"
        if figure.ours is None:
            yield f"| {figure.name} | {published} | not measured | | | |"
            continue
        ours, lies = figure.ours, ""
        if figure.published is not None:
            lies = "below" if figure.published < ours.low else "above" if figure.published > ours.high else "within"
        interval = f"{ours.low:.3f} to {ours.high:.3f}"
        yield f"| {figure.name} | {published} | {ours.mean:.3f} | {interval} | {ours.num_tasks} | {lies} |"
    if num_failed:
        yield f"\n{num_failed} answers failed and are in no figure."


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", choices=sorted(RECIPES))
    parser.add_argument("row", help="name of the row; another one than the table's gets no published figures")
    parser.add_argument("answers", type=Path, help="folder of the evaluation, or a file of trajectories")
    options = parser.parse_args(argv)
    known = RECIPES[options.recipe].published
    if options.row not in known:
        names = ", ".join(known) or "none"
        print(f"{options.row} is no row of the table of {options.recipe} ({names}): only our figures are shown")
    answers, num_failed = read_answers(options.answers)
    figures = fill(options.recipe, options.row, answers)
    print("\n".join(lines(options.row, figures, num_failed)))
    folder = options.answers if options.answers.is_dir() else options.answers.parent
    cells = {"row": options.row, "failed_answers": num_failed, "figures": [asdict(figure) for figure in figures]}
    (folder / "table.json").write_text(json.dumps(cells, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

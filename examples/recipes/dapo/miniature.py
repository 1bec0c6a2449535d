"""DAPO in miniature: clip-higher, token mean and overlong shaping against plain GRPO, on sums under a length limit.

    python examples/recipes/dapo/miniature.py [--seeds 0 1 2] [--steps 12] [--output runs/miniature-dapo]

A Qwen3-architecture model of 0.1 million parameters adds three to six named numbers. Its warm-up shows three ways: an
answer without steps (wrong), every addition written in full (right, but for six numbers longer than the limit), and
running totals (right and short, one demonstration in seven). All arms are `run_qwen3_1.7b_base.sh` with
`FIGURES=later`; plain GRPO overrides DAPO's settings by the four of `PLAIN`, a third arm only the first of them. Prints
tables of paired differences over seeds and draws the curves. Runs that are complete in `--output` are not repeated.
"""

import json
import random
import subprocess
import sys
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from miniatures import (
    Difference,
    Messages,
    Metrics,
    argument_parser,
    draw_curves,
    last_value,
    markdown_table,
    mean_value,
    train,
    warm_up,
)
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from skyrl_train_testing.tiny_models import build_character_tokenizer, build_tiny_qwen3

HERE = Path(__file__).resolve().parent
SCRIPT = HERE / "run_qwen3_1.7b_base.sh"
LIMIT = 36
"""Tokens of a response. The overlong buffer is the last half of them, as in the recipe."""

SETTINGS = [
    "trainer.max_prompt_length=32",
    f"generator.sampling_params.max_generate_length={LIMIT}",
    f"trainer.algorithm.overlong_buffer.len={LIMIT // 2}",
    "trainer.train_batch_size=16",
    "trainer.policy_mini_batch_size=1",
    "trainer.micro_forward_batch_size_per_gpu=64",
    "trainer.micro_train_batch_size_per_gpu=16",
    "trainer.eval_batch_size=64",
    "generator.eval_n_samples_per_prompt=4",
    "trainer.policy.optimizer_config.lr=1e-4",
    "trainer.policy.optimizer_config.num_warmup_steps=32",
]
"""Sizes: 16 updates a step, as in the recipe, so that clipping acts."""

CLIP_AS_LOW = "trainer.algorithm.eps_clip_high=0.2"
PLAIN = [
    CLIP_AS_LOW,
    "trainer.algorithm.loss_reduction=sequence_mean",
    "trainer.algorithm.overlong_buffer.len=null",
    "generator.apply_overlong_filtering=false",
]
ARMS = {"DAPO": [], "plain GRPO": PLAIN, "DAPO without clip-higher": [CLIP_AS_LOW]}

ENTROPY = "generate/entropy"
"""Over every sampled token: `policy/policy_entropy` is over those that train, which differ between the arms."""

BANDS = {"DAPO": [f"trainer.curve_bands={HERE / 'bands' / 'miniature.yaml'}"]}
"""Expected curves of an arm, which its runs are compared with."""

METRICS = {
    "eval/all/avg_score": "evaluation reward",
    ENTROPY: "entropy of all sampled tokens",
    "generate/stop_reason/length": "share cut off by length",
}
"""Curves of the picture, by title."""

FIGURES: dict[str, tuple[Callable[[Metrics], float], int]] = {
    "evaluation reward, mean of the run": (lambda rows: mean_value(rows, "eval/all/avg_score"), 1),
    "evaluation reward, last": (lambda rows: last_value(rows, "eval/all/avg_score"), 1),
    "training reward, last 5 steps": (lambda rows: mean_value(rows, "reward/avg_raw_reward", 5), 1),
    "entropy, mean of the run": (lambda rows: mean_value(rows, ENTROPY), 1),
    "entropy, last 5 steps": (lambda rows: mean_value(rows, ENTROPY, 5), 1),
    "share cut off, mean of the run": (lambda rows: mean_value(rows, "generate/stop_reason/length"), -1),
    "share cut off, last 5 steps": (lambda rows: mean_value(rows, "generate/stop_reason/length", 5), -1),
}
"""Figure of a run -> how it is read, and the sign of the difference that the recipe claims."""

NAMES = "abcdef"
CONNECTIVES = (" so ", " and ", " then ")
NUM_TERMS = (3, 4, 5, 6)
SKILLS = {"guess": 0.1, "full": 0.3, "totals": 0.6}
HABITS = {"guess": 0.3, "full": 0.55, "totals": 0.15}
"""Share of each way among the demonstrations: of a first phase, in which all are learned, and of a second, after which
the good one is rare."""


def make_tokenizer() -> PreTrainedTokenizerBase:
    """A token for each number below 100, each connective, `Answer:` and each character."""
    return build_character_tokenizer(
        added_tokens=["user", "assistant", "Answer:", *CONNECTIVES, *map(str, range(10, 100))]
    )


def problem_of(draw: random.Random, *, held_out: bool = False) -> list[int]:
    """Draw three to six digits. One problem in eight is for evaluation alone, by a property of its text."""
    while True:
        terms = [draw.randint(1, 5) for _ in range(draw.choice(NUM_TERMS))]
        if (zlib.crc32(text_of(terms).encode()) % 8 == 0) == held_out:
            return terms


def text_of(terms: list[int]) -> str:
    """Write the problem: the sum of named numbers, as `a3b5c2`."""
    return "".join(f"{name}{term}" for name, term in zip(NAMES, terms, strict=False))


def solution_of(terms: list[int], way: str, draw: random.Random) -> str:
    """Write a response in one of the ways. Connectives are drawn freely: they change nothing of the reward."""
    totals = [sum(terms[: i + 1]) for i in range(1, len(terms))]
    if way == "guess":
        return f"\nAnswer: {draw.randint(10, 40)}"
    steps = [
        f"{name}{total - term}+{term}={total}" if way == "full" else f"{name}{total}"
        for name, term, total in zip(NAMES[1:], terms[1:], totals, strict=False)
    ]
    first = f"{NAMES[0]}{terms[0]}" if way == "totals" else ""
    return first + "".join(step + draw.choice(CONNECTIVES) for step in steps) + f"\nAnswer: {totals[-1]}"


def demonstrate(draw: random.Random, ways: Mapping[str, float]) -> Messages:
    terms = problem_of(draw)
    way = draw.choices(list(ways), weights=list(ways.values()))[0]
    return [
        {"role": "user", "content": text_of(terms)},
        {"role": "assistant", "content": solution_of(terms, way, draw)},
    ]


def warmed_up(
    folder: Path, start: Path | None, ways: Mapping[str, float], steps: int, learning_rate: float, seed: int
) -> Path:
    """Warm up the model of `start`, or a new one, unless the folder has it. Returns: the folder."""
    if not (folder / "config.json").exists():
        tokenizer = make_tokenizer()
        model = (
            AutoModelForCausalLM.from_pretrained(start)
            if start
            else build_tiny_qwen3(hidden_size=64, head_dim=32, vocab_size=len(tokenizer), max_position_embeddings=256)
        )
        demonstrations = partial(demonstrate, ways=ways)
        warm_up(model, tokenizer, demonstrations, steps=steps, batch_size=64, learning_rate=learning_rate, seed=seed)
        tokenizer.save_pretrained(folder)
        model.save_pretrained(folder)
    return folder


def prepare(folder: Path, skills: Path, seed: int, warm_up_steps: int) -> None:
    """Make the model and the data of a seed, unless the folder has them. `skills`: the model of the first phase."""
    warmed_up(folder / "model", skills, HABITS, max(warm_up_steps // 8, 1), 1e-3, seed)
    if not (folder / "data" / "validation.parquet").exists():
        draw = random.Random(seed + 1000)
        files = {"train": (2048, False), "test": (64, True)}
        for name, (number, held_out) in files.items():
            problems = [problem_of(draw, held_out=held_out) for _ in range(number)]
            rows = [
                {
                    "prompt": [{"role": "user", "content": text_of(terms)}],
                    "reward_model": {"ground_truth": str(sum(terms)), "style": "rule"},
                    "data_source": "sums",
                }
                for terms in problems
            ]
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        subprocess.run(
            ["bash", str(HERE / "data.sh"), "--input", *(str(folder / f"{name}.jsonl") for name in files)],
            check=True,
            env={"PATH": "/usr/bin:/bin", "PYTHON": sys.executable, "DATA_DIR": str(folder / "data")},
        )


def run_arm(folder: Path, arm: str, seed: int, steps: int) -> Metrics:
    variables = {"MODEL": str(folder / "model"), "DATA_DIR": str(folder / "data"), "FIGURES": "later"}
    settings = [*SETTINGS, *ARMS[arm], *BANDS.get(arm, []), f"trainer.seed={seed}"]
    return train(SCRIPT, folder / arm.replace(" ", "_").lower(), settings, variables, steps)


def report(found: dict[str, list[Metrics]]) -> str:
    """Return a table for each arm that DAPO is compared with: means over seeds, paired differences with intervals."""
    dapo, tables = found["DAPO"], []
    for arm in list(found)[1:]:
        lines = []
        for name, (read, sign) in FIGURES.items():
            ours, theirs = [read(rows) for rows in dapo], [read(rows) for rows in found[arm]]
            difference = Difference(tuple(a - b for a, b in zip(ours, theirs, strict=True)))
            shown = "yes" if difference.shows(sign) else "no"
            lines.append([name, f"{fmean(ours):.3f}", f"{fmean(theirs):.3f}", str(difference), shown])
        tables.append(markdown_table(["", "DAPO", arm, "difference [95 % interval]", "shown"], lines))
    return "\n\n".join(tables)


def main(argv: list[str] | None = None) -> None:
    options = argument_parser(__doc__, "dapo", steps=12, warm_up_steps=600).parse_args(argv)
    found: dict[str, list[Metrics]] = {arm: [] for arm in ARMS}
    output = options.output.resolve()
    skills = warmed_up(output / "skills", None, SKILLS, options.warm_up_steps, 5e-3, 0)
    for seed in options.seeds:
        folder = output / str(seed)
        prepare(folder, skills, seed, options.warm_up_steps)
        for arm, runs in found.items():
            runs.append(run_arm(folder, arm, seed, options.steps))
    print(report(found))
    print(draw_curves(output / "curves.png", METRICS, found))


if __name__ == "__main__":
    main()

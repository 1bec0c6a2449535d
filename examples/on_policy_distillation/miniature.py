"""On-policy distillation in miniature: a student learns from a teacher's scores of its own answers, or from the
teacher's answers (supervised), with the same number of response tokens.

    python examples/on_policy_distillation/miniature.py [--seeds 0 1 2] [--output runs/miniature-distillation]

Models of 0.1 million parameters add two-digit numbers (the quickstart's task). The student's warm-up shows right and
wrong ways; the teacher is that model after more steps on right ones alone. Both are made once; seeds are of the
training problems, their order, and all sampling. Arms:

    sft    `main_sft` on the teacher's sampled answers
    top_k  `main_distill`, reverse KL divergence over the teacher's 8 likeliest words and the rest
    full   `main_distill`, reverse KL divergence over the vocabulary

Prints the share of right answers at equal tokens (sampled at temperature 1, held-out problems) with paired differences
to `sft` over seeds, and draws the curves. Arms that are complete in `--output` are not
repeated.
"""

import argparse
import json
import os
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: one thread a process

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "quickstart"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "recipes"))

import torch
from data import write_dataset
from miniatures import REPOSITORY, Difference, markdown_table
from model import END, make_model, make_tokenizer
from tasks import TASKS, Message, Row, demonstrate_addition, make_rows
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from warm_up import warm_up

from skyrl_gym.envs.arithmetic.problems import extract_answer
from skyrl_train.config import SkyRLConfig
from skyrl_train.config.supervised import SupervisedConfig
from skyrl_train.config.validation import validate_supervised_cfg
from skyrl_train.entrypoints.main_distill import DEFAULTS, DistillationExp
from skyrl_train.entrypoints.main_sft import SupervisedExp
from skyrl_train.utils.run_folder import RunFolder

STUDENT_STEPS, TEACHER_STEPS = 350, 150
"""Steps of the warm-ups: of the student, and from there to the teacher."""
STEPS, INTERVAL = 24, 12
"""Optimizer steps of each arm, and between evaluations."""
BATCH, LONGEST, HELD_OUT = 64, 32, 1024
LEARNING_RATE = 1e-3
ARMS: dict[str, dict[str, Any]] = {
    "sft": {},
    "top_k": {"tokens": "top_k", "top_k": 8},
    "full": {"tokens": "full"},
}
Curve = list[tuple[float, float]]
"""(response tokens trained, share of right answers)"""


def demonstrate_steps(problem: str, draw: random.Random, right_alone: bool) -> list[Message]:
    """Return a demonstration with steps in two of three cases; always, and with the right answer, if `right_alone`."""
    right = str(sum(map(int, problem.split("+"))))
    any_way = not right_alone and draw.random() < 1 / 3
    while True:
        messages = demonstrate_addition(problem, draw)
        text = messages[0]["content"]
        if any_way or ("=" in text and (not right_alone or extract_answer(text) == right)):
            return messages


def make_models(folder: Path) -> None:
    """Make student and teacher. A folder that has them keeps them."""
    task, seed, tokenizer = TASKS["arithmetic"], 0, make_tokenizer()
    model = make_model(task, seed)
    for name, right_alone, steps in (("student", False, STUDENT_STEPS), ("teacher", True, TEACHER_STEPS)):
        if (folder / name / "config.json").exists():
            model, _ = load(folder / name)
            continue
        shown = replace(task, demonstrate=partial(demonstrate_steps, right_alone=right_alone))
        warm_up(model, tokenizer, shown, seed, steps)
        tokenizer.save_pretrained(folder / name)
        model.save_pretrained(folder / name)


def make_data(folder: Path, seed: int) -> None:
    """Write prompts, and the teacher's answers to them. A folder that has them keeps them."""
    if (folder / "answers.jsonl").exists():
        return
    write_dataset(TASKS["arithmetic"], folder / "data", STEPS * BATCH, HELD_OUT, seed)
    rows = make_rows(TASKS["arithmetic"], STEPS * BATCH, seed)
    answers = sample(*load(folder.parent / "teacher"), rows, seed)
    lines = [
        json.dumps({"messages": [*row["prompt"], {"role": "assistant", "content": answer.removesuffix(END)}]})
        for row, answer in zip(rows, answers, strict=True)
    ]
    (folder / "answers.jsonl").write_text("\n".join(lines))


def load(folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), AutoTokenizer.from_pretrained(folder)


@torch.no_grad()
def sample(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row], seed: int) -> list[str]:
    """Sample an answer to each prompt at temperature 1, its end token included."""
    torch.manual_seed(seed)
    template: Callable[..., Any] = partial(tokenizer.apply_chat_template, add_generation_prompt=True, return_dict=False)
    prompts: list[list[int]] = [template(row["prompt"]) for row in rows]
    answers = dict[int, str]()
    for length in sorted({len(ids) for ids in prompts}):  # of one length, so that nothing is padded
        numbers = [number for number, ids in enumerate(prompts) if len(ids) == length]
        ids = torch.tensor([prompts[number] for number in numbers])
        written = model.generate(  # pyright: ignore[reportCallIssue]
            ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, top_p=1.0, max_new_tokens=LONGEST
        )
        for number, own in zip(numbers, written[:, length:].tolist(), strict=True):
            text = tokenizer.decode(own)
            assert isinstance(text, str)
            answers[number] = text.partition(END)[0] + END
    return [answers[number] for number in range(len(rows))]


def accuracy(folder: Path, rows: Sequence[Row], seed: int) -> float:
    """Return the share of right answers of a model."""
    answers = sample(*load(folder), rows, seed)
    right = [row["reward_spec"]["ground_truth"] for row in rows]
    return fmean(extract_answer(answer) == own for answer, own in zip(answers, right, strict=True))


def settings_of(folder: Path, arm: str, seed: int) -> dict[str, Any]:
    """Return the settings that all arms share."""
    model = {
        "model": {"path": str(folder.parent / "student")},
        "optimizer_config": {"lr": LEARNING_RATE, "num_warmup_steps": 5},
    }
    return {
        "policy": model,
        "placement": {"device": "cpu", "launcher": "inline"},
        "run_dir": str(folder / arm),
        "seed": seed,
        "bf16": False,
        "gradient_checkpointing": False,
        "epochs": 1,
        "train_batch_size": BATCH,
        "micro_train_batch_size_per_gpu": BATCH,
        "ckpt_interval": -1,
        "eval_interval": -1,
        "hf_save_interval": INTERVAL,
        "resume_mode": "none",
    }


def train(folder: Path, arm: str, seed: int) -> None:
    """Train an arm, unless its last export is there."""
    if (folder / arm / "exports" / f"global_step_{STEPS}").exists():
        return
    trainer = settings_of(folder, arm, seed)
    if arm == "sft":
        data = {"train_data": [str(folder / "answers.jsonl")]}
        SupervisedExp(validate_supervised_cfg({"data": data, "trainer": trainer}, SupervisedConfig)).run()
        return
    own = {
        "policy_mini_batch_size": BATCH,
        "micro_forward_batch_size_per_gpu": BATCH,
        "max_prompt_length": LONGEST,
        "distillation": {"teachers": {"main": {"model": str(folder.parent / "teacher")}}} | ARMS[arm],
    }
    length = {"max_input_length": LONGEST, "sampling_params": {"max_generate_length": LONGEST}}
    values = {
        "data": {"train_data": [str(folder / "data" / "train.parquet")], "val_data": []},
        "environment": {"env_class": "arithmetic"},
        "trainer": trainer | own,
        "generator": {"model_dtype": "float32", "max_turns": 1, **length},
    }
    DistillationExp(SkyRLConfig.from_dict(with_defaults(values, DEFAULTS))).run()


def curve_of(folder: Path, arm: str, seed: int) -> Curve:
    """Evaluate the exports of an arm, and the student before training."""
    curve_file = folder / arm / "curve.json"
    if curve_file.exists():
        return [(tokens, share) for tokens, share in json.loads(curve_file.read_text())]
    if arm == "sft":
        tokens = [fmean(answer_lengths(folder)) * BATCH] * STEPS
    else:
        tokens = [row["policy/response_length"] * BATCH for row in RunFolder(folder / arm).read_metrics()]
    rows = make_rows(TASKS["arithmetic"], HELD_OUT, seed, held_out=True)
    curve: Curve = [(0.0, accuracy(folder.parent / "student", rows, seed))]
    for step in range(INTERVAL, STEPS + 1, INTERVAL):
        [export] = (folder / arm / "exports" / f"global_step_{step}").rglob("config.json")
        curve.append((sum(tokens[:step]), accuracy(export.parent, rows, seed)))
    curve_file.write_text(json.dumps(curve))
    return curve


def answer_lengths(folder: Path) -> list[int]:
    """Return the number of response tokens of each of the teacher's answers, the end token included."""
    tokenizer = AutoTokenizer.from_pretrained(folder.parent / "teacher")
    texts = [
        json.loads(line)["messages"][-1]["content"] for line in (folder / "answers.jsonl").read_text().splitlines()
    ]
    return [len(tokenizer.encode(text, add_special_tokens=False)) + 1 for text in texts]


def with_defaults(values: dict[str, Any], defaults: Mapping[str, object]) -> dict[str, Any]:
    """Add settings by full name to nested ones."""
    for name, value in defaults.items():
        *path, last = name.split(".")
        section = values
        for part in path:
            section = section.setdefault(part, {})
        section.setdefault(last, value)
    return values


def at(curve: Curve, tokens: float) -> float:
    """Interpolate a curve at a number of tokens."""
    for (left, low), (right, high) in pairwise(curve):
        if tokens <= right:
            return low + (high - low) * (tokens - left) / (right - left)
    return curve[-1][1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--output", type=Path, default=REPOSITORY / "runs" / "miniature-distillation")
    options = parser.parse_args()
    torch.set_num_threads(1)
    curves: dict[str, list[Curve]] = {arm: [] for arm in ARMS}
    teachers = []
    make_models(options.output.resolve())
    for seed in options.seeds:
        folder = options.output.resolve() / f"seed_{seed}"
        make_data(folder, seed)
        held_out = make_rows(TASKS["arithmetic"], HELD_OUT, seed, held_out=True)
        teachers.append(accuracy(folder.parent / "teacher", held_out, seed))
        for arm in ARMS:
            train(folder, arm, seed)
            curves[arm].append(curve_of(folder, arm, seed))
            print(f"seed {seed} {arm}: {[(round(x), round(y, 3)) for x, y in curves[arm][-1]]}", flush=True)
    report(curves, teachers)
    print(f"\ncurve: {draw(curves, options.output / 'curves.png')}")


def report(curves: Mapping[str, Sequence[Curve]], teachers: Sequence[float]) -> None:
    """Print the table."""
    num_seeds = len(teachers)
    budgets = [min(curves[arm][number][-1][0] for arm in ARMS) for number in range(num_seeds)]
    rows = []
    for share in (0.5, 1.0):
        scores = {arm: [at(curves[arm][n], share * budgets[n]) for n in range(num_seeds)] for arm in ARMS}
        for arm, own in scores.items():
            difference = Difference(tuple(a - b for a, b in zip(own, scores["sft"], strict=True)))
            against = "" if arm == "sft" else str(difference)
            rows.append([f"{arm}, {share * fmean(budgets):,.0f} tokens", f"{fmean(own):.3f}", against])
    before = fmean(curve[0][1] for curve in curves["sft"])
    print(f"right answers before: {before:.3f}; teacher: {fmean(teachers):.3f}\n")
    print(markdown_table(["arm", "right answers", "difference to sft"], rows))


def draw(curves: Mapping[str, Sequence[Curve]], path: Path) -> Path:
    """Draw right answers over tokens: a thin line for each seed, a thick one for their mean."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # slow to import, and only needed here
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2, 3.4), dpi=140, layout="constrained")
    axes = figure.subplots()
    for color, (arm, runs) in zip(["#2457c5", "#c2571a", "#3a8a3a"], curves.items(), strict=True):
        for run in runs:
            axes.plot(*zip(*run, strict=True), color=color, alpha=0.3, linewidth=0.9)
        means = [[fmean(values) for values in zip(*points, strict=True)] for points in zip(*runs, strict=True)]
        axes.plot(*zip(*means, strict=True), color=color, linewidth=2.2, label=arm)
    axes.set(title="right answers (held out)", xlabel="response tokens trained")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    FigureCanvasAgg(figure).print_png(str(path))
    return path


if __name__ == "__main__":
    main()

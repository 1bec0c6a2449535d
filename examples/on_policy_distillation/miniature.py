"""On-policy distillation in miniature: on few prompts, a student learns from a teacher's distributions over its own
responses, or from the teacher's responses (supervised), with the same number of response tokens.

    python examples/on_policy_distillation/miniature.py [--seeds 0 1 2] [--steps 48] [--warm_up_steps 600]
                                                        [--output runs/miniature-distillation]

Models of 0.1 million parameters add two-digit numbers in steps. In the student's warm-up half of the sums of digits are
wrong, a quarter of which are corrected (`7+5=13!12,3+4+1=8<answer>82</answer>`). The teacher is that model after more
steps on demonstrations in which all errors are corrected and masked from the loss. Both are made once; seeds are of the
training problems, their order, and all sampling. Each step of an arm trains an answer to each of the prompts:

    sft        `main_sft` on one answer of the teacher to each prompt, again in every step
    sft_fresh  `main_sft` on new answers of the teacher in every step
    full       `main_distill`, reverse KL divergence over the vocabulary

Prints the share of right answers at equal tokens (sampled at temperature 1, held-out problems) with paired differences
over seeds, and draws the curves. Arms that are complete in `--output` are not trained again.
"""

import json
import os
import random
import shutil
import sys
from collections.abc import Mapping, Sequence
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
from miniatures import IGNORED, Difference, Metrics, argument_parser, draw_curves, markdown_table, warm_up
from model import END, make_model, make_tokenizer
from tasks import TASKS, Message, Row, make_rows
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from skyrl_gym.envs.arithmetic.problems import extract_answer
from skyrl_train.config import compose_config
from skyrl_train.config.supervised import SupervisedConfig
from skyrl_train.config.validation import validate_supervised_cfg
from skyrl_train.entrypoints.main_distill import DEFAULTS, DistillationExp
from skyrl_train.entrypoints.main_sft import SupervisedExp
from skyrl_train.utils.run_folder import RunFolder

TASK = TASKS["arithmetic"]
NUM_PROMPTS, LONGEST, HELD_OUT = 64, 32, 1024
"""Training prompts, which are also the batch; tokens of the longest prompt or answer; evaluation problems."""
ERRORS, CORRECTED = 0.5, 0.25
"""Share of errors among the sums of digits in the warm-ups, and the share of them that the student's corrects."""
EVALUATIONS = 4
SFT = ("sft", "sft_fresh")
ARMS = (*SFT, "full")
SETTINGS = [
    "trainer.placement.device=cpu",
    "trainer.placement.launcher=inline",
    "trainer.bf16=false",
    "trainer.gradient_checkpointing=false",
    "trainer.ckpt_interval=-1",
    "trainer.eval_interval=-1",
    "trainer.resume_mode=none",
    "trainer.epochs=1000",
    f"trainer.train_batch_size={NUM_PROMPTS}",
    f"trainer.micro_train_batch_size_per_gpu={NUM_PROMPTS}",
    "trainer.policy.optimizer_config.lr=1e-3",  # the best for each arm of 3e-4, 1e-3 and 3e-3, at seeds 10 and 11
    "trainer.policy.optimizer_config.num_warmup_steps=5",
    "trainer.policy.optimizer_config.scheduler=cosine",
]
DISTILLATION = [
    "environment.env_class=arithmetic",
    f"trainer.policy_mini_batch_size={NUM_PROMPTS}",
    f"trainer.micro_forward_batch_size_per_gpu={NUM_PROMPTS}",
    f"trainer.max_prompt_length={LONGEST}",
    "generator.model_dtype=float32",
    "generator.max_turns=1",
    f"generator.max_input_length={LONGEST}",
    f"generator.sampling_params.max_generate_length={LONGEST}",
    "trainer.distillation.tokens=full",
    "data.val_data=[]",
]
RIGHT = "right answers"


def demonstrate(draw: random.Random, problems: Sequence[str], corrected: float) -> list[tuple[str, bool]]:
    """Return a prompt and the parts of an answer to it, each with whether it is an error."""
    problem = draw.choice(problems)
    left, right = map(int, problem.split("+"))
    parts = [(problem, False)]

    def written(digits: str) -> int:
        total = sum(map(int, digits.split("+")))
        parts.append((f"{digits}=", False))
        if draw.random() >= ERRORS:
            parts.append((str(total), False))
            return total
        error = total + draw.choice([offset for offset in (-2, -1, 1, 2) if total + offset >= 0])
        parts.append((str(error), True))
        if draw.random() >= corrected:
            return error
        parts.append((f"!{total}", False))
        return total

    units = written(f"{left % 10}+{right % 10}")
    parts.append((",", False))
    tens = written(f"{left // 10}+{right // 10}" + "+1" * (units > 9))
    return [*parts, (f"<answer>{10 * tens + units % 10}</answer>{END}", False)]


def encode(
    tokenizer: PreTrainedTokenizerBase, parts: list[tuple[str, bool]], learns_errors: bool
) -> tuple[list[int], list[int]]:
    """Return token ids of a demonstration, and labels that leave out the prompt and, on demand, the errors."""
    (problem, _), *answer = parts
    ids = prompt_ids(tokenizer, [{"role": "user", "content": problem}])
    labels = [IGNORED] * len(ids)
    for text, is_error in answer:
        own = tokenizer.encode(text, add_special_tokens=False)
        ids += own
        labels += [IGNORED] * len(own) if is_error and not learns_errors else own
    return ids, labels


def prompt_ids(tokenizer: PreTrainedTokenizerBase, messages: list[Message]) -> list[int]:
    ids: Any = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    return list(ids)


def make_models(folder: Path, steps: int) -> None:
    """Make student and teacher, the latter with half as many further steps. A folder that has them keeps them."""
    if (folder / "teacher" / "config.json").exists():
        return
    tokenizer, model = make_tokenizer(), make_model(TASK, seed=0)
    problems = [row["extra_info"]["problem"] for row in make_rows(TASK, 4096, seed=0)]
    for name, corrected, number in (("student", CORRECTED, steps), ("teacher", 1.0, steps // 2)):
        warm_up(
            model,
            tokenizer,
            partial(demonstrate, problems=problems, corrected=corrected),
            encode=partial(encode, learns_errors=name == "student"),
            steps=number,
            batch_size=64,
            learning_rate=TASK.warm_up_learning_rate,
            seed=0,
        )
        tokenizer.save_pretrained(folder / name)
        model.save_pretrained(folder / name)


def make_data(folder: Path, steps: int, seed: int) -> None:
    """Write prompts, and the teacher's answers to them: one to each (`sft`), and one for each step (`sft_fresh`)."""
    write_dataset(TASK, folder, NUM_PROMPTS, HELD_OUT, seed)
    rows = make_rows(TASK, NUM_PROMPTS, seed) * steps
    answers = sample(*load(folder.parent / "teacher"), rows, seed)
    lines = [
        json.dumps({"messages": [*row["prompt"], {"role": "assistant", "content": answer}]}) + "\n"
        for row, answer in zip(rows, answers, strict=True)
    ]
    (folder / "sft.jsonl").write_text("".join(lines[:NUM_PROMPTS]))
    (folder / "sft_fresh.jsonl").write_text("".join(lines))


def load(folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), AutoTokenizer.from_pretrained(folder)


@torch.no_grad()
def sample(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row], seed: int) -> list[str]:
    """Sample an answer to each prompt at temperature 1, without its end token."""
    torch.manual_seed(seed)
    ids = torch.tensor([prompt_ids(tokenizer, row["prompt"]) for row in rows])  # all of one length: two-digit numbers
    written = model.generate(  # pyright: ignore[reportCallIssue]
        ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, top_p=1.0, max_new_tokens=LONGEST
    )
    return [str(tokenizer.decode(own)).partition(END)[0] for own in written[:, ids.shape[1] :].tolist()]


def accuracy(folder: Path, seed: int) -> float:
    """Return the share of right answers of a model to the held-out problems of a seed."""
    rows = make_rows(TASK, HELD_OUT, seed, held_out=True)
    answers = sample(*load(folder), rows, seed)
    right = [row["reward_spec"]["ground_truth"] for row in rows]
    return fmean(extract_answer(answer) == own for answer, own in zip(answers, right, strict=True))


def settings_of(folder: Path, arm: str, steps: int, seed: int) -> list[str]:
    """Return the settings of an arm as a command line has them (`key=value`)."""
    common = [
        *SETTINGS,
        f"trainer.policy.model.path={folder.parent / 'student'}",
        f"trainer.run_dir={folder / arm}",
        f"trainer.seed={seed}",
        f"trainer.max_training_steps={steps}",
        f"trainer.hf_save_interval={max(steps // EVALUATIONS, 1)}",
    ]
    if arm in SFT:
        return [*common, f"data.train_data=['{folder / arm}.jsonl']"]
    teacher = f"trainer.distillation.teachers.main.model={folder.parent / 'teacher'}"
    return [*common, *DISTILLATION, teacher, f"data.train_data=['{folder / 'train.parquet'}']"]


def train(folder: Path, arm: str, steps: int, seed: int) -> None:
    """Train an arm, unless its last export exists."""
    if (folder / arm / "exports" / f"global_step_{steps}").exists():
        return
    shutil.rmtree(folder / arm, ignore_errors=True)
    settings = settings_of(folder, arm, steps, seed)
    if arm in SFT:
        SupervisedExp(validate_supervised_cfg(compose_config(settings, SupervisedConfig), SupervisedConfig)).run()
    else:
        DistillationExp(compose_config(settings, changes=DEFAULTS)).run()


def curve_of(folder: Path, arm: str, before: float, seed: int) -> Metrics:
    """Evaluate the exports of an arm. Returns: response tokens trained (as `step`) and share of right answers."""
    tokens = 0.0
    curve: Metrics = [{"step": tokens, RIGHT: before}]
    for row in RunFolder(folder / arm).read_metrics():
        tokens += row["train/learnt_tokens"] if arm in SFT else row["policy/response_length"] * NUM_PROMPTS
        for export in (folder / arm / "exports" / f"global_step_{row['step']}").rglob("config.json"):
            curve.append({"step": tokens, RIGHT: accuracy(export.parent, seed)})
    return curve


def at(curve: Metrics, tokens: float) -> float:
    """Interpolate a curve at a number of tokens."""
    for left, right in pairwise(curve):
        if tokens <= right["step"]:
            share = (tokens - left["step"]) / (right["step"] - left["step"])
            return left[RIGHT] + share * (right[RIGHT] - left[RIGHT])
    return curve[-1][RIGHT]


def report(curves: Mapping[str, Sequence[Metrics]]) -> str:
    """Return the table of right answers at equal tokens, and of paired differences to the supervised arms."""
    last = {arm: [curve[-1][RIGHT] for curve in own] for arm, own in curves.items()}
    rows = []
    for arm, own in last.items():
        to_sft = [str(Difference(tuple(a - b for a, b in zip(own, last[sft], strict=True)))) for sft in SFT]
        best = fmean(max(row[RIGHT] for row in curve) for curve in curves[arm])
        rows.append([arm, f"{fmean(own):.3f}", f"{best:.3f}", *(["", ""] if arm in SFT else to_sft)])
    heads = ["arm", "right answers", "best on the way", *(f"difference to {sft}" for sft in SFT)]
    return markdown_table(heads, rows)


def main(argv: list[str] | None = None) -> None:
    options = argument_parser(__doc__, "distillation", steps=48, warm_up_steps=600).parse_args(argv)
    torch.set_num_threads(1)
    output = options.output.resolve()
    make_models(output, options.warm_up_steps)
    curves: dict[str, list[Metrics]] = {arm: [] for arm in ARMS}
    for seed in options.seeds:
        folder = output / f"seed_{seed}"
        if not (folder / "sft_fresh.jsonl").exists():
            make_data(folder, options.steps, seed)
        before = accuracy(output / "student", seed)
        print(f"seed {seed}: right answers before {before:.3f}, teacher {accuracy(output / 'teacher', seed):.3f}")
        for arm in ARMS:
            train(folder, arm, options.steps, seed)
            curves[arm].append(curve_of(folder, arm, before, seed))
            shown = ", ".join(f"{row['step']:.0f}: {row[RIGHT]:.3f}" for row in curves[arm][-1])
            print(f"seed {seed} {arm}, right answers by tokens: {shown}", flush=True)
    equal = min(curve[-1]["step"] for of_arm in curves.values() for curve in of_arm)
    tokens = [equal * part / EVALUATIONS for part in range(EVALUATIONS + 1)]
    curves = {
        arm: [[{"step": x, RIGHT: at(curve, x)} for x in tokens] for curve in of_arm] for arm, of_arm in curves.items()
    }
    print(f"at {equal:,.0f} response tokens:\n\n{report(curves)}\n")
    print(draw_curves(output / "curves.png", {RIGHT: RIGHT}, curves, xlabel="response tokens trained"))


if __name__ == "__main__":
    main()

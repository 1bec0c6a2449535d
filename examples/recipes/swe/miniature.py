"""A software engineering agent in miniature: it learns to repair functions with one wrong character in a line.

    python examples/recipes/swe/miniature.py [--seeds 0 1 2] [--steps 12] [--output runs/miniature-swe]

A Qwen3-architecture model of 0.1 million parameters works through the agent of `run_qwen3_32b.sh`, whose settings hold
but for sizes (`SETTINGS`, `miniature.yaml`). A row says what a function gives ("f gives x+4"); its file has a wrong
operator, name or constant. `cat` and `sed` run in a real sandbox, and the row's tests in a fresh one. After the warm-up
the model repairs seldom: in three of four demonstrations the agent gives up at once, changes the file without reading
it, or replaces the wrong character by a random one. Prints the resolve rate of held-out functions before and
after, and draws the curves. Runs that are complete in `--output` are not repeated.
"""

import asyncio
import json
import random
import re
import subprocess
import sys
import zlib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from miniatures import (
    REPOSITORY,
    Difference,
    Messages,
    Metrics,
    argument_parser,
    draw_curves,
    encode_conversation,
    first_value,
    last_value,
    markdown_table,
    mean_value,
    train,
    values_of,
    warm_up,
)
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from skyrl_agent.config.task_file import load_task_file
from skyrl_agent.integrations.base import Backend, plain_rows, published_output, register_backend
from skyrl_agent.runner import AgentRunner
from skyrl_agent.testing import ScriptedModel, byte_tokenizer
from skyrl_gym.chat.template import bundled_template
from skyrl_train_testing.tiny_models import build_character_tokenizer, build_tiny_qwen3

HERE = Path(__file__).resolve().parent
SCRIPT = HERE / "run_qwen3_32b.sh"
TASK = HERE / "miniature.yaml"

SETTINGS = [
    f"generator.task={TASK}",
    "trainer.policy.sequence_parallel_size=1",
    "trainer.ref.sequence_parallel_size=1",
    "trainer.max_prompt_length=512",
    "generator.sampling_params.max_generate_length=16",
    "trainer.algorithm.max_seq_len=128",
    "trainer.train_batch_size=8",
    "trainer.policy_mini_batch_size=8",
    "trainer.micro_forward_batch_size_per_gpu=64",
    "trainer.micro_train_batch_size_per_gpu=64",
    "trainer.policy.optimizer_config.lr=1e-3",
    "trainer.eval_before_train=true",
    "generator.max_num_batched_tokens=8192",
]
"""Sizes, the default in place of a setting of engines that the native one does not read, and an evaluation before
training to compare with."""

# ---- functions with one mistake

NAMES, OPERATORS, DIGITS = "wxyz", "+-*", "23456789"


def expressions(*, held_out: bool) -> list[str]:
    """Return the right expressions, one in four of them for evaluation alone, by a property of its text."""
    found = [
        f"{left}{operator}{right}"
        for left in NAMES
        for operator in OPERATORS
        for right in NAMES + DIGITS
        if right != left
    ]
    return [text for text in found if (zlib.crc32(text.encode()) % 4 == 0) == held_out]


def mistake_in(right: str, draw: random.Random) -> tuple[str, str, str]:
    """Put a wrong operator, or a wrong name or constant after it, into an expression.

    Returns:
        The wrong expression, its wrong character, and the right one."""
    left, operator, operand = right
    if draw.random() < 0.5:
        wrong = draw.choice([other for other in OPERATORS if other != operator])
        return f"{left}{wrong}{operand}", wrong, operator
    alike = DIGITS if operand in DIGITS else NAMES
    wrong = draw.choice([other for other in alike if other not in (left, operand)])
    return f"{left}{operator}{wrong}", wrong, operand


def row_of(name: str, right: str, wrong: str) -> dict[str, Any]:
    """Make a row in the form of `examples/agent/swe/swe_dataset.py`."""
    cases = [(5, 11, 17, 23), (31, 41, 7, 13)]
    asserts = [f"assert f{case} == {eval(right, dict(zip(NAMES, case, strict=True)))}" for case in cases]
    return {
        "id": name,
        "data_source": "one_line_bugs",
        "problem_statement": f"f gives {right}",
        "files": {
            "f.py": f"def f({', '.join(NAMES)}):\n    return {wrong}\n",
            "test_f.py": "\n".join(["from f import f", "", *asserts, ""]),
        },
        "edit_file": "f.py",
        "test_cmd": "python test_f.py",
    }


# ---- demonstrations

LOOK = "cat f.py"
CHANGE = "sed -i '/return/s/[{old}]/{new}/' f.py"
RIGHT, WRONG, OLD, NEW = "@right@", "@wrong@", "@old@", "@new@"
"""Placeholders of a trajectory that is a pattern for others."""

WAYS = {"give up": [], "blind": [CHANGE], "careless": [LOOK, CHANGE], "careful": [LOOK, CHANGE]}
"""Commands of each way. A careless agent looks, and then writes a character of chance."""
SKILLS = {"careful": 1.0}
HABITS = {"give up": 0.3, "blind": 0.2, "careless": 0.25, "careful": 0.25}
"""Share of each way among the demonstrations: of a first phase, in which the work is learned, and of a second."""
NUM_DEMONSTRATIONS = 2000


def call(tool: str, **arguments: str) -> str:
    parameters = "".join(f"<parameter={name}>{value}</parameter>\n" for name, value in arguments.items())
    return f"<function={tool}>\n{parameters}</function>"


@cache
def patterns() -> dict[str, Messages]:
    """Play a scripted agent for each way, in the sandbox, on a row of placeholders.

    Returns:
        All messages of each trajectory as the model reads and writes them, tools and reminders included."""
    cfg = load_task_file(TASK)
    # Lengths of a tokenizer that has a token for each byte.
    lengths = {"max_prompt_length": 99_999, "max_context_length": 100_000, "sampling_params": {"max_tokens": 1_000}}
    own = lengths | {"infer_backend": "scripted", "num_trajectories": 1}
    cfg = cfg.model_copy(update={"generator": cfg.generator.model_copy(update=own)})
    register_backend("scripted", Backend(lambda infer_engine, **_: infer_engine, plain_rows, published_output))
    tokenizer = byte_tokenizer()
    found: dict[str, Messages] = {}
    for way, commands in WAYS.items():
        texts = [call("bash", command=command.format(old=OLD, new=NEW)) for command in commands]
        texts.append(call("finish", answer="done"))
        seen: list[str] = []

        def answer(prompt: str, turn: int, texts: list[str] = texts, seen: list[str] = seen) -> str:
            seen.append(prompt)
            return texts[turn]

        row = row_of("pattern", "x+2", WRONG) | {"problem_statement": f"f gives {RIGHT}"}
        asyncio.run(AgentRunner(cfg, ScriptedModel(tokenizer, answer), tokenizer).run([row]))
        messages = re.findall(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>", seen[-1], re.DOTALL)
        found[way] = [{"role": role, "content": text} for role, text in [*messages, ("assistant", texts[-1])]]
    return found


def demonstrate(draw: random.Random, ways: Mapping[str, float]) -> Messages:
    right = draw.choice(expressions(held_out=False))
    wrong, old, new = mistake_in(right, draw)
    way = draw.choices(list(ways), weights=list(ways.values()))[0]
    if way in ("blind", "careless"):
        new = draw.choice(OPERATORS + NAMES + DIGITS)
    if way == "blind":
        old = draw.choice(OPERATORS + NAMES + DIGITS)
    values = {RIGHT: right, WRONG: wrong, OLD: old, NEW: new}
    return [
        {"role": message["role"], "content": re.sub("@[a-z]+@", lambda name: values[name[0]], message["content"])}
        for message in patterns()[way]
    ]


def make_tokenizer() -> PreTrainedTokenizerBase:
    """A token for each text between placeholders (the whole system message is one), and each character."""
    texts = {part for way in patterns().values() for message in way for part in _fixed_parts(message["content"])}
    tokens = ["<|im_start|>", "system\n", "user\n", "assistant\n", *sorted(texts, key=len, reverse=True)]
    return build_character_tokenizer(
        bundled_template("qwen3_acc_thinking"), start="<|start|>", end="<|im_end|>", added_tokens=tokens
    )


def _fixed_parts(text: str) -> list[str]:
    return [part for part in re.split("@[a-z]+@", text) if len(part) > 1]


# ---- the run


def warmed_up(
    folder: Path, start: Path | None, ways: Mapping[str, float], steps: int, learning_rate: float, seed: int
) -> Path:
    """Warm up the model of `start`, or a new one, unless the folder has it. Returns: the folder."""
    if not (folder / "config.json").exists():
        tokenizer = make_tokenizer()
        model = (
            AutoModelForCausalLM.from_pretrained(start)
            if start
            else build_tiny_qwen3(
                hidden_size=64, head_dim=32, vocab_size=len(tokenizer), max_position_embeddings=40_960
            )
        )
        draw = random.Random(seed)
        # Encoded once: rendering the long system message takes longer than a step's forward.
        rows = [encode_conversation(tokenizer, demonstrate(draw, ways)) for _ in range(NUM_DEMONSTRATIONS)]
        warm_up(
            model,
            tokenizer,
            lambda draw: draw.choice(rows),
            encode=lambda _, row: row,
            steps=steps,
            batch_size=32,
            learning_rate=learning_rate,
            seed=seed,
        )
        tokenizer.save_pretrained(folder)
        model.save_pretrained(folder)
    return folder


def prepare(folder: Path, skills: Path, seed: int, warm_up_steps: int) -> None:
    """Make the model and the data of a seed, unless the folder has them. `skills`: the model of the first phase."""
    warmed_up(folder / "model", skills, HABITS, max(warm_up_steps // 7, 1), 2e-3, seed)
    if not (folder / "data" / "validation.parquet").exists():
        draw = random.Random(seed + 1000)
        files = {"train": (512, False), "test": (64, True)}
        for name, (number, held_out) in files.items():
            rights = [draw.choice(expressions(held_out=held_out)) for _ in range(number)]
            rows = [row_of(f"{name}-{i}", right, mistake_in(right, draw)[0]) for i, right in enumerate(rights)]
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        command = [sys.executable, str(REPOSITORY / "examples/agent/swe/swe_dataset.py")]
        command += ["--output_dir", str(folder / "data")]
        subprocess.run([*command, "--input", *(str(folder / f"{name}.jsonl") for name in files)], check=True)


def run(folder: Path, seed: int, steps: int) -> Metrics:
    variables = {"MODEL": str(folder / "model"), "DATA_DIR": str(folder / "data")}
    settings = [*SETTINGS, f"trainer.eval_interval={steps}", f"trainer.seed={seed + 1}"]
    return train(SCRIPT, folder / "run", settings, variables, steps)


RESOLVED = "eval/all/avg_score"
TRAINING = "reward/avg_raw_reward"


def report(runs: Sequence[Metrics]) -> str:
    """Return the table of resolve rates before and after training, with the paired difference over seeds."""
    ends = {
        "held-out functions": [(first_value(rows, RESOLVED), last_value(rows, RESOLVED)) for rows in runs],
        "training functions, first and last 3 steps": [
            (fmean(list(values_of(rows, TRAINING).values())[:3]), mean_value(rows, TRAINING, 3)) for rows in runs
        ],
    }
    lines = []
    for name, pairs in ends.items():
        difference = Difference(tuple(after - before for before, after in pairs))
        before, after = (fmean(values) for values in zip(*pairs, strict=True))
        lines.append([name, f"{before:.3f}", f"{after:.3f}", str(difference), "yes" if difference.shows(1) else "no"])
    return markdown_table(["resolve rate", "before", "after", "difference [95 % interval]", "shown"], lines)


def main(argv: list[str] | None = None) -> None:
    options = argument_parser(__doc__, "swe", steps=12, warm_up_steps=700).parse_args(argv)
    runs: list[Metrics] = []
    output = options.output.resolve()
    skills = warmed_up(output / "skills", None, SKILLS, options.warm_up_steps, 5e-3, 0)
    for seed in options.seeds:
        folder = output / str(seed)
        prepare(folder, skills, seed, options.warm_up_steps)
        runs.append(run(folder, seed, options.steps))
    print(report(runs))
    panels = {TRAINING: "resolve rate in training", "policy/policy_entropy": "entropy of the policy"}
    print(draw_curves(output / "curves.png", panels, {"agent": runs}))


if __name__ == "__main__":
    main()

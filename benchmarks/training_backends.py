"""Time and memory of one optimizer step under each training backend, side by side, and the quickstart's curves.

    python benchmarks/training_backends.py steps [--models 0.85M 20M] [--rounds 3] [--steps 4]
    python benchmarks/training_backends.py curves [--strategies fsdp2 deepspeed megatron] [--steps 50] [--picture FILE]

`steps`: two ranks on this machine's cores, float32, 16 rows of 128 tokens a rank in micro-batches of 8; layouts take
turns, each time in new processes. Memory is the largest resident set of a rank. `curves`: `examples/quickstart/run.py`
with one strategy after the other, from the same model and data.
"""

import argparse
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch
from benchmark_tools import VOCABULARY, describe_machine, print_table
from ray import cloudpickle

from skyrl_train.training_backends.base import TrainingBackend
from skyrl_train.training_batch import MicroBatch, TrainingInputBatch
from skyrl_train.utils.learning_curve import curves
from skyrl_train.utils.run_folder import RunFolder
from skyrl_train_testing.backend_checks import run_step
from skyrl_train_testing.backend_layouts import BackendRanks, Layout
from skyrl_train_testing.tiny_models import build_tiny_qwen3

NUM_ROWS, NUM_PROMPT, NUM_RESPONSE, MICRO_BATCH_SIZE = 16, 32, 96, 8
MODELS = {
    "0.85M": dict(hidden_size=128, num_hidden_layers=4, intermediate_size=384),
    "20M": dict(hidden_size=512, num_hidden_layers=6, intermediate_size=1536),
}


def layout(**trainer: object) -> Layout:
    return Layout(2, {"max_prompt_length": NUM_PROMPT, **trainer})


LAYOUTS = {
    "fsdp2": layout(),
    **{
        f"deepspeed, stage {stage}": layout(
            strategy="deepspeed", policy={"deepspeed_config": {"zero_optimization": {"stage": stage}}}
        )
        for stage in range(4)
    },
    "megatron, data parallel": layout(strategy="megatron"),
    "megatron, tensor parallel": layout(
        strategy="megatron", policy={"megatron_config": {"tensor_model_parallel_size": 2}}
    ),
    "megatron, pipeline parallel": layout(
        strategy="megatron", policy={"megatron_config": {"pipeline_model_parallel_size": 2}}
    ),
}


def make_batch() -> TrainingInputBatch:
    """Rows of full length, for each data-parallel rank of two."""
    draw = torch.Generator().manual_seed(0)
    shape = (NUM_ROWS, NUM_PROMPT + NUM_RESPONSE)
    ones = torch.ones(NUM_ROWS, NUM_RESPONSE)
    return TrainingInputBatch(
        sequences=torch.randint(2, VOCABULARY, shape, generator=draw),
        attention_mask=torch.ones(shape, dtype=torch.long),
        loss_mask=ones,
        loss_weights=ones / ones.sum(),
        advantages=torch.randn(ones.shape, generator=draw),
        metadata={"response_length": NUM_RESPONSE},
    )


def measure(backend: TrainingBackend, num_steps: int) -> tuple[float, float]:
    """Take steps on this rank; both ranks together always have 32 rows. A job of `BackendRanks`.

    Returns: median seconds of a step but the first, and the rank's peak in MB.
    """
    batch = make_batch()
    repeats = 2 // backend.parallel.data_parallel_size
    micro_batches = [
        MicroBatch(tuple(range(start, start + MICRO_BATCH_SIZE))) for start in range(0, NUM_ROWS, MICRO_BATCH_SIZE)
    ] * repeats
    seconds = []
    for _ in range(num_steps + 1):
        started = time.perf_counter()
        run_step(backend, batch, micro_batches, gather=False)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:]), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def steps(options: argparse.Namespace) -> None:
    """Measure the layouts in turns and print a table for each model."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    with tempfile.TemporaryDirectory() as folder:
        ranks = BackendRanks(Path(folder) / "logs")
        for size in options.models:
            path = str(Path(folder) / size)
            model = build_tiny_qwen3(vocab_size=VOCABULARY, max_position_embeddings=256, **MODELS[size])
            model.save_pretrained(path)
            found: dict[str, list[tuple[float, float]]] = defaultdict(list)
            for _ in range(options.rounds):
                for name, division in LAYOUTS.items():
                    answers = ranks.run(division, path, measure, options.steps)
                    found[name].append((max(s for s, _ in answers), max(mb for _, mb in answers)))
            print_results(size, sum(p.numel() for p in model.parameters()), found)


def print_results(size: str, num_parameters: int, found: dict[str, list[tuple[float, float]]]) -> None:
    print(f"\n{size}: {num_parameters:,} parameters, {describe_machine('deepspeed', 'megatron-core')}\n")
    medians = {name: statistics.median(seconds for seconds, _ in rows) for name, rows in found.items()}
    rows = [
        [name, f"{seconds:.2f}", f"{seconds / medians['fsdp2']:.2f}", f"{max(mb for _, mb in found[name]):,.0f}"]
        for name, seconds in medians.items()
    ]
    print_table(["backend", "seconds a step", "x fsdp2", "peak MB of a rank"], rows)


def draw_curves(options: argparse.Namespace) -> None:
    """Train the quickstart under each strategy, and draw the evaluation rewards on one picture."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    repository = Path(__file__).resolve().parents[1]
    figure = Figure(figsize=(8, 4), dpi=160, layout="constrained")
    axes = figure.subplots()
    root = options.output
    first = root / options.strategies[0]
    for index, strategy in enumerate(options.strategies):
        folder = root / strategy
        if folder != first:  # the same model and data
            for name in ("model", "data"):
                shutil.copytree(first / name, folder / name, dirs_exist_ok=True)
        command = [sys.executable, "examples/quickstart/run.py", "--output", str(folder)]
        overrides = [f"trainer.strategy={strategy}", f"trainer.max_training_steps={options.steps}"]
        subprocess.run([*command, *overrides], check=True, cwd=repository)
        number, reward = curves(RunFolder(folder / "run").read_metrics())["eval/all/avg_score"]
        axes.plot(number, reward, linewidth=9 / (index + 1), label=strategy)  # equal curves: each shows behind the next
        shown = {step: round(value, 3) for step, value in zip(number, reward, strict=True)}
        print(f"| {strategy} | {shown[min(shown)]} | {max(shown.values())} | {shown[max(shown)]} |", flush=True)
    axes.set(xlabel="step", ylabel="mean evaluation reward")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, loc="lower right")
    FigureCanvasAgg(figure).print_png(str(options.picture))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    of_steps = commands.add_parser("steps")
    of_steps.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    of_steps.add_argument("--rounds", type=int, default=3)
    of_steps.add_argument("--steps", type=int, default=4)
    of_steps.set_defaults(run=steps)
    of_curves = commands.add_parser("curves")
    of_curves.add_argument("--strategies", nargs="+", default=["fsdp2", "deepspeed", "megatron"])
    of_curves.add_argument("--steps", type=int, default=50)
    of_curves.add_argument("--output", type=Path, default=Path("runs/backend-curves"))
    of_curves.add_argument("--picture", type=Path, default=Path("docs/images/training_backends.png"))
    of_curves.set_defaults(run=draw_curves)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()

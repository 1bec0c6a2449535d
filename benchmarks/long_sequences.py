"""Peak memory and time of one forward and backward over long sequences with a large vocabulary, and what packing saves.

    python benchmarks/long_sequences.py [--tokens 4096 16384 65536] [--vocabulary 151936] [--limit-gb 12]

Ours (chunks of logits, computed again in the backward) beside the plain way (whole logits, float32 log_softmax). Each
case has a process of its own; its peak is counted above what it held before the forward. A case that needs more than
the limit is not run: the table then has the least it could need, marked with ">".
"""

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch

import torch
import transformers
from transformers import Qwen3Config, Qwen3ForCausalLM

from skyrl_train.models.cpu_linear import use_onednn_linear
from skyrl_train.models.scoring import ScoringModel

GB = 1e9
CASES = ("plain", "ours", "ours, with entropy")
NUM_PROMPT = 16


def make_model(vocabulary: int, hidden: int, layers: int, device: torch.device) -> Qwen3ForCausalLM:
    """A Qwen3 with random weights: float32 on a CPU, bfloat16 on a GPU."""
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=vocabulary,
            hidden_size=hidden,
            intermediate_size=3 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=hidden // 32,
            num_key_value_heads=hidden // 32,
            head_dim=32,
            max_position_embeddings=1 << 20,
            attn_implementation="sdpa",
        )
    )
    if device.type == "cpu":
        use_onednn_linear(model)
    return model.to(device, torch.float32 if device.type == "cpu" else torch.bfloat16)


def scorer(case: str, model: Qwen3ForCausalLM, chunk_size: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Make a function from one sequence [1, T] to the log-probs of its response [1, R]."""
    if case == "plain":

        def whole(ids: torch.Tensor) -> torch.Tensor:
            logits = model(ids, logits_to_keep=ids.shape[1] - NUM_PROMPT + 1, use_cache=False).logits[:, :-1]
            return logits.float().log_softmax(dim=-1).gather(2, ids[:, NUM_PROMPT:, None])[..., 0]

        return whole
    scoring = ScoringModel(model, chunk_size=chunk_size)

    def in_chunks(ids: torch.Tensor) -> torch.Tensor:
        num_response = ids.shape[1] - NUM_PROMPT
        return scoring(ids, torch.ones_like(ids), num_response, 1.0, with_entropy="entropy" in case).log_probs

    return in_chunks


class PeakMemory:
    """The most this process (or on a GPU, torch) held at a time since it was made, above what it held then."""

    def __init__(self, device: torch.device):
        self.device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated()
        else:
            Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
            self.before = self._of_process("VmRSS")

    @staticmethod
    def _of_process(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))

    def bytes(self) -> int:
        peak = torch.cuda.max_memory_allocated() if self.device.type == "cuda" else self._of_process("VmHWM")
        return peak - self.before


def run_case(arguments: argparse.Namespace) -> None:
    """Run one forward and backward in this process and print its memory peak and time as JSON."""
    device = torch.device(arguments.device)
    model = make_model(arguments.vocabulary, arguments.hidden, arguments.layers, device)
    score = scorer(arguments.case, model, arguments.chunk_size)
    ids = torch.randint(arguments.vocabulary, (1, arguments.tokens[0]), device=device)
    score(ids[:, : 2 * NUM_PROMPT]).sum().backward()  # kernels and their buffers
    model.zero_grad()
    if device.type == "cpu":
        limit = PeakMemory._of_process("VmSize") + int(arguments.limit_gb * GB)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    peak = PeakMemory(device)
    started, cpu_started = time.perf_counter(), time.process_time()
    score(ids).sum().backward()
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
    print(json.dumps(dict(peak=peak.bytes(), seconds=seconds, cpu_seconds=cpu_seconds)))


def least_bytes_of_plain(num_tokens: int, vocabulary: int, device: str) -> int:
    """log_softmax keeps its output [T, V] for the backward, where the gradients of it and of the logits meet it: three
    of them in float32 at the same time. Logits that are bfloat16 are held besides."""
    return (num_tokens - NUM_PROMPT) * vocabulary * (12 if device == "cpu" else 14)


def available_bytes(device: str) -> float:
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


def measure(case: str, num_tokens: int, arguments: argparse.Namespace) -> dict[str, float] | None:
    """Run a case in its own process. None if it exceeds the memory limit."""
    limit = min(arguments.limit_gb * GB, 0.7 * available_bytes(arguments.device))
    if case == "plain" and least_bytes_of_plain(num_tokens, arguments.vocabulary, arguments.device) > limit:
        return None
    command = [sys.executable, __file__, "--case", case, "--tokens", str(num_tokens)]
    for name in ("vocabulary", "hidden", "layers", "chunk_size", "device", "limit_gb"):
        command += [f"--{name.replace('_', '-')}", str(getattr(arguments, name))]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    if finished.returncode:
        print(f"{case}, {num_tokens} tokens: {finished.stderr.strip().splitlines()[-1]}", file=sys.stderr)
        return None
    return json.loads(finished.stdout.splitlines()[-1])


def memory_table(arguments: argparse.Namespace) -> Iterator[str]:
    """Markdown: a row for each case and length, as they come."""
    yield "| tokens | | peak GB | plain / this | seconds | CPU seconds |"
    yield "|---:|---|---:|---:|---:|---:|"
    for num_tokens in arguments.tokens:
        least = least_bytes_of_plain(num_tokens, arguments.vocabulary, arguments.device)
        plain_bytes, mark = float(least), "> "
        for case in CASES:
            result = measure(case, num_tokens, arguments)
            if result is None:
                peak = f"> {least / GB:.1f} (computed, not run)" if case == "plain" else "failed"
                yield f"| {num_tokens:,} | {case} | {peak} | | | |"
                continue
            if case == "plain":
                plain_bytes, mark = result["peak"], ""
            yield (
                f"| {num_tokens:,} | {case} | {result['peak'] / GB:.2f} | {mark}{plain_bytes / result['peak']:.1f} "
                f"| {result['seconds']:.1f} | {result['cpu_seconds']:.1f} |"
            )


def packing_table(turns: int = 7) -> list[str]:
    """Markdown: CPU seconds of a forward and backward over 32 rows of up to 512 tokens, packed and padded, in turn."""
    generator = torch.Generator().manual_seed(0)
    shares = torch.rand(32, generator=generator)
    kinds = {"all of one length": torch.ones(32), "evenly spread": shares, "a few long ones": shares**4}
    lines = ["| responses of 32 rows | tokens | padded s | packed s | padded / packed |", "|---|---:|---:|---:|---:|"]
    for kind, lengths in kinds.items():
        num_response = 512 - NUM_PROMPT
        responses = (lengths * (num_response - 1) + 1).long()
        mask = (torch.arange(512) < NUM_PROMPT + responses[:, None]).long()
        ids = torch.randint(512, mask.shape, generator=generator)
        seconds: dict[bool, list[float]] = {False: [], True: []}
        models = {
            packing: ScoringModel(make_model(512, 256, 2, torch.device("cpu")), packing=packing)
            for packing in (False, True)
        }
        for _ in range(turns):
            for packing, model in models.items():
                started = time.process_time()
                model(ids, mask, num_response, 1.0).log_probs.sum().backward()
                seconds[packing].append(time.process_time() - started)
        padded, packed = (statistics.median(seconds[packing][1:]) for packing in (False, True))
        lines.append(f"| {kind} | {int(mask.sum()):,} | {padded:.2f} | {packed:.2f} | {padded / packed:.2f} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 16384, 65536])
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--chunk-size", type=int, default=1024)
    parser.add_argument("--limit-gb", type=float, help="most memory of a case; 12 on a CPU, all there is on a GPU")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--case", choices=CASES, help="run one case in this process, and print JSON")
    parser.add_argument("--skip-packing", action="store_true", help="memory only")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.limit_gb is None:
        arguments.limit_gb = 12 if arguments.device == "cpu" else 1000
    if arguments.case:
        run_case(arguments)
        return
    print(
        f"One forward and backward of one sequence: Qwen3, hidden {arguments.hidden}, {arguments.layers} layers, "
        f"vocabulary {arguments.vocabulary:,}, chunks of {arguments.chunk_size} tokens, {arguments.device}.\n"
    )
    for line in memory_table(arguments):
        print(line, flush=True)
    if not arguments.skip_packing:
        print("\nPacked and padded (Qwen3, hidden 256, 2 layers, vocabulary 512, CPU):\n")
        print("\n".join(packing_table()))
    print(
        f"\n{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}, "
        f"Python {platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}"
    )


if __name__ == "__main__":
    main()

"""Seconds, pause and bytes of a weight sync, by strategy, and the cost of verification.

    python benchmarks/weight_sync.py --megabytes 10 100 1000

The policy's rank is a thread of this process, the engines are processes that hold the parameters; calls go through
pipes (no Ray).
Every sync follows a real step of Adam at learning rate 1e-6 on float32 weights that are sent as bfloat16. Strategies
are interleaved in one run with a plain copy of equal size; medians. Prints markdown tables.

- `pause`: what generation waits for; what is done before (encoding, writing files) counts in `seconds` only.
- Casting the float32 weights to bfloat16 costs every strategy the same and is done before.
- The proof: the same sync with verification sampled, full and off, through shared memory.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: sender and engine have a core each

import torch
from benchmark_tools import describe_machine, print_table

from skyrl_train.distributed.process_group import find_free_port
from skyrl_train.weight_sync.base import Encoding, Transport
from skyrl_train.weight_sync.fingerprint import Verification
from skyrl_train.weight_sync.plan import Route, init_infos_for
from skyrl_train_testing.weight_holders import HolderInfo, HolderProcesses, WeightHolder
from skyrl_train_testing.weight_sources import BlockingSender

LEARNING_RATE = 1e-6
HIDDEN = 1024
BUCKET_BYTES = 1_000_000_000
STRATEGIES: dict[str, tuple[Transport, Encoding]] = {
    "shared_memory": ("shared_memory", "full"),
    "broadcast (gloo)": ("broadcast", "full"),
    "checkpoint": ("checkpoint", "full"),
    "delta, shared_memory": ("shared_memory", "delta"),
    "delta, broadcast (gloo)": ("broadcast", "delta"),
}
Shapes = list[tuple[str, tuple[int, ...]]]


def shapes_of(megabytes: int) -> Shapes:
    """Return names and shapes of a transformer's parameters of about `megabytes` MB in bfloat16: layers of hidden size
    1,024 with eleven tensors each, as in Qwen3-0.6B.
    """
    layer = {
        "input_layernorm": (HIDDEN,),
        "q_proj": (2 * HIDDEN, HIDDEN),
        "k_proj": (HIDDEN, HIDDEN),
        "v_proj": (HIDDEN, HIDDEN),
        "q_norm": (HIDDEN // 8,),
        "k_norm": (HIDDEN // 8,),
        "o_proj": (HIDDEN, 2 * HIDDEN),
        "post_attention_layernorm": (HIDDEN,),
        "gate_proj": (3 * HIDDEN, HIDDEN),
        "up_proj": (3 * HIDDEN, HIDDEN),
        "down_proj": (HIDDEN, 3 * HIDDEN),
    }
    bytes_of_layer = 2 * sum(torch.Size(shape).numel() for shape in layer.values())
    num_layers = min(28, int(megabytes * 1e6 // bytes_of_layer))
    shapes = [(f"layers.{i}.{name}.weight", shape) for i in range(num_layers) for name, shape in layer.items()]
    rest = megabytes * 1e6 - num_layers * bytes_of_layer
    return [("embed_tokens.weight", (max(1, int(rest // (2 * HIDDEN))), HIDDEN)), *shapes]


class Policy:
    """float32 weights as wide as a trained model's, and Adam on them."""

    def __init__(self, shapes: Shapes):
        generator = torch.Generator().manual_seed(0)
        self._parameters = {}
        for name, shape in shapes:
            weight = torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator) * 0.02
            self._parameters[name] = torch.nn.Parameter(weight)
        self._optimizers = [torch.optim.Adam([it], lr=LEARNING_RATE) for it in self._parameters.values()]
        self.sent = {name: parameter.detach().bfloat16() for name, parameter in self._parameters.items()}

    def step(self) -> None:
        """One step on random gradients, and the weights as they are sent."""
        for (name, parameter), optimizer in zip(self._parameters.items(), self._optimizers, strict=True):
            parameter.grad = torch.randn_like(parameter)
            optimizer.step()
            parameter.grad = None
            self.sent[name].copy_(parameter.detach())


class BenchmarkedHolder(WeightHolder):
    """A holder that can tell whether it holds exactly the bytes of a file of tensors."""

    def __init__(self, shapes: Shapes):
        super().__init__((name, torch.zeros(shape, dtype=torch.bfloat16)) for name, shape in shapes)

    def num_different(self, file: str) -> int:
        expected = torch.load(file, mmap=True)
        return sum(not torch.equal(self.parameters[name], tensor) for name, tensor in expected.items())


@dataclass
class Timings:
    """Measurements of one strategy, one value per turn."""

    seconds: list[float] = field(default_factory=list)
    pause: list[float] = field(default_factory=list)
    payload_bytes: list[float] = field(default_factory=list)

    def add(self, sender: BlockingSender, policy: Policy, version: int) -> None:
        began = time.perf_counter()
        if sender.is_staged:
            sender.stage(policy.sent.items(), version)
        paused = time.perf_counter()
        metrics = sender.send(None if sender.is_staged else policy.sent.items(), version).metrics
        ended = time.perf_counter()
        self.seconds.append(ended - began)
        self.pause.append(ended - paused)
        self.payload_bytes.append(metrics["payload_bytes"])


def connect(
    engines: HolderProcesses, count: int, ways: tuple[Transport, Encoding], folder: str, verification: Verification
) -> BlockingSender:
    infos = init_infos_for(
        [Route(*ways)] * count,
        [HolderInfo()] * count,
        master_address="127.0.0.1",
        master_port=find_free_port(),
        directory=tempfile.mkdtemp(dir=folder),
        verification=verification,
    )
    return BlockingSender(engines.engines, infos, max_bucket_bytes=BUCKET_BYTES)


def check_exact(engines: HolderProcesses, policy: Policy, folder: str) -> None:
    """End the run unless the engines hold exactly the bits that were sent."""
    file = os.path.join(folder, "expected.pt")
    torch.save(policy.sent, file)
    different = engines.call_all("num_different", file)
    os.remove(file)
    if any(different):
        raise SystemExit(f"engines hold other weights than were sent: {different} tensors differ")


def memcpy_seconds(num_bytes: int) -> float:
    source, target = torch.ones(num_bytes, dtype=torch.uint8), torch.ones(num_bytes, dtype=torch.uint8)
    began = time.perf_counter()
    target.copy_(source)
    return time.perf_counter() - began


def measure_strategies(shapes: Shapes, num_engines: int, turns: int, folder: str) -> tuple[dict[str, Timings], float]:
    """Measure every strategy, each with separate engines and connection, and a plain copy."""
    policy = Policy(shapes)
    timings = {name: Timings() for name in STRATEGIES}
    copies = []
    num_bytes = sum(tensor.nbytes for tensor in policy.sent.values())
    with HolderProcesses(num_engines, partial(BenchmarkedHolder, shapes), timeout_seconds=600) as engines:
        for name, ways in STRATEGIES.items():  # a connection is made anew for each: engines hold one
            sender = connect(engines, num_engines, ways, folder, "sampled")
            Timings().add(sender, policy, 1)  # warms up; nobody has a base for changes yet
            for turn in range(turns):
                policy.step()
                timings[name].add(sender, policy, turn + 2)
                copies.append(memcpy_seconds(num_bytes))
            check_exact(engines, policy, folder)
            sender.close()
    return timings, statistics.median(copies)


def measure_proof(shapes: Shapes, turns: int, folder: str) -> dict[Verification, list[float]]:
    """Seconds of syncs through shared memory with each way of verifying, in turn."""
    policy = Policy(shapes)
    ways: list[Verification] = ["off", "sampled", "full"]
    seconds: dict[Verification, list[float]] = {verification: [] for verification in ways}
    holders = {way: HolderProcesses(1, partial(BenchmarkedHolder, shapes), timeout_seconds=600) for way in ways}
    try:
        senders = {way: connect(holders[way], 1, ("shared_memory", "full"), folder, way) for way in ways}
        for turn in range(turns + 1):
            for way in ways if turn % 2 else reversed(ways):
                timing = Timings()
                timing.add(senders[way], policy, turn + 1)
                if turn:  # the first warms up
                    seconds[way] += timing.seconds
        for sender in senders.values():
            sender.close()
    finally:
        for holder in holders.values():
            holder.__exit__(None, None, None)
    return seconds


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[10, 100, 1000], help="of the weights in bfloat16")
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--directory", default=None, help="for files; default: the system's temporary folder")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    print(f"{describe_machine()}; {options.engines} engine(s), medians of {options.turns} turns\n")
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        header = ["weights", "strategy", "seconds", "pause seconds", "bytes", "of the weights'", "times a plain copy"]
        print_table(header, strategy_rows(options, folder))
        print("\nEvery engine held exactly the bits that were sent.\n")
        header = ["weights", "verification", "seconds (min - max)", "more than without"]
        print_table(header, verification_rows(max(options.megabytes), 3 * options.turns, folder))


def strategy_rows(options: argparse.Namespace, folder: str) -> Iterator[list[str]]:
    """Measure every strategy at every size."""
    for megabytes in options.megabytes:
        shapes = shapes_of(megabytes)
        num_bytes = 2 * sum(torch.Size(shape).numel() for _, shape in shapes)
        size = f"{num_bytes / 1e6:.0f} MB"
        timings, copy_seconds = measure_strategies(shapes, options.engines, options.turns, folder)
        for name, timing in timings.items():
            seconds, pause = statistics.median(timing.seconds), statistics.median(timing.pause)
            payload = statistics.median(timing.payload_bytes)
            cells = [f"{seconds:.3f}", f"{pause:.3f}", f"{payload:,.0f}", f"{payload / num_bytes:.1%}"]
            yield [size, name, *cells, f"{seconds / copy_seconds:.1f}"]
        yield [size, "(a plain copy)", f"{copy_seconds:.3f}", "", "", "", "1.0"]


def verification_rows(megabytes: int, turns: int, folder: str) -> Iterator[list[str]]:
    """Measure a sync with each way of verifying."""
    proof = measure_proof(shapes_of(megabytes), turns, folder)
    without = statistics.median(proof["off"])
    for verification, seconds in proof.items():
        median = statistics.median(seconds)
        span = f"{median:.4f} ({min(seconds):.4f} - {max(seconds):.4f})"
        yield [f"{megabytes} MB", verification, span, f"{median / without - 1:+.1%}"]


if __name__ == "__main__":
    main()

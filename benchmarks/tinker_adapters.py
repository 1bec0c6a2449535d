"""Adapters of many tenants in one layer: a product for each of them against one grouped product, forward and backward.

    OMP_NUM_THREADS=1 python benchmarks/tinker_adapters.py                  # a minute

Each tenant has 64 rows and an adapter of rank 16 on a square layer of 1,024, without the layer's own product. Processor
time of one thread, medians of 15 in turns. Prints a markdown table.
"""

import os
import platform
import statistics
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch

import torch

from tx.tinker.backends.torch.adapters import adapted_product
from tx.tinker.backends.torch.parts import Matrices, Part

ROWS, RANK, WIDTH, REPEATS = 64, 16, 1024, 15
TENANTS = (1, 4, 16, 64)


class Nothing:
    """Product of a layer without weights."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(x)

    def backward(self, gradient: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(gradient)


def parts_of(tenants: int, dtype: torch.dtype) -> list[Part]:
    def matrices(scale: float) -> Matrices:
        return Matrices(*((torch.randn(RANK, WIDTH) * scale).to(dtype) for _ in range(2)))

    starts = range(0, tenants * ROWS, ROWS)
    return [Part(start, start + ROWS, matrices(WIDTH**-0.5), 2.0, matrices(0.0)) for start in starts]


def milliseconds(tenants: int, dtype: torch.dtype) -> list[float]:
    """Return the medians of a product for each tenant, and of one grouped product."""
    parts, root = parts_of(tenants, dtype), torch.zeros((), requires_grad=True)
    x = torch.randn(tenants * ROWS, WIDTH).to(dtype).requires_grad_()
    found: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(REPEATS):
        for is_grouped, times in found.items():
            began = time.thread_time()
            y = adapted_product(x, Nothing(), parts, root, is_grouped)
            torch.autograd.grad(y, x, torch.ones_like(y))
            times.append(1e3 * (time.thread_time() - began))
    return [statistics.median(times) for times in found.values()]


def main() -> None:
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    print("| tenants | float32: one by one, ms | grouped, ms | bfloat16: one by one, ms | grouped, ms |")
    print("|---|---|---|---|---|")
    for tenants in TENANTS:
        times = [each for dtype in (torch.float32, torch.bfloat16) for each in milliseconds(tenants, dtype)]
        print(f"| {tenants} | {' | '.join(f'{each:.2f}' for each in times)} |", flush=True)
    print(f"\n{platform.machine()}, torch {torch.__version__}, load {load:.1f} before, {os.getloadavg()[0]:.1f} after.")


if __name__ == "__main__":
    main()

"""Overhead of a call of each sandbox over starting the same Python directly, and the duration of many calls at once.

    python benchmarks/sandbox.py [--calls 50] [--jobs 200] [--kinds local process docker]

The plain and the sandboxed starts take turns in one run, so that both see the same machine; the figure is the median of
the differences.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from skyrl_gym.error import InfraError
from skyrl_gym.sandbox import Limits, Sandbox, make_sandbox

NOTHING = ["-c", "pass"]
BARE = ["-I", "-S", "-c", "pass"]


def milliseconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return 1000 * (time.perf_counter() - started)


def processor_seconds() -> float:
    """Return the CPU seconds of this process and of all children it has waited for."""
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def plain(options: list[str]) -> None:
    subprocess.run([sys.executable, *options], capture_output=True, check=True)


def sandboxed(sandbox: Sandbox, options: list[str]) -> None:
    result = sandbox.exec([sandbox.python, *options])
    assert result.ok, result


def one_job(kind: str) -> None:
    with make_sandbox(kind, limits=Limits(wall_seconds=120.0)) as sandbox:  # pyright: ignore[reportArgumentType]
        sandboxed(sandbox, BARE)


def report(kind: str, calls: int, jobs: int) -> str:
    """One row of the table: Markdown."""
    differences, plain_ms, sandboxed_ms, fresh_ms, cpu_ms = [], [], [], [], []
    with make_sandbox(kind) as sandbox:  # pyright: ignore[reportArgumentType]
        for _ in range(calls):
            before = processor_seconds()
            plain_ms.append(milliseconds(lambda: plain(NOTHING)))
            between = processor_seconds()
            sandboxed_ms.append(milliseconds(lambda: sandboxed(sandbox, NOTHING)))
            cpu_ms.append(1000 * (processor_seconds() - between - (between - before)))
            differences.append(sandboxed_ms[-1] - plain_ms[-1])
            fresh_ms.append(milliseconds(lambda: one_job(kind)))
    with ThreadPoolExecutor(jobs) as pool:
        many = milliseconds(lambda: list(pool.map(one_job, [kind] * jobs))) / 1000
    median = statistics.median
    return (
        f"| `{kind}` | {median(plain_ms):.1f} | {median(sandboxed_ms):.1f} | **{median(differences):.1f}** "
        f"| {median(cpu_ms):.1f} | {median(fresh_ms):.1f} | {many:.1f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=50)
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--kinds", nargs="+", default=["local", "process", "docker"])
    options = parser.parse_args()
    load = os.getloadavg()[0]
    print(
        f"{os.cpu_count()} processors, load {load:.1f} before the run, Python {sys.version.split()[0]}; medians, ms\n"
    )
    print(
        "| kind | `python -c pass` | the same in a sandbox | overhead of a call "
        f"| of it processor time | new sandbox, `python -I -S`, close | {options.jobs} of these at once, s |"
    )
    print("|---|---|---|---|---|---|---|")
    for kind in options.kinds:
        try:
            print(report(kind, options.calls, options.jobs), flush=True)
        except InfraError as error:
            print(f"| `{kind}` | not here: {str(error).splitlines()[0]} |", flush=True)


if __name__ == "__main__":
    main()

"""Many tenants of the Tinker-compatible server: memory of each, tokens/s, waiting times, and one who floods it.

    python benchmarks/tinker_tenants.py                                  # 100 tenants, all resident, then 16 of them
    python benchmarks/tinker_tenants.py --tenants 8 --seconds 10
    python benchmarks/tinker_tenants.py --tenants 64 --rank 64 --processes 1 2 --resident 128 --seconds 0     # memory

A server process with keys over a random Qwen3 of 0.1 million parameters; every tenant has a key, a model of rank 8, and
trains without a pause: a pass of 4 x 64 tokens, then a step. All of them share one plain client (`tinker_server.py`),
and the machine's cores with the server. Then the same beside one more tenant, who has 16 passes of 32 x 128 tokens
under way at any time. A heartbeat is sent every 100 ms; its time counts from when it was due. Prints a markdown table.
Memory is that of the process that grows most, with an accumulated gradient and moments of each tenant.
"""

import argparse
import asyncio
import itertools
import json
import os
import platform
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch; the server inherits it

import aiohttp
import psutil
from tinker_server import RANK, Client, Tenant, make_model, server

ROWS, LENGTH = 4, 64
FLOOD_ROWS, FLOOD_LENGTH, FLOOD_UNDER_WAY = 32, 128, 16
HEARTBEAT_SECONDS = 0.1
BUDGET_MB = 256
FLOOD, ADMIN = "flood", "operator"
_TOKENS = re.compile(r'^tx_engine_train_tokens_total\{tenant="([^"]+)"\} (\S+)$', re.MULTILINE)


class Phase(NamedTuple):
    """Observations of some seconds."""

    seconds: float
    steps: list[float]
    """Seconds of each pass with its step, from the request to both results."""
    steps_of: list[int]
    """Number of steps by tenant."""
    heartbeats: list[float]
    tokens: dict[str, float]
    """Trained tokens by tenant."""

    def row(self, name: str) -> str:
        """Return a row of the table."""
        others = sum(count for tenant, count in self.tokens.items() if tenant != FLOOD)
        flood = f"{self.tokens.get(FLOOD, 0.0) / self.seconds:,.0f}" if FLOOD in self.tokens else ""
        cells = [
            f"{others / self.seconds:,.0f}",
            flood,
            *(f"{quantile(self.steps, share):,.2f}" for share in (0.5, 0.99)),
            f"{min(self.steps_of)} to {max(self.steps_of)}",
            *(f"{1e3 * quantile(self.heartbeats, share):,.0f}" for share in (0.5, 0.99)),
        ]
        return f"| {name} | {' | '.join(cells)} |"


def quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


def key_of(tenant: str) -> str:
    return f"tml-{tenant}-key"


async def steps_until(tenant: Tenant, deadline: float, found: list[float]) -> int:
    """Train until the deadline. Returns: the number of steps."""
    count = 0
    while (began := time.monotonic()) < deadline:
        ids = [await tenant.post_pass(ROWS, LENGTH), await tenant.post_step()]
        await asyncio.gather(*map(tenant.client.result, ids))
        found.append(time.monotonic() - began)
        count += 1
    return count


async def flood_until(tenant: Tenant, deadline: float) -> None:
    """Keep passes under way until the deadline; what is left is waited for."""
    waiting: set[asyncio.Task[Any]] = set()
    while time.monotonic() < deadline:
        while len(waiting) < FLOOD_UNDER_WAY:
            request_id = await tenant.post_pass(FLOOD_ROWS, FLOOD_LENGTH)
            waiting.add(asyncio.create_task(tenant.client.result(request_id)))
        _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    await asyncio.gather(*waiting)


async def heartbeats_until(tenant: Tenant, deadline: float) -> list[float]:
    """Send heartbeats. Returns: seconds of each since it was due."""
    found: list[float] = []

    async def beat(due: float) -> None:
        await tenant.client.post("session_heartbeat", {"session_id": tenant.session_id, "type": "session_heartbeat"})
        found.append(time.monotonic() - due)

    async with asyncio.TaskGroup() as beats:
        due = time.monotonic()
        while due < deadline:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            beats.create_task(beat(due))
            due += HEARTBEAT_SECONDS
    return found


async def phase(tenants: list[Tenant], flood: Tenant | None, scrape: Any, seconds: float) -> Phase:
    steps: list[float] = []
    before, began = await scrape(), time.monotonic()
    deadline = began + seconds
    flooding = asyncio.create_task(flood_until(flood, deadline)) if flood else None
    beating = asyncio.create_task(heartbeats_until(tenants[0], deadline))
    counts = await asyncio.gather(*(steps_until(tenant, deadline, steps) for tenant in tenants))
    await asyncio.sleep(1.1)  # the engine tells its numbers each second
    after, elapsed = await scrape(), time.monotonic() - began
    tokens = {tenant: count - before.get(tenant, 0.0) for tenant, count in after.items()}
    if flooding is not None:
        await flooding
    else:
        tokens.pop(FLOOD, None)
    return Phase(elapsed, steps, list(counts), await beating, tokens)


def megabytes(api: psutil.Process) -> dict[int, float]:
    """Return the memory (RSS) of each process of the server, by id."""
    return {process.pid: process.memory_info().rss / 1e6 for process in (api, *api.children(recursive=True))}


async def measure(url: str, api: psutil.Process, model: Path, options: argparse.Namespace, name: str) -> list[str]:
    async with AsyncExitStack() as stack:
        connector = await stack.enter_async_context(aiohttp.TCPConnector(limit=0))

        async def http(key: str) -> aiohttp.ClientSession:
            session = aiohttp.ClientSession(
                connector=connector,
                connector_owner=False,
                headers={"X-API-Key": key},
                timeout=aiohttp.ClientTimeout(total=None),
            )
            return await stack.enter_async_context(session)

        async def tenant(called: str) -> Tenant:
            return await Tenant.new(Client(await http(key_of(called)), url), str(model), options.rank)

        operator = await http(key_of(ADMIN))

        async def scrape() -> dict[str, float]:
            async with operator.get(f"{url}/metrics") as answer:
                return {of: float(count) for of, count in _TOKENS.findall(await answer.text())}

        flood = await tenant(FLOOD)
        await flood.train(1, FLOOD_ROWS, FLOOD_LENGTH)
        before = megabytes(api)
        tenants = [await tenant(f"t{number}") for number in range(options.tenants)]
        # One after the other: a pass holds whole weights and gradients of its models, here of one.
        for one in tenants:
            await one.train(2, ROWS, LENGTH)
            await one.run_pass(ROWS, LENGTH)
        growth = max(size - before.get(pid, 0.0) for pid, size in megabytes(api).items()) / options.tenants
        memory = f"{growth:.2f} MB a tenant, so {BUDGET_MB / growth:,.0f} tenants in {BUDGET_MB} MB, {name}"
        print(memory, file=sys.stderr, flush=True)
        if not options.seconds:
            return [memory]
        alone = await phase(tenants, None, scrape, options.seconds)
        print(alone.row(name), file=sys.stderr, flush=True)
        flooded = await phase(tenants, flood, scrape, options.seconds)
    return [memory, alone.row(name), flooded.row(f"{name}, one floods")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tenants", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=60, help="of each phase; 0: measure memory alone")
    parser.add_argument("--rank", type=int, default=RANK)
    parser.add_argument("--processes", type=int, nargs="+", default=[1], help="that train together")
    parser.add_argument("--resident", type=int, nargs="+", default=[128, 16], help="models in memory at a time")
    options = parser.parse_args()
    load, lines = os.getloadavg()[0], []
    for resident, processes in itertools.product(options.resident, options.processes):
        with tempfile.TemporaryDirectory(prefix="tinker_tenants_") as folder_name:
            folder = Path(folder_name)
            make_model("tiny", folder / "model")
            names = [FLOOD, *(f"t{number}" for number in range(options.tenants))]
            keys = [*(f"{name} {key_of(name)}" for name in names), f"{ADMIN} {key_of(ADMIN)} admin"]
            (folder / "keys").write_text("\n".join(keys))
            settings = ["--api-keys-file", str(folder / "keys"), "--no-standby-engine"]
            backend = {"max_resident_models": resident, "num_processes": processes}
            settings += ["--backend-config", json.dumps(backend)]
            with server(folder / "model", folder, *settings) as (url, api):
                name = "all resident" if resident > options.tenants else f"{resident} resident"
                name += f", {processes} processes" if processes > 1 else ""
                lines.append(asyncio.run(measure(url, api, folder / "model", options, name)))
    if options.seconds:
        print(f"\n| {options.tenants} tenants | tokens/s | of the flood | step p50, s | p99, s | steps of a tenant | "
              "heartbeat p50, ms | p99, ms |\n|---|---|---|---|---|---|---|---|")  # fmt: skip
    for _, *rows in lines:
        print(*rows, sep="\n")
    print(f"\nMemory: {'; '.join(memory for memory, *_ in lines)}.")
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, load before {load:.1f}, "
        f"after {os.getloadavg()[0]:.1f}."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

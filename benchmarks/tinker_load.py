"""Load test of the Tinker-compatible server with many real clients: no errors, punctual heartbeats, constant memory.

    scripts/sdk_envs.sh && python benchmarks/tinker_load.py         # 64 clients for 10 minutes
    python benchmarks/tinker_load.py --clients 8 --minutes 1

A server process with default settings over a random Qwen3 of 0.1 million parameters, and processes of clients with the
real SDK (`tinker_load_clients.py`), all on this machine: sessions, training, samplers, samples and checkpoints come and
go without a pause. Beside them a probe sends a heartbeat every 100 ms, late answers or not, and the memory of the
server's processes is read every second. Prints a markdown table; exits with 1 if one of the claims below it fails.
"""

import argparse
import asyncio
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch; the server inherits it

import aiohttp
import psutil
from tinker_server import VOCABULARY, make_model, server

SDK_ENVIRONMENTS = Path(os.environ.get("TX_SDK_ENVS") or Path.home() / ".cache" / "skyrl-tx" / "sdk")
PROBE_SECONDS, MEMORY_SECONDS, PROGRESS_SECONDS = 0.1, 1.0, 15.0
LAST_WORDS_SECONDS = 300
"""Time that clients have to finish at the end."""
EXPECTED = {("408", "retrieve_future"), ("410", "session_heartbeat")}
"""Answers that are no error: a poll without a result yet, a heartbeat that comes just after its session's end."""
_REQUESTS = re.compile(r"^tx_http_requests_total\{(.*)\} (\S+)$", re.MULTILINE)


@dataclass
class Seen:
    """Observations from outside while the clients ran.

    Attributes:
        heartbeats: seconds from when each was due to its answer
        lost: heartbeats that were not answered 200
        memory: (seconds since the start, bytes by process: `api`, `engine` with one that stands by)
    """

    heartbeats: list[float] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    memory: list[tuple[float, dict[str, int]]] = field(default_factory=list)

    def megabytes(self, since: float, until: float) -> dict[str, float]:
        """Median of that time, by process, and `both`."""
        window = [sizes for at, sizes in self.memory if since <= at <= until]
        found = {name: statistics.median(sizes[name] for sizes in window) / 1e6 for name in ("api", "engine")}
        return found | {"both": sum(found.values())}

    def quantile(self, share: float) -> float:
        ordered = sorted(self.heartbeats)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


async def watch(url: str, api: psutil.Process, seconds: float) -> Seen:
    seen = Seen()
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as http:
        body = {"tags": [], "user_metadata": {}, "sdk_version": "0.38.0", "type": "create_session"}
        async with http.post(f"{url}/api/v1/create_session", json=body) as answer:
            session = (await answer.json())["session_id"]
        await asyncio.gather(_probe(http, url, session, seen, seconds), _weigh(api, seen, seconds))
    return seen


async def _probe(http: aiohttp.ClientSession, url: str, session: str, seen: Seen, seconds: float) -> None:
    """A heartbeat at each tick, whether or not the last one was answered."""
    body = {"session_id": session, "type": "session_heartbeat"}

    async def beat(due: float) -> None:
        try:
            async with http.post(f"{url}/api/v1/session_heartbeat", json=body) as answer:
                if answer.status != 200:
                    seen.lost.append(f"{answer.status} {await answer.text()}")
        except (aiohttp.ClientError, TimeoutError) as error:
            seen.lost.append(repr(error))
        seen.heartbeats.append(time.monotonic() - due)

    start = time.monotonic()
    async with asyncio.TaskGroup() as beats:
        for tick in range(int(seconds / PROBE_SECONDS)):
            due = start + tick * PROBE_SECONDS
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            beats.create_task(beat(due))


async def _weigh(api: psutil.Process, seen: Seen, seconds: float) -> None:
    start, told = time.monotonic(), 0.0
    while (now := time.monotonic() - start) < seconds:
        sizes = {"api": api.memory_info().rss, "engine": sum(child.memory_info().rss for child in api.children())}
        seen.memory.append((now, sizes))
        if now >= told:
            told += PROGRESS_SECONDS
            said = ", ".join(f"{name} {size / 1e6:,.0f} MB" for name, size in sizes.items())
            print(f"  {now:4.0f} s: {said}", file=sys.stderr, flush=True)
        await asyncio.sleep(MEMORY_SECONDS)


@contextmanager
def clients(url: str, model: Path, options: argparse.Namespace, seconds: float) -> Iterator[list[subprocess.Popen]]:
    """Processes of clients, gone afterwards."""
    shares = [
        options.clients // options.processes + (i < options.clients % options.processes)
        for i in range(options.processes)
    ]
    command = [options.sdk_python, Path(__file__).with_name("tinker_load_clients.py"), "--url", url]
    command += ["--model", model, "--vocab-size", VOCABULARY, "--seconds", seconds]
    running = [
        subprocess.Popen([*map(str, command), "--clients", str(share), "--seed", str(1000 * i)], stdout=subprocess.PIPE)
        for i, share in enumerate(shares)
    ]
    try:
        yield running
    finally:
        for process in running:
            process.kill()
            process.wait()


def requests_answered(metrics: str) -> Counter[tuple[str, str]]:
    """Count requests by status and last part of the route, from the text of `/metrics`."""
    found: Counter[tuple[str, str]] = Counter()
    for labels, count in _REQUESTS.findall(metrics):
        label = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        found[label["status"], label["route"].rpartition("/")[2]] += int(float(count))
    return found


@dataclass
class Report:
    seen: Seen
    answers: Counter[tuple[str, str]]
    done: Counter[str]
    errors: list[str]
    sdk: str


async def measure(url: str, api: psutil.Process, model: Path, options: argparse.Namespace) -> Report:
    seconds = 60 * options.minutes
    with clients(url, model, options, seconds) as running:
        seen = await watch(url, api, seconds)
        outputs = [await asyncio.to_thread(process.communicate, timeout=LAST_WORDS_SECONDS) for process in running]
    async with aiohttp.ClientSession() as http, http.get(f"{url}/metrics") as answer:
        answers = requests_answered(await answer.text())
    said = [json.loads(output.splitlines()[-1]) for output, _ in outputs]
    done = sum((Counter(each["done"]) for each in said), Counter())
    return Report(seen, answers, done, [error for each in said for error in each["errors"]], said[0]["sdk"])


def rows(report: Report, options: argparse.Namespace) -> list[tuple[str, str]]:
    seconds, seen = 60 * options.minutes, report.seen
    total, again = report.answers.total(), sum(n for (status, _), n in report.answers.items() if status == "429")
    early, late = windows(options)
    before, after = seen.megabytes(*early), seen.megabytes(*late)
    table = [
        ("requests answered", f"{total:,} ({total / seconds:,.0f}/s)"),
        ("asked to come again (429)", f"{again:,}"),
        *((f"{name}s done", f"{count:,}") for name, count in sorted(report.done.items())),
        ("heartbeats", f"{len(seen.heartbeats):,}"),
        ("heartbeat p50, p99, longest", ", ".join(f"{1e3 * seen.quantile(q):,.0f} ms" for q in (0.5, 0.99, 1.0))),
    ]
    for name in before:
        growth = 100 * (after[name] / before[name] - 1)
        table.append(
            (
                f"memory of {name}, after warm-up and at the end",
                f"{before[name]:,.0f} and {after[name]:,.0f} MB ({growth:+.1f} %)",
            )
        )
    return table


def windows(options: argparse.Namespace) -> tuple[tuple[float, float], tuple[float, float]]:
    """Seconds between which memory is read after the warm-up, and at the end."""
    seconds = 60 * options.minutes
    width = min(15.0, (seconds - options.warm_up_seconds) / 4)
    return (options.warm_up_seconds, options.warm_up_seconds + width), (seconds - width, seconds)


def broken_claims(report: Report, options: argparse.Namespace) -> list[str]:
    """List the claims that do not hold."""
    early, late = windows(options)
    before, after = report.seen.megabytes(*early)["both"], report.seen.megabytes(*late)["both"]
    refused = {about: n for about, n in report.answers.items() if about[0][0] in "45" and about not in EXPECTED}
    return [
        *(f"an error of a client:\n{error}" for error in report.errors),
        *(f"{n:,} answers {status} of {route}" for (status, route), n in refused.items() if status != "429"),
        *(f"a heartbeat was lost: {text}" for text in report.seen.lost),
        *(
            [f"p99 of heartbeats over {options.max_heartbeat_seconds:g} s"]
            if report.seen.quantile(0.99) > options.max_heartbeat_seconds
            else []
        ),
        *(
            [f"memory grew by more than {options.max_growth_percent:g} %"]
            if after > before * (1 + options.max_growth_percent / 100)
            else []
        ),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--processes", type=int, default=4, help="that the clients are spread over")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--warm-up-seconds", type=float, default=60, help="growth of memory counts from there")
    parser.add_argument("--max-heartbeat-seconds", type=float, default=1, help="of 99 in 100")
    parser.add_argument("--max-growth-percent", type=float, default=5, help="of the memory of API and engine together")
    parser.add_argument(
        "--sdk-python",
        type=Path,
        default=SDK_ENVIRONMENTS / "0.38.0" / "bin" / "python",
        help="made by scripts/sdk_envs.sh",
    )
    options = parser.parse_args()
    if not options.sdk_python.exists():
        parser.error(f"--sdk-python: there is no {options.sdk_python}; run scripts/sdk_envs.sh")
    if options.warm_up_seconds >= 60 * options.minutes:
        parser.error("--warm-up-seconds must be less than --minutes")
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="tinker_load_") as name:
        model = Path(name) / "model"
        make_model("tiny", model)
        with server(model, Path(name)) as (url, api):
            report = asyncio.run(measure(url, api, model, options))
    print(f"| {options.clients} clients, SDK {report.sdk}, {options.minutes:g} minutes | |\n|---|---|")
    for what, value in rows(report, options):
        print(f"| {what} | {value} |")
    print(
        f"\n{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, load before {load:.1f}."
    )
    broken = broken_claims(report, options)
    for claim in broken:
        print(f"BROKEN: {claim}")
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())

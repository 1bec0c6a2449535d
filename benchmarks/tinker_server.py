"""Speed of the Tinker-compatible server, and its behaviour under the load of many real clients.

    python benchmarks/tinker_server.py speed                     # both models, some minutes on two cores
    python benchmarks/tinker_server.py speed --models tiny --quick
    scripts/sdk_envs.sh && python benchmarks/tinker_server.py load         # 64 clients for 10 minutes
    python benchmarks/tinker_server.py load --clients 8 --minutes 1

A server process with default settings over a random Qwen3 (tiny: 0.1 million parameters, small: 5 million).

`speed`: calls, heartbeats, training and sampling with 1, 4 and 16 tenants, by a plain client in this process, which
shares the machine's cores with the server: the protocol as the SDK speaks it (protobuf bodies, long polls), without the
SDK's own cost. Medians over repetitions.

`load`: processes of clients with the real SDK (`tinker_load_clients.py`) open sessions, train, sample and save without
a pause. Concurrently a probe sends a heartbeat every 100 ms, whether or not the last was answered, and the memory of
the server's processes is read every second. Exits with 1 if a claim of `broken_claims` fails.
"""

import argparse
import asyncio
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch; the server inherits it

import aiohttp
import numpy as np
import psutil
from benchmark_tools import VOCABULARY, describe_machine, make_word_model, print_table

from tx.tinker.types import Datum
from tx.tinker.wire.codec import TrainingRequest, encode_training

SIZES = {"tiny": dict(hidden=64, layers=2, head_dim=16), "small": dict(hidden=256, layers=6)}
CONTEXT = 1024
RANK = 8
START_SECONDS = 120
PROTOBUF = "application/x-protobuf"


@contextmanager
def server(model: Path, folder: Path, *options: str) -> Iterator[tuple[str, psutil.Process]]:
    """Yield URL and process of a server with default settings, changed by `options`."""
    log = folder / "server.log"
    command = [sys.executable, "-m", "tx.tinker.api", "--base-model", str(model), "--port", "0"]
    command += ["--state-dir", str(folder / "state"), "--checkpoints-base", str(folder / "checkpoints")]
    command += options
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + START_SECONDS
        while not (url := next((w.rstrip("/.,") for w in log.read_text().split() if w.startswith("http://")), None)):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server did not start:\n{log.read_text()}")
            time.sleep(0.1)
        yield url, psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(30)


class Client:
    """The protocol, without retries: any answer but 200 ends the benchmark."""

    def __init__(self, http: aiohttp.ClientSession, url: str):
        self._http, self._base = http, f"{url}/api/v1"

    async def post(self, path: str, body: Any, *, data: bytes | None = None) -> Any:
        headers = {"Content-Type": PROTOBUF} if data is not None else {}
        async with self._http.post(f"{self._base}/{path}", json=body, data=data, headers=headers) as answer:
            if answer.status != 200:
                raise RuntimeError(f"{path}: {answer.status} {await answer.text()}")
            return await answer.json()

    async def result(self, request_id: str) -> Any:
        """Poll until the result is available. Returns protobuf results as bytes."""
        while True:
            body = {"request_id": request_id}
            async with self._http.post(f"{self._base}/retrieve_future", json=body, headers={"Accept": PROTOBUF}) as got:
                if got.content_type == PROTOBUF:
                    return await got.read()
                answer = await got.json()
                if got.status in (200, 408) and answer.get("type") == "try_again":
                    continue
                if got.status != 200 or "error" in answer:
                    raise RuntimeError(f"{request_id}: {got.status} {answer}")
                return answer

    async def call(self, path: str, body: Any, *, data: bytes | None = None) -> Any:
        """Asks and waits for the result."""
        return await self.result((await self.post(path, body, data=data))["request_id"])

    async def session(self) -> str:
        body = {"tags": [], "user_metadata": {}, "sdk_version": "0.38.0", "type": "create_session"}
        return (await self.post("create_session", body))["session_id"]


class Tenant:
    """One training client: a session, a model, its counter."""

    def __init__(self, client: Client, session_id: str):
        self.client, self.session_id = client, session_id
        self.model_id = ""
        self._seq = 0
        self._samplers = 0

    @classmethod
    async def new(cls, client: Client, base_model: str, rank: int = RANK) -> "Tenant":
        tenant = cls(client, await client.session())
        body = {"session_id": tenant.session_id, "model_seq_id": 0, "base_model": base_model}
        tenant.model_id = (await client.call("create_model", body | {"lora_config": {"rank": rank}}))["model_id"]
        return tenant

    async def post_pass(self, num_rows: int, num_tokens: int, *, forward_only: bool = False) -> str:
        self._seq += 1
        rows = np.random.default_rng(self._seq).integers(2, VOCABULARY, (num_rows, num_tokens + 1))
        data = [Datum(row[:-1], {"target_tokens": row[1:], "weights": np.ones(num_tokens, np.float32)}) for row in rows]
        request = TrainingRequest(
            model_id=self.model_id,
            seq_id=self._seq,
            data=data,
            loss_fn="cross_entropy",
            loss_config={},
            forward_only=forward_only,
        )
        answer = await self.client.post("forward_backward", None, data=encode_training(request))
        return answer["request_id"]

    async def post_step(self) -> str:
        self._seq += 1
        body = {"model_id": self.model_id, "seq_id": self._seq, "adam_params": {"learning_rate": 1e-4}}
        return (await self.client.post("optim_step", body))["request_id"]

    async def run_pass(self, num_rows: int, num_tokens: int, *, forward_only: bool = False) -> None:
        await self.client.result(await self.post_pass(num_rows, num_tokens, forward_only=forward_only))

    async def train(self, steps: int, num_rows: int = 32, num_tokens: int = 128) -> None:
        for _ in range(steps):
            await self.run_pass(num_rows, num_tokens)
            await self.client.result(await self.post_step())

    async def train_ahead(self, steps: int, num_rows: int = 32, num_tokens: int = 128) -> None:
        """The next step is asked for before the one before is done."""
        waiting: list[str] = []
        for _ in range(steps):
            waiting += [await self.post_pass(num_rows, num_tokens), await self.post_step()]
        await asyncio.gather(*map(self.client.result, waiting))

    async def sampler(self) -> str:
        """A sampling session with the weights of now."""
        self._seq, self._samplers = self._seq + 1, self._samplers + 1
        body = {"model_id": self.model_id, "seq_id": self._seq, "sampling_session_seq_id": self._samplers}
        return (await self.client.call("save_weights_for_sampler", body))["sampling_session_id"]

    async def save_state(self, name: str) -> None:
        self._seq += 1
        await self.client.call("save_weights", {"model_id": self.model_id, "seq_id": self._seq, "path": name})


class Sampler:
    def __init__(self, client: Client, sampling_session_id: str, seed: int = 0):
        self._client, self._id, self._seq = client, sampling_session_id, 0
        self._random = random.Random(seed)

    async def sample(self, max_tokens: int, num_samples: int = 1, prompt_tokens: int = 32) -> None:
        self._seq += 1
        tokens = [self._random.randrange(2, VOCABULARY) for _ in range(prompt_tokens)]
        await self._client.call(
            "asample",
            {
                "sampling_session_id": self._id,
                "seq_id": self._seq,
                "num_samples": num_samples,
                "prompt": {"chunks": [{"type": "encoded_text", "tokens": tokens}]},
                "sampling_params": {"max_tokens": max_tokens, "temperature": 1.0, "stop": [], "seed": self._seq},
                "type": "sample",
            },
        )


async def seconds(work: Callable[[], Awaitable[Any]]) -> float:
    started = time.perf_counter()
    await work()
    return time.perf_counter() - started


async def median_seconds(work: Callable[[], Awaitable[Any]], repeats: int) -> float:
    return statistics.median([await seconds(work) for _ in range(repeats)])


async def at_once(work: Callable[[], Awaitable[Any]], total: int, in_flight: int) -> None:
    """Run `total` calls with bounded concurrency."""
    left = iter(range(total))

    async def worker() -> None:
        for _ in left:
            await work()

    await asyncio.gather(*(worker() for _ in range(in_flight)))


Row = tuple[str, str, str]
TRAINED = 32 * 128
"""Tokens of a training request: rows x tokens a row."""


class Benchmark:
    """Measurements in this order, each with the models that the previous ones made."""

    def __init__(self, client: Client, base_model: str, server: psutil.Process, *, quick: bool):
        self._client, self._base_model, self._server = client, base_model, server
        self._scale, self._repeats = (1, 3) if quick else (4, 7)
        self.rows: list[Row] = []

    async def run(self) -> list[Row]:
        tenant = await self.models()
        await self.calls(tenant)
        await self.training(tenant)
        sampler = Sampler(self._client, await tenant.sampler())
        await sampler.sample(4)
        await self.sampling(sampler)
        await self.many_samples(sampler)
        await self.weights(tenant)
        everyone = [self._server, *self._server.children(recursive=True)]
        self._add("memory of the server's processes", "MB", sum(each.memory_info().rss for each in everyone) / 1e6)
        return self.rows

    async def models(self) -> Tenant:
        self._add("create_model, the first", "s", await seconds(self._tenant))
        self._add("create_model", "s", await median_seconds(self._tenant, self._repeats))
        return await self._tenant()

    async def calls(self, tenant: Tenant) -> None:
        self._add("first step 1 x 32 tokens", "s", await seconds(lambda: tenant.train(1, 1, 32)))
        session = await self._client.session()

        async def beat() -> None:
            await self._client.post("session_heartbeat", {"session_id": session, "type": "session_heartbeat"})

        num_beats = 1000 * self._scale
        self._add("heartbeats, 16 in flight", "1/s", num_beats / await seconds(lambda: at_once(beat, num_beats, 16)))
        await self._median_ms("step 1 x 32 tokens, p50", lambda: tenant.train(1, 1, 32))
        await self._median_ms("forward 1 x 32 tokens, p50", lambda: tenant.run_pass(1, 32, forward_only=True))

    async def training(self, tenant: Tenant) -> None:
        steps = 2 * self._scale
        await tenant.train(1)
        for how, train in (("waiting for each call", tenant.train), ("ahead", tenant.train_ahead)):
            took = await seconds(lambda train=train: train(steps))
            self._add(f"train 32 x 128, {how}", "tokens/s", steps * TRAINED / took)
        took = await median_seconds(lambda: tenant.run_pass(32, 128, forward_only=True), self._repeats)
        self._add("forward 32 x 128", "tokens/s", TRAINED / took)
        for count in (4, 16):
            tenants = [await self._tenant() for _ in range(count)]

            async def all_train(tenants: list[Tenant] = tenants) -> None:
                await asyncio.gather(*(each.train(1, 8) for each in tenants))

            await all_train()
            took = await median_seconds(all_train, self._repeats)
            self._add(f"train 8 x 128 each, {count} tenants", "tokens/s", count * 8 * 128 / took)

    async def sampling(self, sampler: Sampler) -> None:
        await self._median_ms("one sample of 64 tokens, p50", lambda: sampler.sample(64))
        await self._median_ms("one sample of 1 token, p50", lambda: sampler.sample(1))
        for num_samples in (16, 64):
            took = await median_seconds(lambda n=num_samples: sampler.sample(64, n), self._repeats)
            self._add(f"one request of {num_samples} x 64 tokens", "tokens/s", num_samples * 64 / took)

    async def many_samples(self, sampler: Sampler) -> None:
        took = await median_seconds(lambda: at_once(lambda: sampler.sample(64), 32, 32), self._repeats)
        self._add("32 requests of 64 tokens at once", "tokens/s", 32 * 64 / took)
        num_requests = 500 * self._scale
        took = await seconds(lambda: at_once(lambda: sampler.sample(1), num_requests, 200))
        self._add("requests of 1 token, 200 in flight", "1/s", num_requests / took)
        for count in (4, 16):
            samplers = [Sampler(self._client, await (await self._tenant()).sampler(), i) for i in range(count)]

            async def all_sample(samplers: list[Sampler] = samplers) -> None:
                await asyncio.gather(*(at_once(lambda s=each: s.sample(64), 8, 8) for each in samplers))

            await all_sample()
            took = await median_seconds(all_sample, 3)
            self._add(f"8 requests of 64 tokens each, {count} tenants", "tokens/s", count * 8 * 64 / took)

    async def weights(self, tenant: Tenant) -> None:
        self._add("weights to a sampler, p50", "s", await median_seconds(tenant.sampler, self._repeats))
        names = iter(range(10**6))
        took = await median_seconds(lambda: tenant.save_state(f"s{next(names)}"), self._repeats)
        self._add("save_state, p50", "s", took)

        async def iteration() -> None:
            fresh = Sampler(self._client, await tenant.sampler())
            await asyncio.gather(*(fresh.sample(64, 16) for _ in range(16)))
            await tenant.train(1)

        self._add("RL iteration: sync, 16 x 16 samples of 64, step", "s", await median_seconds(iteration, 3))

    async def _tenant(self) -> Tenant:
        return await Tenant.new(self._client, self._base_model)

    async def _median_ms(self, name: str, call: Callable[[], Awaitable[Any]]) -> None:
        self._add(name, "ms", 1e3 * await median_seconds(call, 5 * self._repeats))

    def _add(self, name: str, unit: str, value: float) -> None:
        self.rows.append((name, unit, f"{value:,.3g}" if value < 100 else f"{value:,.0f}"))
        print(f"  {name}: {self.rows[-1][2]} {unit}", file=sys.stderr, flush=True)


async def measure_speed(url: str, base_model: str, process: psutil.Process, *, quick: bool) -> list[Row]:
    connections = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connections, timeout=aiohttp.ClientTimeout(total=300)) as http:
        return await Benchmark(Client(http, url), base_model, process, quick=quick).run()


# ---- load

SDK_ENVIRONMENTS = Path(os.environ.get("TX_SDK_ENVS") or Path.home() / ".cache" / "skyrl-tx" / "sdk")
PROBE_SECONDS, MEMORY_SECONDS, PROGRESS_SECONDS = 0.1, 1.0, 15.0
LAST_WORDS_SECONDS = 300
"""Time that clients have to finish at the end."""
EXPECTED = {("408", "retrieve_future"), ("410", "session_heartbeat")}
"""Answers that are no error: a poll without a result yet, a heartbeat that comes just after its session's end."""
_REQUESTS = re.compile(r"^tx_http_requests_total\{(.*)\} (\S+)$", re.MULTILINE)


@dataclass
class Seen:
    """External observations while the clients ran.

    Attributes:
        heartbeats: seconds from the due time of each to its response
        lost: heartbeats without status 200
        memory: (seconds since the start, bytes by process: `api`, `engine` with its standby)
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


async def measure_load(url: str, api: psutil.Process, model: Path, options: argparse.Namespace) -> Report:
    seconds = 60 * options.minutes
    with clients(url, model, options, seconds) as running:
        seen = await watch(url, api, seconds)
        outputs = [await asyncio.to_thread(process.communicate, timeout=LAST_WORDS_SECONDS) for process in running]
    async with aiohttp.ClientSession() as http, http.get(f"{url}/metrics") as answer:
        answers = requests_answered(await answer.text())
    said = [json.loads(output.splitlines()[-1]) for output, _ in outputs]
    done = sum((Counter(each["done"]) for each in said), Counter())
    return Report(seen, answers, done, [error for each in said for error in each["errors"]], said[0]["sdk"])


def load_rows(report: Report, options: argparse.Namespace) -> list[tuple[str, str]]:
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


def run_speed(options: argparse.Namespace) -> int:
    load_before = os.getloadavg()[0]
    found: dict[str, list[Row]] = {}
    for size in options.models:
        print(size, file=sys.stderr)
        with tempfile.TemporaryDirectory(prefix="tinker_server_") as name:
            model = Path(name) / "model"
            make_word_model(model, context=CONTEXT, **SIZES[size])
            with server(model, Path(name)) as (url, process):
                found[size] = asyncio.run(measure_speed(url, str(model), process, quick=options.quick))
    lines = zip(*found.values(), strict=True)
    print_table(["", "unit", *found], ([*line[0][:2], *(cell for *_, cell in line)] for line in lines))
    print(f"\n{describe_machine(load_before=load_before)}")
    return 0


def run_load(options: argparse.Namespace) -> int:
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="tinker_load_") as name:
        model = Path(name) / "model"
        make_word_model(model, context=CONTEXT, **SIZES["tiny"])
        with server(model, Path(name)) as (url, api):
            report = asyncio.run(measure_load(url, api, model, options))
    header = f"{options.clients} clients, SDK {report.sdk}, {options.minutes:g} minutes"
    print_table([header, ""], load_rows(report, options))
    print(f"\n{describe_machine(load_before=load_before)}")
    broken = broken_claims(report, options)
    for claim in broken:
        print(f"BROKEN: {claim}")
    return int(bool(broken))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    speed = commands.add_parser("speed")
    speed.add_argument("--models", nargs="+", choices=list(SIZES), default=list(SIZES))
    speed.add_argument("--quick", action="store_true", help="does it run at all")
    speed.set_defaults(run=run_speed)
    load = commands.add_parser("load")
    load.add_argument("--clients", type=int, default=64)
    load.add_argument("--processes", type=int, default=4, help="that the clients are spread over")
    load.add_argument("--minutes", type=float, default=10)
    load.add_argument("--warm-up-seconds", type=float, default=60, help="growth of memory counts from there")
    load.add_argument("--max-heartbeat-seconds", type=float, default=1, help="of 99 in 100")
    load.add_argument("--max-growth-percent", type=float, default=5, help="of the memory of API and engine together")
    load.add_argument(
        "--sdk-python",
        type=Path,
        default=SDK_ENVIRONMENTS / "0.38.0" / "bin" / "python",
        help="made by scripts/sdk_envs.sh",
    )
    load.set_defaults(run=run_load)
    options = parser.parse_args()
    if options.run is run_load:
        if not options.sdk_python.exists():
            parser.error(f"--sdk-python: there is no {options.sdk_python}; run scripts/sdk_envs.sh")
        if options.warm_up_seconds >= 60 * options.minutes:
            parser.error("--warm-up-seconds must be less than --minutes")
    return options.run(options)


if __name__ == "__main__":
    sys.exit(main())

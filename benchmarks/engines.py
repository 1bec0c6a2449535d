"""Throughput of every installed rollout engine in tokens per second, and the cost of the layers above it, in one run.

    python benchmarks/engines.py                                    # quiet machine; half an hour on two cores
    python benchmarks/engines.py --engines native vllm --batch-sizes 64 --turns 3 --skip-layers
    python benchmarks/engines.py --quick                            # does it run at all

Part 1: each engine behind our interface, in a process of its own with one thread and one core (the same core: they take
turns, so that whatever else the machine does hits all alike), the same random Qwen3 of 3.3 million parameters in
float32, made here, and the same work: distinct random prompts, sampled at temperature 1, no end-of-sequence.

Part 2: one engine in a Ray process, asked for the same number of answers at each of its layers in turn: vLLM's own
`AsyncLLM`, our engine around it, the client through Ray, the HTTP endpoint with a load generator in another process.

Medians over turns, smallest and largest, and CPU seconds of all processes of an engine for 1,000 tokens, because wall
time on a shared machine says little. Ratios are of the same turn. Comes out as markdown.
"""

import argparse
import asyncio
import cProfile
import io
import json
import os
import platform
import pstats
import queue
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil

from skyrl_train.inference_engines.ray_wrapped_inference_engine import (
    EngineProcess,
    RayWrappedInferenceEngine,
    engine_actor,
)

RESULT = "RESULT "
START_TIMEOUT = 900
TURN_TIMEOUT = 1200
VOCABULARY = 512
FIRST_WORD = 2
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
    cpu: list[dict[str, float]] = field(default_factory=list)
    """CPU seconds by process, one entry a turn."""

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.num_tokens / statistics.median(self.wall)

    @property
    def rates(self) -> str:
        return f"{self.rate:,.0f} ({self.num_tokens / max(self.wall):,.0f} - {self.num_tokens / min(self.wall):,.0f})"

    def cpu_per_1000(self, process: str | None = None) -> float:
        """CPU seconds for 1,000 tokens, of one process or of all."""
        seconds = [sum(by.values()) if process is None else by.get(process, 0.0) for by in self.cpu]
        return statistics.median(seconds) / self.num_tokens * 1000

    def over(self, other: "Turns") -> str:
        """Ratio of the times of this to the other's in the same turn."""
        ratios = [own / its for own, its in zip(self.wall, other.wall, strict=True)]
        return f"{statistics.median(ratios):.3f} ({min(ratios):.2f} - {max(ratios):.2f})"


# ---- what all of them answer with


def make_model(folder: str) -> None:
    """3.3 million parameters (hidden 256, 4 layers, vocabulary 512) and a tokenizer of a word a token."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    words = ["<pad>", "<end>", *(f"w{number}" for number in range(VOCABULARY - FIRST_WORD))]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>").save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
        dtype="float32",
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


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
    output = await engine.generate({"prompt_token_ids": work.prompts(), "sampling_params": work.sampling()})
    assert (output["response_logprobs"] is not None) == work.logprobs
    return sum(map(len, output["response_ids"]))


async def generate_one_by_one(engine: Any, work: Work) -> int:
    """Tokens written, asked for in a call for each prompt, as rollouts do."""

    async def one(prompt: list[int]) -> int:
        output = await engine.generate({"prompt_token_ids": [prompt], "sampling_params": work.sampling()})
        return len(output["response_ids"][0])

    return sum(await asyncio.gather(*map(one, work.prompts())))


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


# ---- part 1: engines


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
                            turns.cpu.append({"all": result["cpu"]})
    finally:
        for worker in workers:
            worker.close()
    return found


def engines_table(backends: Sequence[str], found: dict[Key, Turns], batches: Sequence[int]) -> str:
    """Format tokens per second and CPU seconds per 1,000 tokens of each engine, and the speed-up of native."""
    others = [name for name in backends if name != "native"] if "native" in backends else []
    header = ["batch", "log-probs"]
    for name in backends:
        header += [f"{name} tokens/s (min - max)", "CPU s / 1,000"]
    header += [f"native / {name}: speed" for name in others]
    lines = ["| " + " | ".join(header) + " |", "|---:|---|" + "---:|" * (len(header) - 2)]
    for batch in batches:
        for logprobs in (True, False):
            cells = [str(batch), "yes" if logprobs else "no"]
            for name in backends:
                turns = found[name, batch, logprobs]
                cells += [turns.rates, f"{turns.cpu_per_1000():.3f}"]
            cells += [found[name, batch, logprobs].over(found["native", batch, logprobs]) for name in others]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


# ---- part 2: layers

RAW = "vLLM's AsyncLLM"
ENGINE, ENGINE_ONE_BY_ONE = "our engine, one call", "our engine, a call a prompt"
CLIENT, CLIENT_ONE_BY_ONE = "client and Ray, one call", "client and Ray, a call a prompt"
ENDPOINT = "HTTP endpoint, a request a prompt"
LAYER_BELOW = {
    ENGINE: RAW,
    ENGINE_ONE_BY_ONE: RAW,
    CLIENT: ENGINE,
    CLIENT_ONE_BY_ONE: ENGINE_ONE_BY_ONE,
    ENDPOINT: CLIENT_ONE_BY_ONE,
}


class MeasuredProcess(EngineProcess):
    """The process of an engine, with a watch inside."""

    def __init__(self, backend: str, folder: str, log_file: str):
        super().__init__(lambda: make_engine(backend, folder), log_file)
        self._inner: Any = self._engine
        self._profile: cProfile.Profile | None = None

    async def timed(self, layer: str, work: Work) -> tuple[int, float]:
        """Tokens and seconds of a layer that is inside this process."""
        began = time.perf_counter()
        if layer == "raw":
            tokens = await self._inner._loop.call(self._raw(work))  # vLLM belongs to the loop of our engine
        else:
            tokens = await (generate if layer == "engine" else generate_one_by_one)(self._engine, work)
        return tokens, time.perf_counter() - began

    async def _raw(self, work: Work) -> int:
        """vLLM's engine asked as cheaply as it can be: tokens in, tokens out, in one piece."""
        from vllm import SamplingParams
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            max_tokens=work.num_new,
            temperature=1.0,
            ignore_eos=True,
            logprobs=0 if work.logprobs else None,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

        async def one(index: int, prompt: list[int]) -> int:
            tokens = 0
            name = f"raw-{time.monotonic_ns()}-{index}"
            async for output in self._inner._llm.generate(tokens_input(prompt), params, name):
                tokens = len(output.outputs[0].token_ids)
            return tokens

        return sum(await asyncio.gather(*(one(index, prompt) for index, prompt in enumerate(work.prompts()))))

    async def cpu(self) -> dict[str, float]:
        """CPU seconds so far, by process."""
        own = psutil.Process()
        children = sum(cpu_seconds(child) for child in own.children(recursive=True))
        return {"engine process": cpu_seconds(own), "engine's children": children}

    async def profile(self, text: bool) -> str:
        """Begins to count where the engine's event loop spends its time, or says it."""
        if hasattr(self._inner, "_loop"):
            return await self._inner._loop.call(self._profiled(text))
        return await self._profiled(text)

    async def _profiled(self, text: bool) -> str:
        if not text:
            self._profile = cProfile.Profile()
            self._profile.enable()
            return ""
        assert self._profile is not None
        return as_text(self._profile)


def as_text(profile: cProfile.Profile) -> str:
    profile.disable()
    stream = io.StringIO()
    pstats.Stats(profile, stream=stream).sort_stats("tottime").print_stats(30)
    return stream.getvalue()


async def load_once(url: str, work: Work) -> tuple[int, float]:
    """Send every prompt as a request of its own at once. Returns: tokens, seconds to the last byte of the last
    response.
    """
    import aiohttp

    body = {**work.sampling(), "model": "policy", "return_token_ids": True, "logprobs": 0 if work.logprobs else None}
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:

        async def one(prompt: list[int]) -> bytes:
            async with session.post(f"{url}/completions", json={**body, "prompt": prompt}) as response:
                answer = await response.read()
                if response.status != 200:
                    raise SystemExit(f"the endpoint answered {response.status}: {answer[:500]!r}")
                return answer

        began = time.perf_counter()
        answers = await asyncio.gather(*map(one, work.prompts()))
        seconds = time.perf_counter() - began
    return sum(json.loads(answer)["usage"]["completion_tokens"] for answer in answers), seconds


def work_as_load() -> None:
    """A worker: URL and job in, tokens and seconds out."""
    for line in sys.stdin:
        job = json.loads(line)
        tokens, seconds = asyncio.run(load_once(job["url"], Work(**job["work"])))
        print(RESULT + json.dumps([tokens, seconds]), flush=True)


class Layers:
    """One engine in a Ray process, the client over it and the endpoint over that.

    Args:
        actor: a `MeasuredProcess`.
        load: a process that runs `work_as_load`.
    """

    def __init__(self, backend: str, actor: Any, client: Any, url: str, load: asyncio.subprocess.Process):
        self.actor, self._client, self._url, self._load = actor, client, url, load
        self.layers: dict[str, Callable[[Work], Awaitable[tuple[int, float]]]] = {
            RAW: lambda work: self.inside("raw", work),
            ENGINE: lambda work: self.inside("engine", work),
            ENGINE_ONE_BY_ONE: lambda work: self.inside("engine one by one", work),
            CLIENT: lambda work: self.outside(generate, work),
            CLIENT_ONE_BY_ONE: lambda work: self.outside(generate_one_by_one, work),
            ENDPOINT: self.endpoint,
        }
        if backend != "vllm":
            del self.layers[RAW]

    async def inside(self, layer: str, work: Work) -> tuple[int, float]:
        return await self.actor.timed.remote(layer, work)

    async def outside(self, ask: Callable[[Any, Work], Awaitable[int]], work: Work) -> tuple[int, float]:
        began = time.perf_counter()
        tokens = await ask(self._client, work)
        return tokens, time.perf_counter() - began

    async def endpoint(self, work: Work) -> tuple[int, float]:
        assert self._load.stdin is not None
        assert self._load.stdout is not None
        self._load.stdin.write(json.dumps({"url": self._url, "work": vars(work)}).encode() + b"\n")
        while line := await asyncio.wait_for(self._load.stdout.readline(), TURN_TIMEOUT):
            if line.startswith(RESULT.encode()):
                tokens, seconds = json.loads(line.decode().removeprefix(RESULT))
                return tokens, seconds
        raise SystemExit("the load generator died; see its output above")

    async def cpu(self) -> dict[str, float]:
        load = cpu_seconds(psutil.Process(self._load.pid))
        return {**await self.actor.cpu.remote(), "driver": cpu_seconds(psutil.Process()), "load": load}


async def measure_layers(backend: str, options: argparse.Namespace, folder: str) -> tuple[dict[str, Turns], str]:
    """Turns by layer, and profiles if they are asked for."""
    import ray
    from transformers import AutoTokenizer

    from skyrl_train.config import SkyRLConfig
    from skyrl_train.inference_engines.inference_engine_client import InferenceEngineClient
    from skyrl_train.inference_engines.openai_api.server import EndpointServer
    from skyrl_train.utils import initialize_ray

    os.environ.update(OMP_NUM_THREADS="1", VLLM_CPU_KVCACHE_SPACE="1")
    trainer = {"policy": {"model": {"path": folder}}, "placement": {"device": "cpu"}, "run_dir": folder}
    cfg = SkyRLConfig.from_dict({"trainer": trainer, "generator": {"backend": backend}})
    initialize_ray(cfg)
    log_file = os.path.join(folder, "layers.log")
    actor: Any = engine_actor(MeasuredProcess, num_cpus=1, max_concurrency=1000).remote(backend, folder, log_file)
    engine = RayWrappedInferenceEngine(actor, "engine 0", log_file, TURN_TIMEOUT, start_timeout_seconds=START_TIMEOUT)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    client = InferenceEngineClient([engine], tokenizer, cfg)
    server = EndpointServer(client, tokenizer, "policy")
    load = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "--worker", "load", stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    found: dict[str, Turns] = {}
    profiles: list[str] = []
    try:
        await engine.describe()
        await server.start()
        layers = Layers(backend, actor, client, server.url, load)
        for turn in range(options.turns + 1):
            names = list(layers.layers)
            for name in names if turn % 2 else names[::-1]:
                seed = turn * len(names) + names.index(name)
                work = Work(options.layers_batch, options.num_prompt, options.num_new, seed)
                cpu = await layers.cpu()
                tokens, seconds = await layers.layers[name](work)
                assert tokens == work.num_tokens, f"{name} gave {tokens} of {work.num_tokens} tokens"
                if turn:
                    after = await layers.cpu()
                    turns = found.setdefault(name, Turns(work.num_tokens))
                    turns.wall.append(seconds)
                    turns.cpu.append({process: after[process] - cpu[process] for process in after})
        if options.profile:
            profiles = [await profile_of(layers, name, options) for name in layers.layers]
    finally:
        await server.stop()
        await client.teardown()
        load.kill()
        await load.wait()
        ray.shutdown()
    return {name: found[name] for name in layers.layers}, "\n".join(profiles)


async def profile_of(layers: Layers, name: str, options: argparse.Namespace) -> str:
    """Profile a layer in the engine's process and in this one."""
    work = Work(options.layers_batch, options.num_prompt, options.num_new, -1)
    own = cProfile.Profile()
    await layers.actor.profile.remote(False)
    own.enable()
    await layers.layers[name](work)
    here = as_text(own)
    return f"=== {name}: engine's event loop\n{await layers.actor.profile.remote(True)}\n=== {name}: driver\n{here}"


def layers_table(found: dict[str, Turns]) -> str:
    """Each layer beside the one below it and beside the innermost; CPU seconds by process."""
    processes = list(dict.fromkeys(process for turns in found.values() for by in turns.cpu for process in by))
    innermost = next(iter(found.values()))
    header = ["layer", "tokens/s (min - max)", "time / innermost", "time / layer below"]
    header += [f"CPU s / 1,000: {process}" for process in processes]
    lines = ["| " + " | ".join(header) + " |", "|---|" + "---:|" * (len(header) - 1)]
    for name, turns in found.items():
        below = found.get(LAYER_BELOW.get(name, ""))
        cells = [name, turns.rates, turns.over(innermost), turns.over(below) if below else ""]
        cells += [f"{turns.cpu_per_1000(process):.3f}" for process in processes]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


# ---- all of it


def machine(load_before: float) -> str:
    packages = [name for name in ("torch", "transformers", "ray") if find_spec(name) is not None]
    versions = [f"{name} {version(name)}" for name in packages]
    if find_spec("vllm") is not None:
        import vllm

        versions.append(f"vllm {vllm.__version__}")
    command = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False).stdout
    return (
        f"{os.cpu_count()} CPUs ({cpu_name()}), Python {platform.python_version()}, {', '.join(versions)}, commit "
        f"{commit.strip() or 'unknown'}. Load average {load_before:.1f} before, {os.getloadavg()[0]:.1f} after."
    )


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", choices=BACKENDS, help="default: those that are installed")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--num-prompt", type=int, default=64, help="tokens a prompt")
    parser.add_argument("--num-new", type=int, default=128, help="new tokens a prompt")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--layers", choices=["vllm", "native"], help="the engine of part 2; default: vllm if installed")
    parser.add_argument("--layers-batch", type=int, default=64)
    parser.add_argument("--skip-engines", action="store_true", help="part 2 alone")
    parser.add_argument("--skip-layers", action="store_true", help="part 1 alone")
    parser.add_argument("--profile", action="store_true", help="part 2: print where each layer spends its time as well")
    parser.add_argument("--quick", action="store_true", help="a few tokens of everything: figures mean nothing")
    parser.add_argument("--worker", choices=[*BACKENDS, "load"], help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.batch_sizes, options.num_prompt, options.num_new, options.turns = [1, 4], 8, 8, 1
        options.layers_batch = 4
    if max(options.batch_sizes) > MAX_BATCH:
        parser.error(f"--batch-sizes must be at most {MAX_BATCH}; got {max(options.batch_sizes)}")
    return options


def main() -> None:
    options = parse_arguments()
    if options.worker == "load":
        return work_as_load()
    if options.worker:
        return work_as_engine(options.worker, options.model)
    backends = options.engines or installed(BACKENDS)
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="engines-") as folder:
        make_model(folder)
        print(
            f"{options.num_prompt} prompt + {options.num_new} new tokens, float32, one thread an engine, medians of "
            f"{options.turns} turns (smallest - largest).\n"
        )
        if not options.skip_engines:
            print(engines_table(backends, measure_engines(backends, options, folder), options.batch_sizes) + "\n")
        if not options.skip_layers:
            backend = options.layers or ("vllm" if find_spec("vllm") is not None else "native")
            found, profiles = asyncio.run(measure_layers(backend, options, folder))
            print(f"Layers over {backend}, batch {options.layers_batch}, with log-probs:\n\n{layers_table(found)}\n")
            print(profiles)
    print(machine(load_before))


if __name__ == "__main__":
    main()

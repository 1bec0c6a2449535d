"""Throughput and latency of the retrieval server: one client, requests of many queries, 64 clients.

    python benchmarks/retrieval.py [--documents 20000] [--seconds 5]

The server is a separate process over documents generated here (Zipf-distributed words, 60 a document); the clients are
threads of this process, so they share its cores and are part of what is measured. BM25 makes its real index. The dense
index has random vectors and a random model of the size of MiniLM (6 layers, width 384): as fast as real ones, since
neither what it reads nor what it finds changes the work.
"""

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from benchmark_tools import describe_machine, print_table

NUM_WORDS = 50_000
WORDS_PER_DOCUMENT = 60
WORDS_PER_QUERY = 8
BATCH = 64
CLIENTS = 64
WIDTH = 384
START_SECONDS = 600

Query = Callable[[], str]


@dataclass
class Result:
    """Measurements of one way of sending queries."""

    server: str
    asked: str
    queries_per_second: float
    server_cpu_seconds: float
    """CPU seconds per query of all workers together: the figure that a busy machine changes least."""
    seconds: list[float]
    """Duration of each request."""

    def percentile(self, percent: int) -> float:
        ordered = sorted(self.seconds)
        return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]

    def row(self) -> list[str]:
        times = [f"{1000 * self.percentile(percent):.1f}" for percent in (50, 95)]
        cpu = f"{1000 * self.server_cpu_seconds:.2f}"
        return [self.server, self.asked, f"{self.queries_per_second:.0f}", *times, cpu]


def make_words() -> tuple[list[str], list[float]]:
    """Words, and their cumulative weights by Zipf's law."""
    weights, total = [], 0.0
    for rank in range(1, NUM_WORDS + 1):
        total += 1 / rank
        weights.append(total)
    return [f"w{number:x}" for number in range(NUM_WORDS)], weights


def make_corpus(file: Path, num_documents: int, seed: int = 0) -> Query:
    """Writes documents. Returns what makes queries of words that one of them has."""
    generator = random.Random(seed)
    words, weights = make_words()
    texts = [
        " ".join(generator.choices(words, cum_weights=weights, k=WORDS_PER_DOCUMENT)) for _ in range(num_documents)
    ]
    file.write_text("".join(json.dumps({"id": str(number), "text": text}) + "\n" for number, text in enumerate(texts)))
    return lambda: " ".join(generator.sample(generator.choice(texts).split(), WORDS_PER_QUERY))


def make_model(folder: Path) -> None:
    """A sentence-transformers model of 6 layers and width 384 with random weights."""
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    vocabulary = {word: number for number, word in enumerate(["[PAD]", "[UNK]", *make_words()[0]])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")
    wrapped.save_pretrained(folder / "bert")
    torch.manual_seed(0)
    shape = {"hidden_size": WIDTH, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 4 * WIDTH}
    BertModel(BertConfig(vocab_size=len(vocabulary), **shape)).save_pretrained(folder / "bert")
    layers = [Transformer(str(folder / "bert"), max_seq_length=128), Pooling(WIDTH, pooling_mode="mean")]
    SentenceTransformer(modules=layers, device="cpu").save(str(folder / "model"))


def make_vectors(file: Path, num_documents: int) -> None:
    """A flat faiss index of random vectors."""
    import faiss
    import numpy as np

    vectors_ND = np.random.default_rng(0).standard_normal((num_documents, WIDTH), dtype=np.float32)
    faiss.normalize_L2(vectors_ND)
    index = faiss.index_factory(WIDTH, "Flat", faiss.METRIC_INNER_PRODUCT)
    index.add(vectors_ND)
    faiss.write_index(index, str(file))


@contextmanager
def server(*arguments: object) -> Iterator[tuple[str, int]]:
    """A server process with one thread for each worker; its address and process id."""
    command = [sys.executable, "-m", "skyrl_gym.tools.retrieval", "--port", "0", *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment)
    assert process.stdout is not None
    try:
        url = re.findall(r"http://\S+/retrieve", process.stdout.readline())[0]
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                httpx.get(url.replace("/retrieve", "/health")).raise_for_status()
                break
            except httpx.TransportError as failure:
                if time.monotonic() > deadline or process.poll() is not None:
                    raise RuntimeError("the server did not start") from failure
                time.sleep(0.1)
        yield url, process.pid
    finally:
        process.terminate()
        process.wait(30)
        process.stdout.close()


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a process and its living children (Linux)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    own = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return own + sum(cpu_seconds(int(child)) for child in children)


def measure(name: str, url: str, pid: int, make_query: Query, seconds: float) -> list[Result]:
    """One way of asking after the other, each for some seconds."""
    with httpx.Client(limits=httpx.Limits(max_connections=None, max_keepalive_connections=256), timeout=120) as client:

        def ask(num_queries: int) -> float:
            queries = [make_query() for _ in range(num_queries)]
            started = time.perf_counter()
            client.post(url, json={"queries": queries, "topk": 3, "return_scores": True}).raise_for_status()
            return time.perf_counter() - started

        def keep_asking(num_queries: int, until: float) -> list[float]:
            taken = []
            while time.perf_counter() < until:
                taken.append(ask(num_queries))
            return taken

        def result(asked: str, num_clients: int, num_queries: int) -> Result:
            started, cpu_before = time.perf_counter(), cpu_seconds(pid)
            with ThreadPoolExecutor(num_clients) as threads:
                futures = [threads.submit(keep_asking, num_queries, started + seconds) for _ in range(num_clients)]
                taken = [value for future in futures for value in future.result()]
            elapsed, num_asked = time.perf_counter() - started, len(taken) * num_queries
            return Result(name, asked, num_asked / elapsed, (cpu_seconds(pid) - cpu_before) / num_asked, taken)

        for _ in range(20):
            ask(1)
        return [
            result("1 client, 1 query a request", 1, 1),
            result(f"1 client, {BATCH} queries a request", 1, BATCH),
            result(f"{CLIENTS} clients, 1 query a request", CLIENTS, 1),
        ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=20_000)
    parser.add_argument("--seconds", type=float, default=5, help="for each way of asking")
    parser.add_argument("--skip-dense", action="store_true")
    options = parser.parse_args()
    load_before = os.getloadavg()[0]
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        corpus = place / "corpus.jsonl"
        make_query = make_corpus(corpus, options.documents)
        words = ["--corpus", corpus, "--language", "none"]
        for workers in (1, 2):
            with server(*words, "--workers", workers) as running:
                results += measure(f"bm25, workers: {workers}", *running, make_query, options.seconds)
        if not options.skip_dense:
            make_model(place)
            make_vectors(place / "vectors.faiss", options.documents)
            dense = ["--index", "dense", "--index_path", place / "vectors.faiss", "--device", "cpu"]
            with server("--corpus", corpus, *dense, "--retriever_model", place / "model") as running:
                results += measure("dense, workers: 1", *running, make_query, options.seconds)
    header = ["server", "asked by", "queries/s", "p50 ms", "p95 ms", "server CPU ms a query"]
    print_table(header, (result.row() for result in results))
    versions = describe_machine("bm25s", "faiss-cpu", "uvicorn", "httpx", "numpy", load_before=load_before)
    print(f"\n{options.documents} documents; {versions}, the benchmark's own load included")


if __name__ == "__main__":
    main()

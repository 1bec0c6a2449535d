"""The retrieval server: what it answers, in this process and as a process of its own."""

import asyncio
import gzip
import json
import logging
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import pytest

pytest.importorskip("bm25s", reason="needs the retrieval extra")
pytest.importorskip("uvicorn", reason="needs the retrieval extra")
pytest.importorskip("fastapi", reason="needs the retrieval extra")

import skyrl_gym
from skyrl_gym.envs.search.examples import EXAMPLE_DOCUMENTS
from skyrl_gym.tools.retrieval import RetrievalServer
from skyrl_gym.tools.retrieval.batching import Batcher, Overloaded

START_SECONDS = 120


@pytest.fixture(scope="module")
def server() -> Iterator[RetrievalServer]:
    with RetrievalServer(EXAMPLE_DOCUMENTS) as running:
        yield running


@contextmanager
def process(*arguments: object, port: int = 0) -> Iterator[tuple[subprocess.Popen, str]]:
    """`python -m skyrl_gym.tools.retrieval`, when it answers; and its address."""
    command = [sys.executable, "-m", "skyrl_gym.tools.retrieval", "--port", str(port), *map(str, arguments)]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert running.stdout is not None
    try:
        assert select.select([running.stdout], [], [], START_SECONDS)[0], "no index within the time"
        line = running.stdout.readline()
        base_url = re.findall(r"(http://\S+)/retrieve", line)[0]
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                assert httpx.get(f"{base_url}/health").json()["ready"]
                break
            except httpx.TransportError:  # it does not listen before it can answer
                assert time.monotonic() < deadline and running.poll() is None
                time.sleep(0.05)
        yield running, base_url
    finally:
        running.terminate()
        try:
            running.wait(20)
        finally:
            running.kill()
            running.wait(5)
            running.stdout.close()


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps(document) + "\n" for document in EXAMPLE_DOCUMENTS))
    return path


def test_each_query_returns_documents_with_optional_scores(server):
    def groups(**body):
        return httpx.post(server.url, json=body).json()["result"]

    ((hit,),) = groups(query="Quillmere", topk=1, return_scores=True)
    assert set(hit) == {"document", "score"} and hit["score"] > 0
    assert hit["document"]["contents"] == f'"{hit["document"]["title"]}"\n{hit["document"]["text"]}'
    assert groups(query="thornfish colour", topk=1)[0][0]["id"] == "thornfish"
    found = groups(queries=["thornfish", "elephant", "Kite Week"], topk=1)  # in their order
    assert [[document["id"] for document in group] for group in found] == [["thornfish"], [], ["kite-week"]]
    assert len(groups(query="Quillmere Dathe Tessaly")[0]) == 3  # unless asked
    health = httpx.get(f"{server.base_url}/health").json()
    assert health == {"ready": True, "index": "bm25", "documents": len(EXAMPLE_DOCUMENTS)}


def test_body_without_content_length_is_bounded(server):
    chunks = (b"x" * (1 << 20) for _ in range(5))
    response = httpx.post(server.url, content=chunks, headers={"Content-Type": "application/json"})
    assert response.status_code == 413 and "Too Large" in response.json()["detail"]


@pytest.mark.parametrize(
    "body, status, text",
    [
        ({}, 422, "pass either query"),
        ({"query": "a", "queries": ["b"]}, 422, "pass either query"),
        ({"query": " \n"}, 422, "query: .*at least 1 character"),
        ({"queries": ["fine", ""]}, 422, "queries.1: .*at least 1 character"),
        ({"queries": []}, 422, "1 to 512 strings; it contains 0"),
        ({"queries": ["a"] * 513}, 422, "it contains 513"),
        ({"query": "x" * 8193}, 422, "8193 characters; 8192 are allowed"),
        ({"query": "a", "topk": 0}, 422, "topk: .*greater than or equal to 1"),
        ({"query": "a", "topk": 101}, 422, "topk must be 1 to 100; got 101"),
        ({"query": "a", "topk": "many"}, 422, "topk: .*integer"),
        ({"query": "a", "top_k": 3}, 422, "top_k: .*not permitted"),
        ({"query": 5}, 422, "query: .*string"),
        ({"query": "x" * (5 << 20)}, 413, "Too Large"),
    ],
)
def test_invalid_request_error_names_rule(server, body, status, text):
    response = httpx.post(server.url, json=body)
    assert response.status_code == status and re.search(text, response.text)


@pytest.mark.parametrize(
    "text, status",
    [
        (r'"\u0000Quillmere"', 200),
        (r'"\ud83d\ude00 Quillmere"', 200),
        (r'"\ud800 Quillmere"', 422),  # half of a surrogate pair
        ("5 Quillmere", 422),
    ],
)
def test_odd_texts_are_searched_or_rejected_without_server_error(server, text, status):
    body = b'{"query": %s, "topk": 1}' % text.encode()
    response = httpx.post(server.url, content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == status
    assert status != 200 or len(response.json()["result"][0]) == 1


def test_responses_on_reused_connection_have_no_ack_delay(server):
    with httpx.Client() as client:
        client.post(server.url, json={"query": "Quillmere"})
        seconds = []
        for _ in range(10):
            started = time.perf_counter()
            client.post(server.url, json={"query": "Quillmere"})
            seconds.append(time.perf_counter() - started)
    assert min(seconds) < 0.03  # a delayed acknowledgement takes 0.04 s, every time


def test_server_can_restart_at_same_address():
    server = RetrievalServer(["An owl hoots."])
    with server:
        address = server.url
    with pytest.raises(httpx.ConnectError):
        httpx.post(address, json={"query": "owl"})
    with server:
        assert server.url == address
        assert len(httpx.post(address, json={"query": "owl"}).json()["result"][0]) == 1
        with pytest.raises(OSError, match="in use"):
            RetrievalServer(["x"], port=server.port).start()
    server.stop()


class RecordingSearch:
    """Slow search that answers each query with its length and records which queries came together."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []

    def __call__(self, queries: Sequence[str], topk: int) -> list[list[int]]:
        time.sleep(0.05)
        self.batches.append(list(queries))
        if "bad" in queries:
            raise RuntimeError("a bad query")
        return [[len(query)] * topk for query in queries]


async def test_queries_during_search_are_batched():
    search = RecordingSearch()
    batcher = Batcher(search, batch_size=4)
    task = asyncio.create_task(batcher.run())
    first = asyncio.create_task(batcher.search(["a"], 1))
    await asyncio.sleep(0.01)
    others = [asyncio.create_task(batcher.search(["b" * number], number)) for number in range(1, 7)]
    assert await first == [[1]]
    assert [await other for other in others] == [[[number] * number] for number in range(1, 7)]
    assert search.batches == [["a"], ["b", "bb", "bbb", "bbbb"], ["bbbbb", "bbbbbb"]]
    task.cancel()


async def test_search_failure_affects_only_current_batch():
    batcher = Batcher(RecordingSearch(), batch_size=4)
    task = asyncio.create_task(batcher.run())
    with pytest.raises(RuntimeError, match="a bad query"):
        await batcher.search(["bad"], 1)
    assert await batcher.search(["ok"], 1) == [[2]]
    task.cancel()


async def test_full_queue_is_rejected_and_cancelled_query_is_skipped():
    search = RecordingSearch()
    batcher = Batcher(search, batch_size=4, max_waiting=2)
    gone, stays = (asyncio.create_task(batcher.search([query], 1)) for query in ("gone", "stays"))
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="2 queries are waiting"):
        await batcher.search(["third"], 1)
    gone.cancel()
    task = asyncio.create_task(batcher.run())
    assert await stays == [[5]]
    assert search.batches == [["stays"]]
    task.cancel()


def test_64_environments_search_concurrently_without_log_output(corpus, caplog):
    caplog.set_level(logging.WARNING)
    ready = threading.Barrier(64)

    with process("--corpus", corpus) as (_, base_url):

        def episode(number: int) -> float:
            extras = {"reward_spec": {"ground_truth": {"target": "Hask"}}, "max_turns": 9}
            env = skyrl_gym.make("search", env_config={"search_url": f"{base_url}/retrieve"}, extras=extras)
            env.init([])
            ready.wait(60)
            for turn in range(5):
                text = env.step(f"<search>Tauben {number} {turn}</search>")["observations"][0]["content"]
                assert "village of Hask" in text
            reward = env.step("<answer>Hask</answer>")["reward"]
            env.close()
            return reward

        with ThreadPoolExecutor(64) as threads:
            assert list(threads.map(episode, range(64))) == [1.0] * 64
    assert caplog.records == []


@pytest.mark.slow
def test_sigterm_drains_request_and_stops_workers(corpus):
    with process("--corpus", corpus, "--workers", 2) as (running, base_url):
        with httpx.Client() as client:
            used = client.post(f"{base_url}/retrieve", json={"query": "Quillmere", "topk": 1})
            assert used.json()["result"][0][0]["title"]
            started = time.monotonic()
            running.send_signal(signal.SIGTERM)
            assert running.wait(10) == 0
            assert time.monotonic() - started < 5
        port = int(base_url.rpartition(":")[2])
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=2)


@pytest.mark.parametrize(
    "arguments, text",
    [
        (["--corpus", "no/such.jsonl"], "no/such.jsonl"),
        ([], "a corpus"),
        (["--corpus", "corpus.jsonl", "--language", "klingon"], "language must be none or one of"),
    ],
)
def test_start_errors_are_single_line(corpus, arguments, text):
    command = [sys.executable, "-m", "skyrl_gym.tools.retrieval", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=corpus.parent)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: ") and text in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.slow
def test_build_only_index_needs_no_corpus(corpus, tmp_path):
    command = [sys.executable, "-m", "skyrl_gym.tools.retrieval", "--corpus_path", "corpus.jsonl", "--build_only"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path, check=True)
    folder = tmp_path / done.stdout.strip()
    corpus.unlink()
    with process("--index_path", folder) as (_, base_url):
        assert httpx.get(f"{base_url}/health").json()["documents"] == len(EXAMPLE_DOCUMENTS)


@pytest.mark.slow
def test_episode_waits_for_restarted_server(corpus):
    extras = {"reward_spec": {"ground_truth": {"target": "Hask"}}, "max_turns": 4}
    with process("--corpus", corpus) as (running, base_url):
        env = skyrl_gym.make("search", env_config={"search_url": f"{base_url}/retrieve"}, extras=extras)
        env.step("<search>Tauben</search>")
        running.kill()
        running.wait(5)
    with ThreadPoolExecutor(1) as thread:
        step = thread.submit(env.step, "<search>Tauben</search>")
        with process("--corpus", corpus, port=int(base_url.rpartition(":")[2])):
            assert "village of Hask" in step.result(60)["observations"][0]["content"]
    assert env.step("<answer>Hask</answer>")["reward"] == 1.0


def recall_at(topk: int, questions: list[dict], base_url: str) -> float:
    """Part of a question's gold paragraphs among the first `topk`, averaged over questions."""
    found = []
    with httpx.Client(timeout=60) as client:
        for start in range(0, len(questions), 100):
            batch = questions[start : start + 100]
            body = {"queries": [row["question"] for row in batch], "topk": topk}
            groups = client.post(f"{base_url}/retrieve", json=body).json()["result"]
            for row, documents in zip(batch, groups, strict=True):
                ids = {document["id"] for document in documents}
                found.append(sum(gold in ids for gold in row["gold_doc_ids"]) / len(row["gold_doc_ids"]))
    return sum(found) / len(found)


@pytest.mark.slow
def test_gold_paragraphs_are_in_top_five(test_data, tmp_path):
    """The corpus has 9,316 paragraphs of Wikipedia. Questions of HotpotQA need two of them, those of XQuAD one."""
    folder = test_data / "search_qa"
    with process("--corpus", folder / "corpus.jsonl.gz", "--index_path", tmp_path / "index") as (_, base_url):
        assert httpx.get(f"{base_url}/health").json() == {"ready": True, "index": "bm25", "documents": 9316}
        for name, least in (("hotpotqa_with_context", 0.75), ("xquad_en", 0.95)):
            with gzip.open(folder / f"{name}.jsonl.gz", "rt") as lines:
                questions = [json.loads(line) for line in lines]
            recall = {topk: recall_at(topk, questions, base_url) for topk in (1, 5)}
            print(f"\n{name}, {len(questions)} questions: recall@1 {recall[1]:.3f}, recall@5 {recall[5]:.3f}")
            assert recall[5] >= least


def test_setting_names_of_other_servers_are_accepted(corpus, tmp_path, capsys):
    from skyrl_gym.tools.retrieval.__main__ import main

    asked = ["--corpus_path", str(corpus), "--retriever_name", "bm25", "--build_only"]
    assert main(asked) == 0
    assert capsys.readouterr().out.strip() == f"{corpus}.bm25-index"
    assert main(["--index_path", str(tmp_path / "none.index"), "--retriever_name", "e5", "--build_only"]) == 2
    assert "has no index" in capsys.readouterr().err

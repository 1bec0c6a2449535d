"""BM25, and the index on disk: made once, whole or not at all."""

import json
import math
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

pytest.importorskip("bm25s", reason="needs the retrieval extra")

import numpy as np

from skyrl_gym.tools.retrieval import CorpusError, IndexMismatchError, RetrievalSettings, Retriever, open_retriever
from skyrl_gym.tools.retrieval.bm25 import Analyzer
from skyrl_gym.tools.retrieval.ranking import best
from skyrl_gym.tools.retrieval.settings import BM25Settings

DOCUMENTS = [
    {"id": "cat", "title": "Cats", "text": "A cat sleeps. Cats like fish."},
    {"id": "dog", "title": "Dogs", "text": "A dog barks at the cat."},
    {"id": "sea", "title": "Escándalo", "text": "Fish live in the sea."},
]
PLAIN = BM25Settings(language="none", title_weight=0)


@pytest.fixture
def settings(tmp_path) -> RetrievalSettings:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps(document) + "\n" for document in DOCUMENTS))
    return RetrievalSettings(corpus=corpus, index_path=tmp_path / "index")


def ids(retriever: Retriever, query: str, topk: int = 3) -> list[str]:
    return [document["id"] for document, _ in retriever.search([query], topk)[0]]


def test_words_are_stemmed_folded_and_without_stop_words():
    assert Analyzer("english").words("The Cats' ESCÁNDALOS, and 2 fishes_swimming") == [
        "cat",
        "escandalo",
        "2",
        "fish",
        "swim",
    ]
    assert Analyzer("none").words("The Cats") == ["the", "cats"]
    assert Analyzer("german").words("die Häuser") == Analyzer("german").words("Hauser")
    with pytest.raises(ValueError, match=r"language .*'klingon'"):
        Analyzer("klingon")
    with pytest.raises(CorpusError, match="no document has a word"):
        Retriever.of(["?!", "..."])


def test_score_matches_bm25_formula():
    """One word once in two documents of three and six words: idf ln(1 + (2 - 2 + 0.5) / (2 + 0.5)), mean length 4.5."""
    retriever = Retriever.of(["fish fly high", "fish swim in the deep sea"], PLAIN)
    idf = math.log(1 + 0.5 / 2.5)
    expected = [idf / (1 + 1.2 * (1 - 0.75 + 0.75 * length / 4.5)) for length in (3, 6)]
    assert retriever.index.search(["fish"], 2)[0] == [
        (0, pytest.approx(expected[0], rel=1e-5)),
        (1, pytest.approx(expected[1], rel=1e-5)),
    ]


def test_titles_are_scored_and_best_document_is_first():
    retriever = Retriever.of(DOCUMENTS)
    assert ids(retriever, "what do cats like?") == ["cat", "dog"]
    assert ids(retriever, "escandalo") == ["sea"]
    assert ids(retriever, "a fish") == ["sea", "cat"]
    assert ids(retriever, "elephant") == ids(retriever, "the") == ids(retriever, "?!") == []


def test_equal_scores_keep_corpus_order():
    retriever = Retriever.of(["same words"] * 50, PLAIN)
    assert [number for number, _ in retriever.index.search(["words"], 5)[0]] == [0, 1, 2, 3, 4]


def test_best_agrees_with_sorting_everything():
    random = np.random.default_rng(0)
    for topk in (1, 3, 40, 100):
        scores = random.integers(0, 6, size=40).astype(np.float32)  # many ties, some zero
        everything = sorted(range(40), key=lambda number: (-scores[number], number))
        assert [number for number, _ in best(scores, topk)] == [n for n in everything if scores[n] > 0][:topk]


def test_index_is_built_once_and_memory_mapped(settings):
    first = open_retriever(settings)
    made = {file.name: file.stat().st_mtime_ns for file in settings.folder().iterdir()}
    second = open_retriever(settings)
    assert {file.name: file.stat().st_mtime_ns for file in settings.folder().iterdir()} == made
    assert ids(first, "cats fish") == ids(second, "cats fish") == ids(Retriever.of(DOCUMENTS), "cats fish")
    assert isinstance(second.index._model.scores["data"], np.memmap)  # pyright: ignore[reportAttributeAccessIssue]
    assert len(second.documents) == 3 and [document["id"] for document in second.documents] == ["cat", "dog", "sea"]


def test_index_is_reused_for_touched_or_missing_corpus(settings):
    assert RetrievalSettings.from_json(settings.to_json()) == settings
    open_retriever(settings)
    os.utime(settings.corpus)
    assert ids(open_retriever(settings), "dog") == ["dog"]
    settings.corpus.unlink()
    assert ids(open_retriever(replace(settings, corpus=None)), "dog") == ["dog"]


def test_changed_settings_or_corpus_raise_unless_rebuild_is_requested(settings):
    old = open_retriever(settings)
    with pytest.raises(IndexMismatchError, match=r"b 0\.75.* 0\.4"):
        open_retriever(replace(settings, bm25=BM25Settings(b=0.4)))
    settings.corpus.write_text('{"id": "owl", "text": "An owl hoots."}\n')
    with pytest.raises(IndexMismatchError, match="--rebuild"):
        open_retriever(settings)
    new = open_retriever(replace(settings, rebuild=True))
    assert ids(new, "owl") == ["owl"] and ids(new, "cat") == []
    assert ids(old, "cat") == ["cat", "dog"]  # whoever serves the old one goes on
    assert [path.name for path in settings.folder().parent.iterdir() if "partial" in path.name] == []


def test_unfinished_index_is_not_used(settings):
    good = settings.corpus.read_text()
    settings.corpus.write_text(good + '{"text": 5}\n')
    with pytest.raises(CorpusError, match=r"corpus\.jsonl, row 4"):
        open_retriever(settings)
    assert not settings.folder().exists()
    unfinished = settings.folder().with_name("index.partial")  # as a process leaves it that was killed
    unfinished.mkdir()
    (unfinished / "documents.jsonl").write_text("{")
    settings.corpus.write_text(good)
    assert ids(open_retriever(settings), "dog") == ["dog"]
    assert not unfinished.exists()


def test_concurrent_servers_build_index_once(settings):
    with ThreadPoolExecutor(6) as threads:
        retrievers = list(threads.map(open_retriever, [settings] * 6))
    assert [ids(retriever, "dog") for retriever in retrievers] == [["dog"]] * 6


def test_folder_with_other_files_is_not_modified(settings):
    settings.folder().mkdir()
    (settings.folder() / "thesis.tex").write_text("years of work")
    for rebuild in (False, True):
        with pytest.raises(IndexMismatchError, match="not an index and not empty"):
            open_retriever(replace(settings, rebuild=rebuild))
    assert (settings.folder() / "thesis.tex").read_text() == "years of work"


@pytest.mark.parametrize(
    "name, content", [("empty.jsonl", b""), ("cut.jsonl.gz", b"\x1f\x8b\x08"), ("no.jsonl.gz", b"x")]
)
def test_unreadable_corpus_error_names_file(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CorpusError, match=name):
        open_retriever(RetrievalSettings(corpus=tmp_path / name))


def test_missing_index_and_corpus_raise(tmp_path):
    with pytest.raises(IndexMismatchError, match="has no index"):
        open_retriever(RetrievalSettings(index_path=tmp_path / "nothing"))
    with pytest.raises(ValueError, match="corpus"):
        open_retriever(RetrievalSettings())
    with pytest.raises(FileNotFoundError, match=r"none\.jsonl"):
        open_retriever(RetrievalSettings(corpus=tmp_path / "none.jsonl"))

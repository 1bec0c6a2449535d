"""Dense retrieval, with a sentence-transformers model of one layer and random weights.

Such a model still maps equal texts to equal vectors, and the same words to similar ones.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("faiss", reason="needs the retrieval extra")
if find_spec("sentence_transformers") is None:  # importing it takes seconds, of every run that collects this file
    pytest.skip("needs the dense extra: sentence_transformers", allow_module_level=True)

import numpy as np

from skyrl_gym.tools.retrieval import (
    IndexMismatchError,
    RetrievalServer,
    RetrievalSettings,
    Retriever,
    build_index,
    open_retriever,
)
from skyrl_gym.tools.retrieval.dense import VECTORS_FILE, DenseIndex, Encoder
from skyrl_gym.tools.retrieval.settings import DenseSettings
from skyrl_gym.tools.search import call_search_api

WORDS = [f"{first}{second}" for first in ("ka", "lo", "mi", "nu", "po") for second in ("bar", "den", "fis", "gol")]
NUM_DOCUMENTS = 200


def make_texts() -> list[str]:
    random = np.random.default_rng(0)
    return [" ".join(random.choice(WORDS, size=random.integers(4, 12))) for _ in range(NUM_DOCUMENTS)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A model, and a corpus to use it on."""
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("dense")
    words = ["[PAD]", "[UNK]", ":", "query", "passage", *WORDS]
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")
    wrapped.save_pretrained(folder / "bert")
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(words), hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    BertModel(config).save_pretrained(folder / "bert")
    layers = [Transformer(str(folder / "bert"), max_seq_length=64), Pooling(32, pooling_mode="mean")]
    for name in ("model", "tiny-e5"):
        SentenceTransformer(modules=layers, device="cpu").save(str(folder / name))
    rows = ({"id": str(number), "contents": text} for number, text in enumerate(make_texts()))
    (folder / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def settings(folder) -> RetrievalSettings:
    dense = DenseSettings(model=str(folder / "model"), device="cpu")
    return RetrievalSettings(corpus=folder / "corpus.jsonl", index="dense", index_path=folder / "index", dense=dense)


@pytest.fixture(scope="module")
def retriever(settings) -> Iterator[Retriever]:
    yield open_retriever(settings)


def test_ranking_matches_exhaustive_comparison(settings, retriever):
    encoder = Encoder(settings.dense)
    passages_ND = encoder.passages(make_texts())
    queries = ["kabar loden", "nugol nugol pofis", *make_texts()[:5]]
    queries_QD = encoder.queries(queries)
    np.testing.assert_allclose(np.linalg.norm(queries_QD, axis=1), 1.0, rtol=1e-5)
    scores_QN = queries_QD @ passages_ND.T
    for hits, scores_N in zip(retriever.index.search(queries, 10), scores_QN, strict=True):
        expected = np.argsort(-scores_N, kind="stable")[:10]
        assert [number for number, _ in hits] == expected.tolist()
        np.testing.assert_allclose([score for _, score in hits], scores_N[expected], rtol=1e-4)


def test_document_ranks_first_for_own_text(retriever):
    texts = make_texts()
    found = retriever.search(texts, 1)
    assert [hits[0][0]["contents"] for hits in found] == texts
    assert all(hits[0][1] == pytest.approx(1.0, abs=1e-4) for hits in found)
    assert len(retriever.search(["kabar"], 1000)[0]) == NUM_DOCUMENTS  # no more can be had


def test_prefixes_are_put_before_texts_and_known_for_e5(folder):
    def encoder(model: str, **prefixes: str) -> Encoder:
        return Encoder(DenseSettings(model=str(folder / model), device="cpu", **prefixes))

    plain, e5 = encoder("model"), encoder("tiny-e5")
    given = encoder("tiny-e5", query_prefix="", passage_prefix="kabar ")
    np.testing.assert_allclose(e5.queries(["kabar"]), plain.queries(["query: kabar"]), atol=1e-6)
    np.testing.assert_allclose(e5.passages(["kabar"]), plain.passages(["passage: kabar"]), atol=1e-6)
    np.testing.assert_allclose(given.queries(["kabar"]), plain.queries(["kabar"]), atol=1e-6)
    np.testing.assert_allclose(given.passages(["loden"]), plain.passages(["kabar loden"]), atol=1e-6)


def test_index_is_built_once(settings, retriever):
    made = (settings.folder() / VECTORS_FILE).stat().st_mtime_ns
    again = open_retriever(replace(settings, dense=replace(settings.dense, batch_size=3)))  # does not change vectors
    assert (settings.folder() / VECTORS_FILE).stat().st_mtime_ns == made
    assert again.search(["kabar"], 5)[0][0] == retriever.search(["kabar"], 5)[0][0]
    with pytest.raises(IndexMismatchError, match="model"):
        build_index(replace(settings, dense=replace(settings.dense, model="another")))


@pytest.mark.parametrize("factory", ["HNSW16", "IVF4,Flat", "SQ8"])
def test_approximate_faiss_indexes_find_nearly_same_documents(settings, retriever, tmp_path, factory):
    other = replace(settings, index_path=tmp_path / "index", dense=replace(settings.dense, factory=factory))
    queries = make_texts()[:50]
    found = [hits[0][0] for hits in open_retriever(other).index.search(queries, 1)]
    exact = [hits[0][0] for hits in retriever.index.search(queries, 1)]
    assert np.mean(np.equal(found, exact)) >= 0.8


def test_external_faiss_file_is_served_unchanged(settings, retriever, folder, tmp_path):
    file = tmp_path / "e5_Flat.index"
    file.write_bytes((settings.folder() / VECTORS_FILE).read_bytes())
    ready_made = open_retriever(replace(settings, index_path=file))
    assert ready_made.search(["loden"], 3) == retriever.search(["loden"], 3)
    assert ready_made.documents[3]["contents"] == make_texts()[3]

    shorter = tmp_path / "shorter.jsonl"
    shorter.write_text((folder / "corpus.jsonl").read_text().partition("\n")[0])
    with pytest.raises(IndexMismatchError, match="another corpus"):
        open_retriever(replace(settings, index_path=file, corpus=shorter))
    other = tmp_path / "other.index"
    other.write_bytes(file.read_bytes())
    with pytest.raises(IndexMismatchError, match="200 vectors"):
        open_retriever(replace(settings, index_path=other, corpus=shorter))


def test_dense_server_uses_same_protocol(retriever):
    with RetrievalServer(retriever) as server:
        answer, error = call_search_api(server.url, make_texts()[7], topk=2)
    assert error is None and answer is not None
    first, second = answer["result"][0]
    assert first["document"]["contents"] == make_texts()[7]
    assert first["score"] == pytest.approx(1.0, abs=1e-4) and first["score"] >= second["score"]


def test_vectors_are_searched_where_they_lie_on_disk(settings, retriever):
    file = str((settings.folder() / VECTORS_FILE).resolve())
    index = DenseIndex.load(settings.folder(), settings.dense)
    assert len(index) == NUM_DOCUMENTS
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("needs /proc")
    assert file in maps.read_text()

"""Corpora: which files and rows are documents, and what is said about those that are not."""

import gzip
import json

import pytest

from skyrl_gym.tools.retrieval.corpus import CorpusError, read_corpus, to_documents

ROWS = [{"id": 7, "title": "Hask", "text": "A village.", "source": "atlas"}, {"contents": '"Orvane"\nAn island.'}]


def test_rows_become_documents_with_contents_title_first():
    assert list(to_documents([*ROWS, "A bare text."])) == [
        {"id": "7", "title": "Hask", "text": "A village.", "contents": '"Hask"\nA village.', "source": "atlas"},
        {"id": "1", "title": "Orvane", "text": "An island.", "contents": '"Orvane"\nAn island.'},
        {"id": "2", "title": "", "text": "A bare text.", "contents": "A bare text."},
    ]


def test_contents_without_quoted_first_line_are_all_text():
    (document,) = to_documents([{"id": "a", "contents": "One line.\nAnother."}])
    assert document["text"] == document["contents"] == "One line.\nAnother." and document["title"] == ""


def test_lone_surrogate_is_replaced():
    (document,) = to_documents([{"text": json.loads('"a\\ud800b"')}])
    assert document["text"] == "a\ufffdb"


def test_file_formats_give_same_documents(tmp_path):
    lines = "\n".join(map(json.dumps, ROWS)) + "\n\n"
    (tmp_path / "corpus.jsonl").write_text(lines)
    with gzip.open(tmp_path / "corpus.jsonl.gz", "wt") as file:
        file.write(lines)
    expected = list(to_documents(ROWS))
    assert list(read_corpus(tmp_path / "corpus.jsonl")) == list(read_corpus(tmp_path / "corpus.jsonl.gz")) == expected


def test_parquet_rows_are_documents(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [{"id": "1", "title": "Hask", "text": "A village."}, {"id": "2", "title": None, "text": "An island."}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "corpus.parquet")
    assert [document["contents"] for document in read_corpus(tmp_path / "corpus.parquet")] == [
        '"Hask"\nA village.',
        "An island.",
    ]


@pytest.mark.parametrize(
    "row, text",
    [
        ({"id": "1", "body": "x"}, "row 1: a document needs `text` or `contents`; the row has id, body"),
        ({}, "the row has nothing"),
        ({"text": 5}, "text must be text; got 5"),
        ({"text": "x", "title": ["y"]}, "title must be text"),
        (5, "a document must be an object"),
    ],
)
def test_invalid_document_error_names_row(row, text):
    with pytest.raises(CorpusError, match=text):
        list(to_documents([row]))


def test_invalid_json_error_names_line(tmp_path):
    (tmp_path / "corpus.jsonl").write_text('{"text": "fine"}\n{"text": \n')
    with pytest.raises(CorpusError, match=r"corpus\.jsonl, line 2: not JSON"):
        list(read_corpus(tmp_path / "corpus.jsonl"))


def test_another_kind_of_file_is_refused(tmp_path):
    with pytest.raises(CorpusError, match=r"\.jsonl, \.jsonl\.gz or \.parquet"):
        list(read_corpus(tmp_path / "corpus.csv"))
    with pytest.raises(FileNotFoundError, match=r"none\.jsonl"):
        list(read_corpus(tmp_path / "none.jsonl"))

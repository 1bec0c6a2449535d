"""`python -m skyrl_gym.tools.retrieval --corpus FILE --index bm25|dense --index_path FOLDER`"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from skyrl_gym.tools.retrieval.server import serve
from skyrl_gym.tools.retrieval.settings import BM25Settings, DenseSettings, RetrievalSettings
from skyrl_gym.tools.retrieval.store import build_index

WRONG_USE = 2
"""Exit status for errors that the user can fix."""

INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until a signal stops the server. Returns the exit status."""
    options = _build_parser().parse_args(arguments)
    try:
        settings = _build_settings(options)
        if options.build_only:
            print(build_index(settings))
        else:
            serve(settings, options.host, options.port, options.workers, options.log_requests)
    except KeyboardInterrupt:
        return INTERRUPTED
    except ImportError as failure:
        print(f"error: {failure}: install skyrl-gym[retrieval], or skyrl-gym[dense] for --index dense", file=sys.stderr)
        return WRONG_USE
    except (ValueError, OSError) as failure:
        print(f"error: {failure}", file=sys.stderr)
        return WRONG_USE
    return 0


def _build_parser() -> argparse.ArgumentParser:
    settings, bm25, dense = RetrievalSettings(), BM25Settings(), DenseSettings()
    parser = argparse.ArgumentParser(
        prog="python -m skyrl_gym.tools.retrieval",
        description="Serves POST /retrieve for the search environment. The index is made once, at the first start.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--corpus",
        "--corpus_path",
        type=Path,
        help=".jsonl, .jsonl.gz or .parquet of {id, title, text} or {id, contents}",
    )
    add("--index", choices=["bm25", "dense"], help=f"kind of index (default: {settings.index})")
    add(
        "--index_path",
        type=Path,
        help="folder of the index, or a faiss file made elsewhere (default: beside the corpus)",
    )
    add("--rebuild", action="store_true", help="make the index anew if it is there")
    add("--build_only", action="store_true", help="make the index, print its folder, and stop")
    add("--topk", type=int, default=settings.topk, help="documents for each query that does not ask for a number")
    add("--max_topk", type=int, default=settings.max_topk, help="documents that a query may ask for")
    add("--host", default="127.0.0.1", help="address to listen on")
    add("--port", type=int, default=8000, help="port to listen on; 0 for a free one")
    add("--workers", type=int, default=1, help="processes that answer; they share the index")
    add("--log_requests", action="store_true", help="log each request")
    words = parser.add_argument_group("bm25")
    words.add_argument("--k1", type=float, default=bm25.k1, help="how slowly a repeated word saturates")
    words.add_argument("--b", type=float, default=bm25.b, help="how much the length of a document counts")
    words.add_argument("--language", default=bm25.language, help="of stemming and stop words; none for neither")
    words.add_argument(
        "--title_weight", type=int, default=bm25.title_weight, help="how often the words of a title count"
    )
    vectors = parser.add_argument_group("dense")
    vectors.add_argument("--retriever_model", default=dense.model, help="sentence-transformers model: name or folder")
    vectors.add_argument("--retriever_name", help="bm25, or any other name for dense, if --index is not given")
    vectors.add_argument("--query_prefix", help='default: "query: " for e5, else as the model says')
    vectors.add_argument("--passage_prefix", help='default: "passage: " for e5, else as the model says')
    vectors.add_argument("--faiss_factory", default=dense.factory, help="kind of faiss index")
    vectors.add_argument(
        "--batch_size", type=int, default=dense.batch_size, help="texts that the model reads at a time"
    )
    vectors.add_argument("--device", help="where the model runs (default: a GPU if there is one)")
    return parser


def _build_settings(options: argparse.Namespace) -> RetrievalSettings:
    named = "dense" if options.retriever_name not in (None, "bm25") else RetrievalSettings().index
    return replace(
        RetrievalSettings(),
        corpus=options.corpus,
        index=options.index or named,
        index_path=options.index_path,
        rebuild=options.rebuild,
        topk=options.topk,
        max_topk=options.max_topk,
        bm25=BM25Settings(k1=options.k1, b=options.b, language=options.language, title_weight=options.title_weight),
        dense=DenseSettings(
            model=options.retriever_model,
            query_prefix=options.query_prefix,
            passage_prefix=options.passage_prefix,
            factory=options.faiss_factory,
            batch_size=options.batch_size,
            device=options.device,
        ),
    )


if __name__ == "__main__":
    sys.exit(main())

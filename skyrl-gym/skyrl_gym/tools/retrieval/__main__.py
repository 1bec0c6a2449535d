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
        description="Serve POST /retrieve for the search environment. The index is built once, at the first start.",
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
        help="folder of the index, or an existing faiss file (default: next to the corpus)",
    )
    add("--rebuild", action="store_true", help="rebuild the index if it exists")
    add("--build_only", action="store_true", help="build the index, print its folder, and exit")
    add("--topk", type=int, default=settings.topk, help="default number of documents per query")
    add("--max_topk", type=int, default=settings.max_topk, help="maximum number of documents per query")
    add("--host", default="127.0.0.1", help="address to listen on")
    add("--port", type=int, default=8000, help="port to listen on; 0 for a free one")
    add("--workers", type=int, default=1, help="server processes, which share the index")
    add("--log_requests", action="store_true", help="log each request")
    words = parser.add_argument_group("bm25")
    words.add_argument("--k1", type=float, default=bm25.k1, help="BM25 k1: saturation of repeated words")
    words.add_argument("--b", type=float, default=bm25.b, help="BM25 b: weight of the document length")
    words.add_argument(
        "--language", default=bm25.language, help="language of stemming and stop words; none disables both"
    )
    words.add_argument("--title_weight", type=int, default=bm25.title_weight, help="weight of title words")
    vectors = parser.add_argument_group("dense")
    vectors.add_argument("--retriever_model", default=dense.model, help="sentence-transformers model: name or folder")
    vectors.add_argument("--retriever_name", help="bm25, or any other name for dense, if --index is not set")
    vectors.add_argument("--query_prefix", help='default: "query: " for e5, else as the model says')
    vectors.add_argument("--passage_prefix", help='default: "passage: " for e5, else as the model says')
    vectors.add_argument("--faiss_factory", default=dense.factory, help="kind of faiss index")
    vectors.add_argument("--batch_size", type=int, default=dense.batch_size, help="batch size of the model")
    vectors.add_argument("--device", help="device of the model (default: a GPU if available)")
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

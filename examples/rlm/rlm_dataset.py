"""Writes questions about long contexts for `rlm`, in which the model sees its context only through a Python REPL.

    python examples/rlm/rlm_dataset.py --output_dir ~/data/rlm                          # HotpotQA from the hub
    python examples/rlm/rlm_dataset.py --input hotpot.jsonl.gz --corpus corpus.jsonl.gz --validation_share 0.1

Columns: `question`, `answers` or `answer` (a text or several), and the passages that answer it: `context` (a text, or
HotpotQA's titles and sentences), or `gold_doc_ids`, which name documents (`id`, `title`, `text`) of --corpus. The
context is those passages among --num_passages others, in random order.
"""

import functools
import random
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from dataset_files import Problem, Row, build, first, make_parser, read_file, texts

from skyrl_train.errors import DataError

ANSWERS = "golden_answers|answers|answer"
INSTRUCTION = "The context holds what is needed to answer. Answer in as few words as possible."


def training_row(
    problem: Problem, split: str, index: int, corpus: dict[str, str], num_passages: int, seed: int
) -> Row | None:
    accepted = [text for text in texts(first(problem, ANSWERS)) if text.strip()]
    if not accepted:
        return None
    draw = random.Random(f"{seed}/{split}/{index}")
    gold = passages(problem, corpus)
    others = draw.sample(list(corpus.values()), min(num_passages, len(corpus)))
    context = list(dict.fromkeys([*gold, *others]))
    draw.shuffle(context)
    return {
        "data_source": "rlm_qa",
        "prompt": [{"role": "user", "content": f"{problem['question'].strip()}\n{INSTRUCTION}"}],
        "env_class": "rlm",
        "reward_spec": {"method": "rule", "ground_truth": {"target": accepted}},
        "extra_info": {"split": split, "index": index, "context_text": "\n\n".join(context)},
    }


def passages(problem: Problem, corpus: dict[str, str]) -> list[str]:
    """Return the passages that answer the question. Raises DataError if a document is not in the corpus."""
    context: Any = problem.get("context")
    if isinstance(context, str):
        return [context]
    if isinstance(context, dict):
        return [
            f"{title}\n{' '.join(sentence.strip() for sentence in sentences)}"
            for title, sentences in zip(context["title"], context["sentences"], strict=True)
        ]
    missing = [name for name in problem["gold_doc_ids"] if name not in corpus]
    if missing:
        raise DataError(f"--corpus has no document {', '.join(missing)}, which answers {problem['question']!r:.100}")
    return [corpus[name] for name in problem["gold_doc_ids"]]


def read_corpus(path: Path | None) -> dict[str, str]:
    if path is None:
        return {}
    return {str(doc["id"]): f"{doc.get('title', '')}\n{doc['text']}".strip() for doc in read_file(path.expanduser())}


def main(argv: list[str] | None = None) -> None:
    source = "hotpotqa/hotpot_qa:distractor"
    parser = make_parser(__doc__, "~/data/rlm", (f"{source}@train", f"{source}@validation"))
    parser.add_argument("--corpus", type=Path, help="documents with id, title and text: .jsonl, .json or .parquet")
    parser.add_argument("--num_passages", type=int, default=200, help="drawn from --corpus; default: %(default)s")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    make_row = functools.partial(
        training_row, corpus=read_corpus(options.corpus), num_passages=options.num_passages, seed=options.seed
    )
    build(options, make_row, ("question", ANSWERS, "context|gold_doc_ids"))


if __name__ == "__main__":
    main()

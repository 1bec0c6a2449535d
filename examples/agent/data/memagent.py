"""Writes questions about long texts for the memory agent (`examples/agent/memory`), as in MemAgent: the paragraphs that
answer a HotpotQA question among many that do not.

    python examples/agent/data/memagent.py --output_dir ~/data/agent_memory --num_documents 200
    python examples/agent/data/memagent.py --output_dir ~/data/agent_memory \
        --input hotpotqa_with_context.jsonl.gz --corpus corpus.jsonl.gz --validation_share 0.1

Columns: `question`; `answer`, `answers` or `golden_answers`; and the paragraphs: `context` as HotpotQA has it (`title`
and `sentences`, or pairs of them), as texts, or as one text that is kept unchanged; or `context_doc_ids` into the
--corpus ({id, title, text} a line). What is added comes from the corpus, else from the other questions' paragraphs.
"""

import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from dataset_files import Problem, Row, build, first, make_parser, read_file, texts

ANSWERS = "golden_answers|answers|answer"
CONTEXT = "context|context_doc_ids"


class RowMaker:
    """Builder of dataset rows that adds distractor paragraphs to a question up to a number, deterministically."""

    def __init__(self, num_documents: int, corpus: dict[str, str]) -> None:
        self.num_documents, self.corpus = num_documents, corpus
        self.others = list(corpus.values())

    def __call__(self, problem: Problem, split: str, index: int) -> Row | None:
        answers = [answer for answer in texts(first(problem, ANSWERS)) if answer.strip()]
        if not answers:
            return None
        question = problem["question"].strip()
        return {
            "id": str(problem.get("id") or problem.get("_id") or index),
            "question": question,
            "golden_answers": answers,
            "data_source": problem.get("data_source") or "ruler_hotpotqa",
            "prompt": [{"role": "user", "content": f"<problem>\n{question}\n</problem>"}],
            "reward_model": {"style": "rule", "ground_truth": {"target": answers}},
            "context": self.context(problem, f"{split}-{index}"),
            "extra_info": {"split": split, "index": index, "question": question},
        }

    def context(self, problem: Problem, seed: str) -> str:
        if isinstance(problem.get("context"), str):
            return problem["context"]
        own = paragraphs(problem["context"]) if problem.get("context") else self.named(problem["context_doc_ids"])
        chance = random.Random(seed)
        kept = set(own)
        wanted = max(0, self.num_documents - len(own))
        added = [text for text in chance.sample(self.others, min(len(self.others), 2 * wanted)) if text not in kept]
        documents = [*own, *added[:wanted]]
        chance.shuffle(documents)
        self.others += [] if self.corpus else own
        return "\n\n".join(f"Document {number}:\n{text}" for number, text in enumerate(documents, 1))

    def named(self, ids: Sequence[Any]) -> list[str]:
        missing = [name for name in ids if str(name) not in self.corpus]
        if missing:
            raise SystemExit(f"--corpus has no document {missing[0]!r}, which a question names")
        return [self.corpus[str(name)] for name in ids]


def paragraphs(context: Any) -> list[str]:
    """HotpotQA's `{"title": [...], "sentences": [[...], ...]}`, its pairs of both, or texts."""
    if isinstance(context, dict):
        context = list(zip(context["title"], context["sentences"], strict=True))
    return [item if isinstance(item, str) else f"{item[0]}\n{''.join(texts(item[1]))}" for item in context]


def main(argv: list[str] | None = None) -> None:
    source = "hotpotqa/hotpot_qa:distractor"
    parser = make_parser(__doc__, "~/data/agent_memory", (f"{source}@train", f"{source}@validation"))
    parser.add_argument("--num_documents", type=int, default=50, help="paragraphs of each text; default: %(default)s")
    parser.add_argument("--corpus", type=Path, help="file of paragraphs: {id, title, text}")
    options = parser.parse_args(argv)
    documents = read_file(options.corpus.expanduser()) if options.corpus else []
    corpus = {str(document["id"]): f"{document['title']}\n{document['text']}" for document in documents}
    build(options, RowMaker(options.num_documents, corpus), ("question", ANSWERS, CONTEXT))


if __name__ == "__main__":
    main()

"""Writes questions for the search agent (`examples/agent/search`): Natural Questions in FlashRAG's form, or others.

    python examples/agent/data/search-r1.py --output_dir ~/data/agent_search
    python examples/agent/data/search-r1.py --output_dir ~/data/agent_search --input nq.jsonl.gz --validation_share 0.1

Columns: `question`; `golden_answers`, `answers` or `answer` (a text or several); `data_source`, else `nq`.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from dataset_files import Problem, Row, build, first, make_parser, texts

ANSWERS = "golden_answers|answers|answer"


def training_row(problem: Problem, split: str, index: int) -> Row | None:
    question = problem["question"].strip()
    answers = [answer for answer in texts(first(problem, ANSWERS)) if answer.strip()]
    if not answers:
        return None
    return {
        "data_source": problem.get("data_source") or "nq",
        "question": question,
        "golden_answers": answers,
        "prompt": [{"role": "user", "content": f"Answer the given question: {question}"}],
        "ability": "fact-reasoning",
        "reward_model": {"style": "rule", "ground_truth": {"target": answers}},
        "extra_info": {"split": split, "index": index},
    }


def main(argv: list[str] | None = None) -> None:
    source = "RUC-NLPIR/FlashRAG_datasets:nq"
    parser = make_parser(__doc__, "~/data/agent_search", (f"{source}@train", f"{source}@test"))
    build(parser.parse_args(argv), training_row, ("question", ANSWERS))


if __name__ == "__main__":
    main()

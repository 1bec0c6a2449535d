"""Writes BrowseComp-Plus questions, to evaluate with: one file of them to one of rows.

    python examples/agent/data/browsecomp-plus.py -i browsecomp_plus.jsonl -o ~/data/browsecomp/validation.parquet

Columns: `query` or `question`, `answer`, and `query_id` if there is one.
"""

import argparse
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet

sys.path.insert(0, str(Path(__file__).parents[2]))

from dataset_files import Problem, Row, first, read_file


def evaluation_row(problem: Problem, index: int) -> Row:
    question = first(problem, "query|question").strip()
    return {
        "data_source": "browsecomp_plus",
        "prompt": [{"role": "user", "content": f"Answer the given question: {question}"}],
        "ability": "browsing",
        "reward_model": {"style": "judge", "ground_truth": {"target": str(problem["answer"])}},
        "extra_info": {"index": index, "query_id": str(problem.get("query_id", index))},
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-i", "--input", type=Path, required=True, help="questions: .jsonl, .json, .parquet")
    parser.add_argument("-o", "--output", type=Path, required=True, help="Parquet file to write")
    options = parser.parse_args(argv)
    rows = [evaluation_row(problem, index) for index, problem in enumerate(read_file(options.input.expanduser()))]
    output = options.output.expanduser()
    output.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), output)
    print(f"{len(rows)} questions: {output}")


if __name__ == "__main__":
    main()

"""Writes research questions with a reference answer, for `skyrl_agent.tasks.web_research_task.WebResearchTask`.

    python examples/agent/data/deep_research.py --output_dir ~/data/agent_research
    python examples/agent/data/deep_research.py --output_dir ~/data/agent_research --input hle.jsonl

Columns: `prompt` (a text or messages), `Question` or `question`; and the answer: `answer`, `reward_model` with
`ground_truth`, or `extra_info` with `reference_answer`; `data_source`, else `hle`; `answer_type`, if the set has it.
"""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from dataset_files import Problem, Row, build, make_parser

from skyrl_agent.tasks.rows import field, golds_of, messages_of
from skyrl_agent.tasks.web_research_task import PROMPTS, REFERENCES

COLUMNS = ("|".join(PROMPTS), "answer|reward_model|extra_info")


def training_row(problem: Problem, split: str, index: int) -> Row | None:
    answers = golds_of(problem, *REFERENCES)
    extra: dict[str, Any] = {"split": split, "index": index, "reference_answer": answers[0]}
    if kind := field(problem, "extra_info.answer_type", "answer_type"):
        extra["answer_type"] = kind
    return {
        "data_source": problem.get("data_source") or "hle",
        "prompt": messages_of(problem, *PROMPTS),
        "ability": "research",
        "reward_model": {"style": "judge", "ground_truth": answers[0]},
        "extra_info": extra,
    }


def main(argv: list[str] | None = None) -> None:
    parser = make_parser(__doc__, "~/data/agent_research", ("NovaSky-AI/Deep-Research@train", None), 0.05)
    build(parser.parse_args(argv), training_row, COLUMNS)


if __name__ == "__main__":
    main()

r"""Writes mathematics problems for `math`, which compares what the last `\boxed{}` holds by value.

    python examples/math/math_dataset.py --output_dir ~/data/math                       # MATH from the hub
    python examples/math/math_dataset.py --output_dir ~/data/math --input train.jsonl math500_test.jsonl.gz

Columns: `problem` or `question`, and `answer` (LaTeX or a number) or `solution`, whose last `\boxed{}` is the answer.
A solution without a box is left out.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from dataset_files import Problem, Row, build, first, make_parser

from skyrl_gym.envs.math.env import INSTRUCTION
from skyrl_gym.graders.math_text import last_boxed_only_string, remove_boxed


def training_row(problem: Problem, split: str, index: int) -> Row | None:
    question, answer = first(problem, "problem|question"), problem.get("answer")
    if answer is None:
        box = last_boxed_only_string(problem["solution"])
        if box is None:
            return None
        answer = remove_boxed(box)
    return {
        "data_source": str(problem.get("data_source") or "math"),
        "prompt": [{"role": "user", "content": f"{question} {INSTRUCTION}"}],
        "env_class": "math",
        "reward_spec": {"method": "rule", "ground_truth": str(answer)},
        "extra_info": {"split": split, "index": index, "question": question, "level": str(problem.get("level", ""))},
    }


def main(argv: list[str] | None = None) -> None:
    hub = ("DigitalLearningGmbH/MATH-lighteval@train", "HuggingFaceH4/MATH-500@test")
    parser = make_parser(__doc__, "~/data/math", hub)
    build(parser.parse_args(argv), training_row, ("problem|question", "answer|solution"))


if __name__ == "__main__":
    main()

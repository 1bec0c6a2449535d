"""Writes programming problems for `code`, which runs the tests of each on the answer's code.

    python examples/code/code_dataset.py --output_dir ~/data/code                             # MBPP from the hub
    python examples/code/code_dataset.py --input mbpp_train.jsonl humaneval_test.jsonl.gz

Columns, as these sets are published:

    MBPP            `text` or `prompt`, `code`, `test_list`, maybe `test_setup_code`
    HumanEval       `prompt`, `entry_point`, `test`, maybe `canonical_solution`
    CodeContests    `prompt` or `description`, `inputs` and `outputs`
"""

import ast
import json
import sys
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from dataset_files import Problem, Row, build, first, make_parser

FORMAT = "Put the code in a ```python block."


def training_row(problem: Problem, split: str, index: int) -> Row | None:
    question, ground_truth, reference = task_of(problem)
    if not ground_truth["tests"]:
        return None
    return {
        "data_source": str(problem.get("data_source") or "code"),
        "prompt": [{"role": "user", "content": f"{question.strip()}\n\n{FORMAT}"}],
        "env_class": "code",
        # JSON text, because tests are texts in one set and mappings in another
        "reward_spec": {"method": "rule", "ground_truth": json.dumps(ground_truth)},
        "extra_info": {"split": split, "index": index, "reference": reference},
    }


def task_of(problem: Problem) -> tuple[str, dict[str, Any], str]:
    """Question, tests, and a solution if there is one."""
    if problem.get("test_list") is not None:
        return mbpp_task(problem)
    if problem.get("inputs") is not None:
        question = f"{first(problem, 'prompt|description')}\n\nRead standard input, and write to standard output."
        return question, {"tests": input_output_tests(problem["inputs"], problem["outputs"])}, ""
    prompt, name = problem["prompt"], problem["entry_point"]
    reference = problem.get("canonical_solution")
    ground_truth = {"tests": [problem["test"]], "entry_point": name, "prompt": prompt}
    return f"Complete this function:\n\n{prompt}", ground_truth, f"{prompt}{reference}" if reference else ""


def mbpp_task(problem: Problem) -> tuple[str, dict[str, Any], str]:
    """The first test is shown: the question does not say what the function is called."""
    tests, reference = list(problem["test_list"]), problem.get("code") or ""
    question = f"{first(problem, 'text|prompt')}\n\nIt must pass tests such as this one:\n{tests[0] if tests else ''}"
    ground_truth = {"tests": tests, "setup": problem.get("test_setup_code") or ""}
    name = function_asked_for(tests, reference)
    return question, ground_truth | ({"entry_point": name} if name else {}), reference


def function_asked_for(tests: list[str], reference: str) -> str | None:
    """The function that the reference defines and the first test uses."""
    if not tests or not reference:
        return None
    with warnings.catch_warnings(action="ignore"):  # of escapes in texts that are not ours
        test, module = ast.parse(tests[0]), ast.parse(reference)
    used = [node.id for node in ast.walk(test) if isinstance(node, ast.Name)]
    defined = {node.name for node in module.body if isinstance(node, ast.FunctionDef)}
    return next((name for name in used if name in defined), None)


def input_output_tests(inputs: list[str], outputs: list[str]) -> list[dict[str, str]]:
    return [{"input": given, "output": expected} for given, expected in zip(inputs, outputs, strict=True)]


def main(argv: list[str] | None = None) -> None:
    hub = ("google-research-datasets/mbpp:full@train", "google-research-datasets/mbpp:full@test")
    build(make_parser(__doc__, "~/data/code", hub).parse_args(argv), training_row, ("test_list|inputs|test",))


if __name__ == "__main__":
    main()

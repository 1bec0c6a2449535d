"""Rows of function calls for `tool_call`, from files of the Berkeley Function-Calling Leaderboard."""

import json
from pathlib import Path

from skyrl_gym.call_arguments import Schema
from skyrl_gym.datasets.problems import Problem, Row, first
from skyrl_gym.envs.tool_call.prompt import system_message
from skyrl_gym.error import TaskError

ANSWERS_FOLDER = "possible_answer"
"""Folder next to the published files, with files of the same names that hold the accepted calls."""

_JSON_TYPES = {"dict": "object", "float": "number", "tuple": "array", "list": "array", "bool": "boolean"}
"""Python's type names, as used in the published schemas -> JSON's type names."""


def load_accepted_calls(path: Path) -> dict[str, object]:
    """Read the accepted calls that belong to a published file, by problem id; empty without a file of them."""
    file = path.parent / ANSWERS_FOLDER / path.name
    if not file.is_file():
        return {}
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    return {row["id"]: row["ground_truth"] for row in rows}


def bfcl_row(problem: Problem, split: str, index: int, answers: dict[str, object] | None = None) -> Row:
    """Make a row from `question` (one turn of messages), `function` (schemas) and the accepted calls: `ground_truth`,
    or `answers[id]`. Problems with `irrelevance` in the id expect no call."""
    name = str(first(problem, "id"))
    turns = first(problem, "question")
    if not isinstance(turns, list) or len(turns) != 1:
        raise TaskError(f"{name} has several turns; only single-turn problems are supported")
    functions = first(problem, "function")
    found = problem.get("ground_truth", (answers or {}).get(name))
    if found is None and "irrelevance" not in name:
        raise TaskError(f"{name} has no ground_truth, and no answer with this id is in {ANSWERS_FOLDER}/")
    system = system_message(
        [_to_json_schema(each) for each in (functions if isinstance(functions, list) else [functions])]
    )
    messages = list(turns[0])
    if messages[0]["role"] == "system":
        system["content"] = f"{messages.pop(0)['content']}\n\n{system['content']}"
    return {
        "data_source": f"bfcl_{name.rpartition('_')[0]}",
        "prompt": [system, *messages],
        "env_class": "tool_call",
        # JSON text, because values are of all types
        "reward_spec": {"method": "rule", "ground_truth": json.dumps(found or [])},
        "extra_info": {"split": split, "index": index, "id": name},
    }


def _to_json_schema(schema: Schema) -> Schema:
    """Return a schema with JSON's names of types, at all depths. `any` has no name there."""
    found: Schema = {}
    for name, value in schema.items():
        if name == "type" and isinstance(value, str):
            if value != "any":
                found[name] = _JSON_TYPES.get(value.lower(), value.lower())
        elif name == "properties" and isinstance(value, dict):  # whose keys are arguments, which may be called `type`
            found[name] = {key: _to_json_schema(each) for key, each in value.items()}
        else:
            found[name] = _to_json_schema(value) if isinstance(value, dict) else value
    return found

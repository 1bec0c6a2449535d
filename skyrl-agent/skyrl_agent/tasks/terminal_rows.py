"""Rows of published terminal benchmarks as `TerminalTask` reads them."""

from collections.abc import Mapping
from typing import Any

from skyrl_agent.types import JsonObject, Row

ROOTS = {1: "/testbed", 2: "/system", 3: "/workspace", 4: ""}
"""The folder that each of NL2Bash's file systems is made in."""


def nl2bash_row(task: Row, setups: Mapping[str, str], workdir: str = "/workspace") -> JsonObject:
    """Convert a row of InterCode's NL2Bash (https://arxiv.org/abs/2306.14898), evaluated by the effects of its
    reference command. Its folder is in the working directory, as a sandbox cannot write below `/`.

    Args:
        setups: `fs1` to `fs4` -> the script that makes the files.
        workdir: absolute working directory of the runtime.
    """
    root = ROOTS[task["fs"]]
    place = workdir if root in ("", "/workspace") else f"{workdir}{root}"

    def moved(text: str) -> str:
        return text.replace(root, place) if root else text

    setup = moved(setups[f"fs{task['fs']}"])
    return {
        "instance_id": task["id"],
        "instruction": moved(task["query"]),
        "setup": f"exec 2>/dev/null\n{setup}\ntrue\n",  # some lines are for another system and fail
        "gold": moved(task["gold"]),
    }


def agentbench_os_row(task: Row) -> JsonObject:
    """Convert a row of AgentBench's operating system tasks (https://arxiv.org/abs/2308.03688). Most need the root user
    of a machine: a docker runtime.

    Raises:
        ValueError: a script is missing or in an unsupported language.
    """
    create = task.get("create")
    create = create if isinstance(create, Mapping) else {}
    evaluation = task["evaluation"]
    row = {"instance_id": task["id"], "instruction": task["description"]}
    begin = [_parse_script(one) for one in (create.get("init"), task.get("start")) if one]
    if begin:
        row["setup"] = begin
    if "match" in evaluation:
        return row | {"expected_output": evaluation["match"]}
    checks = evaluation["check"]
    checks = checks if isinstance(checks, list) else [checks]
    return row | {"check": [_parse_script(evaluation["example"] if one is None else one) for one in checks]}


def _parse_script(value: Any) -> dict[str, str]:
    if isinstance(value, list):
        value = "\n".join(_parse_script(one)["code"] for one in value)
    if isinstance(value, str):
        value = {"code": value}
    language = value.get("language") or "bash"
    if "code" not in value or language not in ("bash", "python"):
        raise ValueError(f"not a script that can be run: {str(value)[:200]}")
    return {"language": language, "code": value["code"].lstrip()}

"""A model that knows the solutions of software tasks, and the pipeline it works in."""

import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from skyrl_agent.config.task_file import read_task
from skyrl_agent.integrations.base import BACKEND_REGISTRY, Backend, plain_rows, published_output
from skyrl_agent.runner import AgentRunner
from skyrl_agent.testing import ScriptedModel, byte_tokenizer

IDLE = "Leave everything as it is."
COMMAND = re.compile(r"fresh copy of the project: `(.+?)`")


def call(name: str, **arguments: str) -> str:
    """Format a call as `function_xml` does."""
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"I go on.\n<function={name}>\n{parameters}</function>"


def edits(path: str, old: str, new: str) -> list[str]:
    """Calls of the editor that turn a file into another: the lines that differ, and as many before them as it takes
    for the text to be there once."""
    before, after = old.splitlines(keepends=True), new.splitlines(keepends=True)
    same = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(before, after, strict=False))))
    rest = zip(reversed(before[same:]), reversed(after[same:]), strict=False)
    tail = len(list(takewhile(lambda pair: pair[0] == pair[1], rest)))
    for first in range(same, -1, -1):
        found = "".join(before[first : len(before) - tail])
        if found.strip() and old.count(found) == 1:
            replacement = "".join(after[first : len(after) - tail])
            return [call("str_replace_editor", command="str_replace", path=path, old_str=found, new_str=replacement)]
    remove = call("bash", command=f"rm {path}")
    return [remove, call("str_replace_editor", command="create", path=path, file_text=new)]


def solution_of(row: Mapping[str, Any]) -> dict[str, str]:
    solution = row["solution"]
    return solution if isinstance(solution, dict) else {row["edit_file"]: solution}


def answers_of(row: Mapping[str, Any]) -> list[str]:
    """Looks, edits, finishes."""
    look = call("bash", command="ls -R | head -50; git --version")
    changes = [answer for path, text in solution_of(row).items() for answer in edits(path, row["files"][path], text)]
    return [look, *changes, call("finish", answer="done")]


def idle(row: Mapping[str, Any]) -> dict[str, Any]:
    """The same row, which the model does not touch."""
    return {**row, "id": f"{row['id']}-idle", "problem_statement": IDLE}


class Oracle:
    """A script of a `ScriptedModel`."""

    def __init__(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self.answers = {row["test_cmd"]: answers_of(row) for row in rows}
        assert len(self.answers) == len(rows), "rows are distinguished by their test command"

    def __call__(self, prompt: str, turn: int) -> str:
        if IDLE in prompt:
            return call("finish", answer="nothing to do")
        found = COMMAND.search(prompt)
        assert found is not None, prompt
        return self.answers[found[1]][turn]


def oracle_runner(rows: Sequence[Mapping[str, Any]], **sections: Any) -> AgentRunner:
    """Make a runner from real task file keys: 8 agents at a time in local sandboxes, with parallel evaluation."""
    BACKEND_REGISTRY["itself"] = Backend(lambda infer_engine, **_: infer_engine, plain_rows, published_output)
    cfg = {
        "agent_cls": "skyrl_agent.agents.codeact.CodeActAgent",
        "task": "skyrl_agent.tasks.local_swe.LocalSWETask",
        "data": {"instance_id_key": "id"},
        "generator": {"infer_backend": "itself", "max_iterations": 8, "max_prompt_length": 200_000},
        "dispatcher": {"type": "async_pipeline", "max_parallel_agents": 8, "max_eval_parallel_agents": 8},
        "runtime": {"kind": "local"},
    }
    tokenizer = byte_tokenizer()
    return AgentRunner(read_task(cfg | sections), ScriptedModel(tokenizer, Oracle(rows)), tokenizer)

"""Mends programs with a model that knows the solutions: everything but the model is real.

python examples/agent/swe/scripted_swe.py                                     # four small programs
python examples/agent/swe/scripted_swe.py --input quixbugs.jsonl.gz --output trajectories.jsonl
python -m skyrl_agent.view trajectories.jsonl
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parent))

import buggy_programs
from dataset_files import read_file

from skyrl_agent.config.task_file import load_task_file
from skyrl_agent.integrations.base import Backend, plain_rows, published_output, register_backend
from skyrl_agent.runner import AgentRunner
from skyrl_agent.testing import ScriptedModel, byte_tokenizer


def call(name: str, **arguments: str) -> str:
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<function={name}>\n{parameters}</function>"


def answers(row: dict[str, Any]) -> list[str]:
    """Looks, writes the solution, runs the tests, finishes."""
    solution = row["solution"]
    files = solution if isinstance(solution, dict) else {row["edit_file"]: solution}
    steps = [call("bash", command="ls -R")]
    for path, text in files.items():
        steps.append(call("bash", command=f"rm {path}"))
        steps.append(call("str_replace_editor", command="create", path=path, file_text=text))
    return [*steps, call("bash", command=row["test_cmd"]), call("finish", answer="The tests pass.")]


class KnowsSolutions:
    def __init__(self, rows: Sequence[dict[str, Any]]) -> None:
        self.answers = {f"`{row['test_cmd']}`": answers(row) for row in rows}

    def __call__(self, prompt: str, turn: int) -> str:
        return next(steps for command, steps in self.answers.items() if command in prompt)[turn]


async def play(rows: Sequence[dict[str, Any]], output: Path | None) -> list[Any]:
    cfg = load_task_file(Path(__file__).parent / "swe.yaml")
    generator = {"infer_backend": "scripted", "num_trajectories": 1, "max_prompt_length": 200_000}
    cfg = cfg.model_copy(
        update={
            "generator": cfg.generator.model_copy(update=generator),
            "output": cfg.output.model_copy(update={"trajectories": output and str(output)}),
        }
    )
    register_backend("scripted", Backend(lambda infer_engine, **_: infer_engine, plain_rows, published_output))
    tokenizer = byte_tokenizer()
    runner = AgentRunner(cfg, ScriptedModel(tokenizer, KnowsSolutions(rows)), tokenizer)
    results = []
    async for group in runner.stream(rows):
        for result in group.results:
            print(f"{result.instance_id:40} {result.finish_reason or '':25} reward {result.reward}", flush=True)
            results.append(result)
    return results


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", type=Path, help="rows with solutions: QuixBugs, Exercism")
    parser.add_argument("--output", type=Path, help="JSONL file for the trajectories")
    options = parser.parse_args(argv)
    rows = read_file(options.input.expanduser()) if options.input else buggy_programs.rows()
    began = time.monotonic()
    results = asyncio.run(play(rows, options.output))
    solved = sum(result.reward == 1.0 for result in results)
    print(f"{solved} of {len(rows)} solved in {time.monotonic() - began:.0f} s")
    return 0 if solved == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())

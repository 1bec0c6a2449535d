"""Plays a task file's agent on rows, with the model of any OpenAI-compatible server (`generator.backend_config`).

python examples/agent/run_openai.py examples/agent/search/search.yaml ~/data/agent_search/validation.parquet --limit 20
"""

import argparse
import asyncio
import sys
from pathlib import Path

from transformers import AutoTokenizer

sys.path.insert(0, str(Path(__file__).parents[1]))

from dataset_files import read_file

from skyrl_agent import AutoAgentRunner
from skyrl_agent.config.task_file import load_task_file


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", type=Path, help="task file")
    parser.add_argument("rows", type=Path, help="its rows: .parquet, .jsonl, .json")
    parser.add_argument("--tokenizer", help="name or folder; default: the model's name")
    parser.add_argument("--limit", type=int, help="play only so many rows")
    options = parser.parse_args(argv)
    name = options.tokenizer or load_task_file(options.task).generator.backend_config["model_name"]
    runner = AutoAgentRunner.from_task(options.task, infer_engine=None, tokenizer=AutoTokenizer.from_pretrained(name))
    rows = read_file(options.rows.expanduser())[: options.limit]
    output = asyncio.run(runner.run(rows, val_mode=True))
    for metric, value in output["rollout_metrics"].items():
        print(f"{metric}: {value:.3f}")


if __name__ == "__main__":
    main()

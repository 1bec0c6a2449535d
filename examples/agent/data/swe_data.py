"""Writes software tasks in their published forms: R2E-Gym to train on, SWE-bench Verified to evaluate with. They run in
containers (`skyrl_agent.tasks.swebench.utils.SWEBenchTask`, `data.instance_key: instance`).

    python examples/agent/data/swe_data.py --output_dir ~/data/agent_swe
    python examples/agent/data/swe_data.py --output_dir ~/data/agent_swe --input r2e_train.parquet swebench_test.jsonl

Columns: `problem_statement`, and `docker_image` (R2E-Gym: it becomes the instance's id) or `instance_id`.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from dataset_files import Problem, Row, build, first, make_parser


def training_row(problem: Problem, split: str, index: int) -> Row | None:
    name = first(problem, "docker_image|instance_id")
    return {
        "prompt": [{"role": "user", "content": problem["problem_statement"]}],
        "data_source": "r2e-gym" if problem.get("docker_image") else problem.get("data_source") or "swe-bench",
        "ability": "coding",
        "instance": {**problem, "instance_id": name},
    }


def main(argv: list[str] | None = None) -> None:
    hub = ("R2E-Gym/R2E-Gym-Subset@train", "princeton-nlp/SWE-bench_Verified@test")
    parser = make_parser(__doc__, "~/data/agent_swe", hub)
    build(parser.parse_args(argv), training_row, ("problem_statement", "docker_image|instance_id"))


if __name__ == "__main__":
    main()

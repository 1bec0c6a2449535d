"""Writes `train.parquet` and `validation.parquet` for a quickstart task. No validation problem is in the training file.

python examples/quickstart/data.py --output DIR --task arithmetic --num_train 4096 --num_validation 128 --seed 0
"""

import argparse
from pathlib import Path

import pyarrow
import pyarrow.parquet
from tasks import TASKS, Task, make_rows


def write_dataset(task: Task, output: Path, num_train: int, num_validation: int, seed: int) -> None:
    """Rows of the dataset contract: prompt, env_class, data_source, reward_spec, extra_info."""
    output.mkdir(parents=True, exist_ok=True)
    train = make_rows(task, num_train, seed)
    validation = make_rows(task, num_validation, seed, held_out=True)
    for name, rows in (("train", train), ("validation", validation)):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), output / f"{name}.parquet")


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the dataset of a quickstart task.")
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    parser.add_argument("--task", choices=sorted(TASKS), default="arithmetic")
    parser.add_argument("--num_train", type=int, default=4096)
    parser.add_argument("--num_validation", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    write_dataset(
        TASKS[arguments.task], arguments.output, arguments.num_train, arguments.num_validation, arguments.seed
    )
    print(f"{arguments.num_train} training and {arguments.num_validation} validation problems: {arguments.output}")


if __name__ == "__main__":
    main()

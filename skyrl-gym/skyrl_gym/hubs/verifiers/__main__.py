"""Write the tasks of an environment of verifiers as dataset rows, a JSON object a line.

python -m skyrl_gym.hubs.verifiers gsm8k --size 1000 --output train.jsonl
"""

import argparse
import json
from pathlib import Path

from skyrl_gym.error import Error
from skyrl_gym.hubs.verifiers.rows import verifiers_rows


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m skyrl_gym.hubs.verifiers", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("environment", help="id of a taskset, or verifiers' settings of an environment as JSON")
    parser.add_argument("--size", type=int, help="number of rows (default: all tasks)")
    parser.add_argument("--start", type=int, default=0, help="position of the first task")
    parser.add_argument("--output", type=Path, required=True, help="file to write: .jsonl")
    arguments = parser.parse_args()
    try:
        rows = [json.dumps(row) for row in verifiers_rows(arguments.environment, arguments.size, arguments.start)]
    except Error as mistake:
        parser.error(str(mistake))
    arguments.output.write_text("".join(f"{row}\n" for row in rows))
    print(f"{len(rows)} rows in {arguments.output}")


if __name__ == "__main__":
    main()

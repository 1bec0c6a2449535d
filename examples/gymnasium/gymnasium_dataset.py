"""Writes episodes for `gymnasium`: an environment registered with Gymnasium, begun from many seeds.

    python examples/gymnasium/gymnasium_dataset.py --output_dir ~/data/gymnasium --env_id CartPole-v1 \\
        --settings '{"actions_per_turn": 10, "reward_range": [0, 500]}'
    python examples/gymnasium/gymnasium_dataset.py --env_id FrozenLake-v1 --env_kwargs '{"is_slippery": false}'

`--settings` are columns that the environment reads from a row: `max_turns`, and the settings of `GymnasiumConfig`. No
validation seed is in the training file.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from dataset_files import Row, write

import skyrl_gym

PROMPT = (
    "Play this environment as well as you can. In each turn, think first, then write one action inside <action> and "
    "</action>."
)
FIRST_VALIDATION_SEED = 1_000_000


def training_row(env_id: str, env_kwargs: dict[str, Any], settings: dict[str, Any], split: str, index: int) -> Row:
    seed = index + (FIRST_VALIDATION_SEED if split == "test" else 0)
    return {
        "data_source": f"gymnasium/{env_id}",
        "prompt": [{"role": "user", "content": PROMPT}],
        "env_class": "gymnasium",
        "env_id": env_id,
        "env_kwargs": json.dumps(env_kwargs),
        "seed": seed,
        **settings,
        "extra_info": {"split": split, "index": index},
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, default=Path("~/data/gymnasium"), help="folder to write")
    parser.add_argument("--env_id", default="CartPole-v1", help="default: %(default)s")
    parser.add_argument("--env_kwargs", type=json.loads, default={}, metavar="JSON", help="what it is made with")
    parser.add_argument("--settings", type=json.loads, default={}, metavar="JSON", help="further columns")
    parser.add_argument("--train_size", type=int, default=1000, help="default: %(default)s")
    parser.add_argument("--test_size", type=int, default=100, help="default: %(default)s")
    options = parser.parse_args(argv)
    rows = {
        split: [
            training_row(options.env_id, options.env_kwargs, options.settings, split, index) for index in range(size)
        ]
        for split, size in (("train", options.train_size), ("test", options.test_size))
    }
    skyrl_gym.make("gymnasium", extras=rows["train"][0]).close()  # a wrong id or setting is named here, not in training
    write(rows, options.output_dir)


if __name__ == "__main__":
    main()

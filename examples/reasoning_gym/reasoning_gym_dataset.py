"""Writes procedural tasks for `reasoning_gym`: any of the package's generators, at any level, in any mixture.

python examples/reasoning_gym/reasoning_gym_dataset.py --output_dir ~/data/reasoning_gym \\
    --generators chain_sum=2 caesar_cipher maze:1 --train_size 10000 --test_size 500

A generator may be followed by a level of its curriculum (`:1`) and by its weight in the mixture (`=2`). The rows are
the same for the same seed; training and validation are made from two seeds.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from dataset_files import write

from skyrl_gym.envs.reasoning_gym.curriculum import Source
from skyrl_gym.envs.reasoning_gym.rows import reasoning_gym_rows


def source(text: str) -> Source:
    """NAME[:LEVEL][=WEIGHT]."""
    rest, _, weight = text.partition("=")
    name, _, level = rest.partition(":")
    return Source(name, weight=float(weight or 1), level=int(level) if level else None)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, default=Path("~/data/reasoning_gym"), help="folder to write")
    parser.add_argument("--generators", type=source, nargs="+", required=True, metavar="NAME[:LEVEL][=WEIGHT]")
    parser.add_argument("--train_size", type=int, default=10000, help="default: %(default)s")
    parser.add_argument("--test_size", type=int, default=500, help="default: %(default)s")
    parser.add_argument("--system_prompt", default="default", help="a text, or the name of one of reasoning-gym's")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    parts = {"train": (options.train_size, 2 * options.seed), "test": (options.test_size, 2 * options.seed + 1)}
    rows = {
        split: list(
            reasoning_gym_rows(options.generators, size, seed, system_prompt=options.system_prompt, split=split)
        )
        for split, (size, seed) in parts.items()
    }
    write(rows, options.output_dir)


if __name__ == "__main__":
    main()

"""Writes text adventures for `textworld`: games as TextWorld's `tw-make` writes them next to each .z8 or .ulx file.

    python examples/textworld/textworld_dataset.py --output_dir ~/data/textworld --input FOLDER_OF_GAMES
    python examples/textworld/textworld_dataset.py --input train.jsonl.gz test.jsonl.gz --max_turns 60

A .json file is one game; other files have a column `game` (a game, or its JSON text). `extra_info.walkthrough` holds
the commands that win the game, if its file has them.
"""

import functools
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from dataset_files import Problem, Row, build, make_parser

from skyrl_gym.envs.textworld.game import parse_game

PROMPT = (
    "You play a text adventure. In each turn, think first, then write one command inside <action> and </action>, and "
    "read what happens."
)


def training_row(problem: Problem, split: str, index: int, max_turns: int) -> Row:
    game = problem.get("game") or problem
    text = game if isinstance(game, str) else json.dumps(game)
    return {
        "data_source": "textworld",
        "prompt": [{"role": "user", "content": PROMPT}],
        "env_class": "textworld",
        "game": text,  # JSON text: as columns, all games would have the keys of all others
        "max_turns": max_turns,
        "extra_info": {"split": split, "index": index, "walkthrough": list(parse_game(text).walkthrough)},
    }


def main(argv: list[str] | None = None) -> None:
    parser = make_parser(__doc__, "~/data/textworld", (None, None), validation_share=0.1)
    parser.add_argument("--max_turns", type=int, default=50, help="default: %(default)s")
    options = parser.parse_args(argv)
    build(options, functools.partial(training_row, max_turns=options.max_turns), ("game|world",))


if __name__ == "__main__":
    main()

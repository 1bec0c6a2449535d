"""`python -m skyrl_train.diff A B [--html FILE] [--json]`. Exit status: 0 equal, 1 not equal, 2 not comparable."""

import argparse
import sys
from pathlib import Path

from skyrl_inspect.diff.comparison import compare_runs, to_json_text
from skyrl_inspect.diff.text import format_page, format_text
from skyrl_train.errors import SkyRLError
from skyrl_train.utils.io import write_atomically


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m skyrl_train.diff",
        description="Compare two runs: settings, versions, data, the first number that differs, and its likely causes.",
        epilog="Exit status: 0 if every number that both record is equal, 1 if not, 2 if no step is recorded by both "
        "or a folder cannot be read.",
    )
    parser.add_argument("a", type=Path, help="a run folder; the run may still be in progress")
    parser.add_argument("b", type=Path, help="another one")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write the comparison as an HTML page")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    options = parser.parse_args(arguments)
    try:
        comparison = compare_runs(options.a, options.b)
        if options.html is not None:
            write_atomically(options.html, format_page(comparison))
    except (SkyRLError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    print(to_json_text(comparison) if options.json else format_text(comparison), end="\n" if options.json else "")
    return 0 if comparison.are_equal else 1 if comparison.parting else 2


if __name__ == "__main__":
    sys.exit(main())

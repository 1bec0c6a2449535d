"""`python -m skyrl_train.report RUN [--output report.html] [--max-samples 200] [--open]`"""

import argparse
import sys
import webbrowser
from pathlib import Path

from skyrl_train.errors import SkyRLError
from skyrl_train.report.page import write_report


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m skyrl_train.report", description="Writes one self-contained HTML page about a run."
    )
    parser.add_argument("run", type=Path, help="the run folder; the run may still be going on")
    parser.add_argument("--output", type=Path, help="the page to write (default: report.html in the run folder)")
    parser.add_argument("--max-samples", type=int, default=200, help="trajectories to embed (default: %(default)s)")
    parser.add_argument("--open", action="store_true", help="show the page in the browser")
    options = parser.parse_args(arguments)
    try:
        path = write_report(options.run, options.output, max_samples=options.max_samples)
    except (SkyRLError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    print(path)
    if options.open:
        webbrowser.open(path.as_uri())
    return 0


if __name__ == "__main__":
    sys.exit(main())

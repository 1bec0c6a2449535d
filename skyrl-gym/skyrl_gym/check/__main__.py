"""`python -m skyrl_gym.check`."""

import argparse
import json
import sys
from collections.abc import Sequence

from skyrl_gym.check import check_env
from skyrl_gym.check.services import services_for
from skyrl_gym.error import Error


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit code: 1 if there are errors, 2 if an environment could not be checked."""
    parser = argparse.ArgumentParser(
        prog="python -m skyrl_gym.check", description="Check that environments conform to the environment contract."
    )
    parser.add_argument("env", nargs="+", metavar="ENV", help="a registered id, or package.module:Class")
    parser.add_argument(
        "--seconds-per-call", type=float, default=30.0, help="timeout of one call in seconds (default: 30)"
    )
    parser.add_argument("--env-config", type=json.loads, metavar="JSON", help="settings of the environment")
    options = parser.parse_args(arguments)
    code = 0
    for env in options.env:
        try:
            with services_for(env) as services:
                report = check_env(
                    env,
                    env_config=services | (options.env_config or {}),
                    seconds_per_call=options.seconds_per_call,
                    raise_on_error=False,
                )
        except (Error, ValueError, ImportError, AttributeError, OSError) as failure:
            print(f"{env}: could not be checked: {type(failure).__name__}: {failure}", file=sys.stderr)
            code = 2
        else:
            print(report)
            code = code or int(not report.ok)
    return code


if __name__ == "__main__":
    sys.exit(main())

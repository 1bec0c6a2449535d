"""`python -m skyrl_gym.audit`."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import skyrl_gym
from skyrl_gym.audit.report import CHEATER_AT_MOST, ORACLE_AT_LEAST, AuditReport, table
from skyrl_gym.audit.services import services_for
from skyrl_gym.audit.trial import audit
from skyrl_gym.check import examples_of, spec_of
from skyrl_gym.error import Error

EPILOG = f"""Outcome rewards are means over the environment's examples; other rewards (a format bonus) are reported
as "shaping". An environment passes if its oracle earns at least {ORACLE_AT_LEAST:g} and no cheating policy more than
{CHEATER_AT_MOST:g} of that. Exit code: 0 if all pass, 1 if one fails, 2 if one could not be audited."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit code."""
    options = _build_parser().parse_args(arguments)
    env_ids = sorted(skyrl_gym.registry) if options.all else options.env
    if not env_ids:
        _build_parser().error("pass an environment or --all")
    if options.max_turns is not None and options.max_turns < 1:
        _build_parser().error(f"--max-turns must be at least 1; got {options.max_turns}")
    reports: list[AuditReport] = []
    unknown: dict[str, str] = {}
    for env_id in env_ids:
        try:
            examples = examples_of(spec_of(env_id))
            with services_for(env_id, examples) as env_config:
                reports.append(audit(env_id, examples, env_config=env_config, max_turns=options.max_turns))
        except (Error, ValueError, ImportError, AttributeError, OSError) as failure:
            unknown[env_id] = f"{type(failure).__name__}: {failure}"
    if reports:
        print(table(reports))
    for env_id, reason in unknown.items():
        print(f"{env_id}: could not be audited: {reason}", file=sys.stderr)
    if options.json is not None:
        found = {"reports": [report.as_json() for report in reports], "not_audited": unknown}
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    if unknown:
        return 2
    return 0 if all(report.ok for report in reports) else 1


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m skyrl_gym.audit",
        description="Run reward-hacking policies and the oracle on environments and print the gap.",
        epilog=EPILOG,
    )
    parser.add_argument("env", nargs="*", metavar="ENV", help="a registered id, or package.module:Class")
    parser.add_argument("--all", action="store_true", help="every registered environment")
    parser.add_argument("--max-turns", type=int, metavar="N", help="turn limit that overrides the examples' own")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="file for the outcome of every policy on every example"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())

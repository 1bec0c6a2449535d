"""Sequential execution of checks, each with a deadline, and the table of results."""

import json
import threading
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

from tx_conformance.checks import Check, Skip, Violation, shorten
from tx_conformance.groups import CHECKS
from tx_conformance.server import ServerUnderTest


@dataclass(frozen=True)
class Verdict:
    id: str
    claim: str
    outcome: str
    """`pass`, `fail`, `skip`"""
    reason: str
    seconds: float


def chosen(only: list[str]) -> list[Check]:
    """Return the checks with one of the words in their id; all checks without words."""
    return [check for check in CHECKS if not only or any(word in check.id for word in only)]


def judge(check: Check, server: ServerUnderTest, limit_seconds: float) -> Verdict:
    """Run one check. A check that does not end is left behind in its thread."""
    found: list[tuple[str, str]] = []

    def run() -> None:
        try:
            check.run(server)
            found.append(("pass", ""))
        except Skip as error:
            found.append(("skip", str(error)))
        except Violation as error:
            found.append(("fail", str(error)))
        except Exception as error:  # whatever the SDK raises is the finding
            where = traceback.extract_tb(error.__traceback__)
            ours = [f"{frame.name}:{frame.lineno}" for frame in where if "conformance" in frame.filename]
            found.append(("fail", f"{type(error).__name__}: {shorten(str(error), 600)} ({' > '.join(ours)})"))

    start = time.monotonic()
    thread = threading.Thread(target=run, name=check.id, daemon=True)
    thread.start()
    thread.join(limit_seconds)
    outcome, reason = found[0] if found else ("fail", f"not done after {limit_seconds:.0f} s")
    seconds = time.monotonic() - start
    try:
        server.clean()
    except Exception as error:  # cleaning up is not checked; its failure shows in the next check
        reason = reason or f"(cleaning up: {type(error).__name__}: {shorten(str(error))})"
    return Verdict(check.id, check.claim, outcome, reason, seconds)


def run_checks(
    server: ServerUnderTest, only: list[str], limit_seconds: float, out: TextIO, exit_first: bool = False
) -> list[Verdict]:
    """Run the chosen checks, or those up to the first failure, and print a row as each ends."""
    verdicts = []
    for check in chosen(only):
        verdict = judge(check, server, limit_seconds)
        verdicts.append(verdict)
        print(row(verdict), file=out, flush=True)
        if exit_first and verdict.outcome == "fail":
            break
    return verdicts


def row(verdict: Verdict) -> str:
    reason = f"\n{'':13}{verdict.reason}" if verdict.reason else ""
    return f"{verdict.outcome:<5}{verdict.seconds:6.2f}s {verdict.id:<52} {verdict.claim}{reason}"


def summary(verdicts: list[Verdict]) -> str:
    counts = {outcome: sum(v.outcome == outcome for v in verdicts) for outcome in ("pass", "fail", "skip")}
    seconds = sum(v.seconds for v in verdicts)
    return f"{counts['pass']} passed, {counts['fail']} failed, {counts['skip']} skipped in {seconds:.0f} s"


def write_json(verdicts: list[Verdict], path: Path, **about: str) -> None:
    path.write_text(json.dumps(about | {"checks": [asdict(v) for v in verdicts]}, indent=1))

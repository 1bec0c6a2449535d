"""List and remove runtimes of owners that have exited.

python -m skyrl_agent.services.gc [--remove] [--json]
"""

import argparse
import json
import os
import select
import signal
import sys
import time
from contextlib import suppress

from skyrl_agent.runtimes.leases import Lease, get_lease_folder, leases
from skyrl_agent.runtimes.leftovers import remove_leftovers
from skyrl_agent.types import JsonObject

SWEEP_SECONDS = 10.0
RETRY_SECONDS = 0.2
GIVE_UP_SECONDS = 600.0


def describe(lease: Lease) -> JsonObject:
    """Raises FileNotFoundError if it was removed."""
    return {
        "id": lease.id,
        "kind": lease.kind,
        "owner": lease.pid,
        "host": lease.host,
        "heartbeat_seconds_ago": round(lease.age, 1),
        "lease_seconds": lease.seconds,
        "folder": lease.folder,
        "left_behind": lease.describe_abandonment(),
    }


def table(rows: list[JsonObject], outcome: dict[str, str]) -> str:
    """Format leases and their outcome as a table."""
    lines = []
    for row in rows:
        state = outcome.get(row["id"]) or (f"orphaned: {row['left_behind']}" if row["left_behind"] else "in use")
        lines.append(f"{row['id'][:12]}  {row['kind']:8} process {row['owner']} on {row['host']}  {state}")
    return "\n".join(lines) or f"no leases in {get_lease_folder()}"


def wait_for_owner(owner: int) -> None:
    """Wait until the owner process exits, remove its leftover runtimes, and exit. Started by the owner."""
    os.chdir("/")
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with suppress(ProcessLookupError):
        descriptor = os.pidfd_open(owner)
        while os.getppid() == owner and not select.select([descriptor], [], [], SWEEP_SECONDS)[0]:
            remove_leftovers()
    give_up = time.monotonic() + GIVE_UP_SECONDS
    while any(lease.pid == owner and lease.owner_ended for lease in leases()) and time.monotonic() < give_up:
        remove_leftovers()
        time.sleep(RETRY_SECONDS)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="skyrl_agent.services.gc", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--remove", action="store_true", help="remove orphaned runtimes; runtimes in use are kept")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--watch", type=int, metavar="PID", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.watch is not None:
        wait_for_owner(options.watch)
        return 0
    rows = []
    for lease in leases():
        with suppress(FileNotFoundError):
            rows.append(describe(lease))
    removed, failed = remove_leftovers() if options.remove else ([], {})
    if options.json:
        print(json.dumps({"leases": rows, "removed": [lease.id for lease in removed], "failed": failed}, indent=2))
    else:
        outcome = {lease.id: "removed" for lease in removed} | {id: f"failed: {why}" for id, why in failed.items()}
        print(table(rows, outcome))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""`python -m skyrl_train.explain RUN`: who waits for whom.

Exit status: 0 explained, 1 nothing is recorded, 2 the folder is not a run folder.
"""

import argparse
import json
import sys
import time
from pathlib import Path

from skyrl_inspect.explain.diagnosis import find_causes
from skyrl_inspect.explain.evidence import observe
from skyrl_inspect.explain.text import as_json, as_text, details, headline
from skyrl_train.utils.explanations import get_explanations_folder, waits_folder
from skyrl_train.utils.io import write_atomically
from skyrl_train.utils.process_log import read_log_tail

_LOG_LINES = 10


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m skyrl_train.explain",
        description="Show what each process of a run waits for, since when, and which process or resource is the "
        "cause. Writes a report with stacks, ends of logs and memory to RUN/explanations.",
    )
    parser.add_argument("run", type=Path, help="the folder of a run that is in progress or was killed")
    parser.add_argument("--because", default="", metavar="TEXT", help="reason for the report, shown in its header")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument("--brief", action="store_true", help="print only the cause and the path of the report, as JSON")
    options = parser.parse_args(arguments)
    run_dir = options.run.expanduser().absolute()
    if not waits_folder(run_dir).is_dir() and not (run_dir / "config.yaml").exists():
        print(f"{run_dir} is not a run folder: it has neither config.yaml nor waits", file=sys.stderr)
        return 2
    situation = observe(run_dir)
    if not situation.processes:
        print(_describe_missing_records(run_dir), file=sys.stderr)
        return 1
    findings = find_causes(situation)
    text = as_text(run_dir, situation, findings, options.because)
    record = as_json(run_dir, situation, findings, options.because)
    path = _write(run_dir, text + details(situation), record)
    if options.brief:
        print(json.dumps({"cause": headline(findings), "path": str(path or "not written")}))
    else:
        print(record if options.json else text, end="")
        where = f"stacks, ends of logs and memory: {path}" if path else "the run folder is not writable"
        print(where, file=sys.stderr)
    return 0


def _describe_missing_records(run_dir: Path) -> str:
    log = run_dir / "logs" / "trainer.log"
    when = f", {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(log.stat().st_mtime))}" if log.exists() else ""
    return (
        f"No process of {run_dir} records waits: the run has ended, or was made by a release without these records. "
        f"End of its log{when}:\n{read_log_tail(log, _LOG_LINES)}"
    )


def _write(run_dir: Path, text: str, record: str) -> Path | None:
    """Write both files. Returns: the path of the text, None if the folder cannot be written."""
    folder = get_explanations_folder(run_dir)
    stamp = time.strftime("%Y-%m-%d_%H-%M-%S")
    try:
        folder.mkdir(exist_ok=True)
        name = next(n for i in range(1000) if not (folder / f"{(n := f'{stamp}_{i}' if i else stamp)}.txt").exists())
        write_atomically(folder / f"{name}.json", record)
        write_atomically(folder / f"{name}.txt", text)
        return folder / f"{name}.txt"
    except (OSError, StopIteration):
        return None


if __name__ == "__main__":
    sys.exit(main())

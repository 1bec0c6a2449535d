"""Short load test with a few real clients; the full one is `benchmarks/tinker_server.py load`."""

import subprocess
import sys
from pathlib import Path

import pytest
from sdk_environment import sdk_environment

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.mark.full
def test_eight_real_clients_meet_no_error_and_every_heartbeat_is_answered():
    command = [sys.executable, BENCHMARKS / "tinker_server.py", "load", "--clients", "8", "--processes", "1"]
    command += ["--minutes", "0.5", "--warm-up-seconds", "20", "--sdk-python", sdk_environment("0.38.0")]
    command += ["--max-growth-percent", "50", "--max-heartbeat-seconds", "10"]  # nothing is warm, and machines are busy
    load = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=240)
    assert load.returncode == 0, load.stdout + load.stderr

"""The conformance suite passes for a real server process and the real SDK, oldest to newest."""

import json
import os
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]
VERSIONS = (
    pytest.param("0.16.1", marks=pytest.mark.full),
    pytest.param("0.24.1", marks=pytest.mark.full),
    pytest.param("0.38.0", marks=pytest.mark.slow),
)
INSTALL_SECONDS, SUITE_SECONDS = 600, 900


@pytest.mark.timeout(INSTALL_SECONDS + SUITE_SECONDS + 120)
@pytest.mark.parametrize("version", VERSIONS)
def test_every_conformance_check_passes(version: str, sdk_python, running_server, tmp_path: Path):
    verdicts_file = tmp_path / "verdicts.json"
    command = [sdk_python(version), "-m", "tx.contract", "--base-url", running_server.url]
    command += ["--model", running_server.model, "--json", verdicts_file]
    command += ["--api-key", running_server.keys[0], "--second-api-key", running_server.keys[1]]
    suite = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SUITE_SECONDS,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY / "skyrl-tx"), "TINKER_TELEMETRY": "0"},
        cwd=tmp_path,
    )
    print(suite.stdout)
    verdicts = json.loads(verdicts_file.read_text())
    assert verdicts["tinker"] == version
    failed = {one["id"]: one["reason"] for one in verdicts["checks"] if one["outcome"] == "fail"}
    assert not failed, "\n".join(f"{name}: {reason}" for name, reason in failed.items())
    assert suite.returncode == 0
    passed = [one for one in verdicts["checks"] if one["outcome"] == "pass"]
    assert len(passed) > 200, f"only {len(passed)} checks could be made"

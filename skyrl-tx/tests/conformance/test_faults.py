"""A conformance suite is worth what it notices: each of these faults, put into the server, fails a check."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from sdk_environment import REPOSITORY, sdk_environment
from tx_server import ServerProcess

HERE = Path(__file__).parent
CHECK_SECONDS, SUITE_SECONDS, READY_SECONDS = 120, 600, 300
pytestmark = [pytest.mark.full, pytest.mark.timeout(SUITE_SECONDS + READY_SECONDS + 120)]

sys.path.insert(0, str(HERE))  # importlib mode does not
from api_faults import TENANTS  # noqa: E402
from faults import API, FAULTS, know_all  # noqa: E402

know_all()

Failing = Callable[..., dict[str, str]]
"""(name of the fault, options of the suite) -> reasons of the checks that fail, by their ids"""


@pytest.fixture(scope="module")
def failing(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Failing]:
    folder, python = tmp_path_factory.mktemp("faults"), sdk_environment("0.38.0")
    switch, verdicts_file = folder / "switch", folder / "verdicts.json"
    switch.write_text("")
    options = ["--base-model", str(tiny_model), "--served-model-name", "tiny"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TX_FAULT", str(switch))
        program = [str(HERE / "faults.py"), API]
        with ServerProcess(folder / "server", *options, tenants=TENANTS, program=program) as server:
            wait_until_ready(server)
            command = [python, "-m", "tx_conformance", "--base-url", server.url, "--model", "tiny", "--json"]
            command += [verdicts_file, "--limit", str(CHECK_SECONDS), "--api-key", server.key(TENANTS[0])]
            command += ["--second-api-key", server.key(TENANTS[1])]
            environment = os.environ | {"PYTHONPATH": str(REPOSITORY / "skyrl-tx"), "TINKER_TELEMETRY": "0"}

            def run(fault: str, *more: str) -> dict[str, str]:
                switch.write_text(fault)
                try:
                    subprocess.run([*command, *more], env=environment, cwd=folder, timeout=SUITE_SECONDS)
                finally:
                    switch.write_text("")
                verdicts = json.loads(verdicts_file.read_text())["checks"]
                verdicts_file.unlink()
                return {one["id"]: one["reason"] for one in verdicts if one["outcome"] == "fail"}

            yield run


def wait_until_ready(server: ServerProcess) -> None:
    deadline = time.monotonic() + READY_SECONDS
    key = {"X-API-Key": server.key(TENANTS[0])}
    while "tx_engine_ready 1.0" not in httpx.get(f"{server.url}/metrics", headers=key, trust_env=False).text:
        assert time.monotonic() < deadline, server.tail()
        time.sleep(0.2)


@pytest.mark.parametrize("name", FAULTS)
def test_conformance_suite_notices_fault(name: str, failing: Failing):
    noticed = failing(name, "--exit-first", "--only", *FAULTS[name].groups)
    print(f"NOTICED {name}: {noticed}")
    assert noticed, f"not noticed: {FAULTS[name].meaning}"


def test_suite_detects_fault(failing: Failing):
    """Control: with no fault switched on, the same server passes the suite."""
    assert failing("") == {}

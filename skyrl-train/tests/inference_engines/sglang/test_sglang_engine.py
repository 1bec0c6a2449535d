"""SGLang keeps what every engine keeps, and ends with the process that started it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
import torch

from skyrl_train.errors import ConfigError, WorkerError
from skyrl_train.inference_engines.sglang.engine import SGLangInferenceEngine
from skyrl_train_testing.engine_conformance import CHECKS, Check, EngineUnderTest, run_check

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]  # some minutes, where SGLang is installed

DEVICE = "cuda:0" if torch.cuda.is_available() else "cpu"
WAYS = (("shared_memory", "full"), ("broadcast", "full"), ("checkpoint", "full"), ("shared_memory", "delta"))

OTHERWISE = {
    "check_repetition_penalty": "SGLang counts repetitions in answers alone "
    "(sglang/srt/sampling/penaltylib/repetition_penalty.py)",
}
"""Conformance checks in which SGLang differs by design, each with the reason."""


def _with_marks(check: Check) -> Any:
    if check.name not in OTHERWISE:
        return check
    return pytest.param(check, marks=pytest.mark.xfail(reason=OTHERWISE[check.name], strict=True))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def subject(tiny_folder: str) -> AsyncIterator[EngineUnderTest]:
    engine = SGLangInferenceEngine(
        tiny_folder, device=DEVICE, dtype="float32", max_num_seqs=64, request_timeout_seconds=240
    )
    subject = EngineUnderTest(engine, tiny_folder, ways=WAYS)
    yield subject
    await subject.close()
    await engine.teardown()


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("check", [_with_marks(check) for check in CHECKS], ids=str)
async def test_sglang_conforms_to_engine_contract(check: Check, subject: EngineUnderTest) -> None:
    outcome = await run_check(check, subject)
    if outcome.result == "lacks":
        pytest.skip(outcome.words)


def test_unknown_setting_error_suggests_nearest(tiny_folder: str) -> None:
    with pytest.raises(ConfigError, match="max_running_requests"):
        SGLangInferenceEngine(tiny_folder, device=DEVICE, dtype="float32", max_runing_requests=3)


def test_failed_start_error_contains_server_log(tiny_folder: str) -> None:
    with pytest.raises(WorkerError, match=r"exited with status [\s\S]*end of .*server\.log[\s\S]*no_such_backend"):
        SGLangInferenceEngine(tiny_folder, device=DEVICE, dtype="float32", attention_backend="no_such_backend")


def test_server_exits_when_owner_is_killed(tiny_folder: str) -> None:
    script = (
        "from skyrl_train.inference_engines.sglang.engine import SGLangInferenceEngine as Engine\n"
        f"engine = Engine({tiny_folder!r}, device={DEVICE!r})\n"
        "print(engine.pid(), flush=True)\n"
        "import time; time.sleep(900)"
    )
    owner = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert owner.stdout is not None
    group = int(owner.stdout.readline())
    os.killpg(group, 0)  # it is there
    owner.send_signal(signal.SIGKILL)
    owner.communicate()
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.2)
    os.killpg(group, signal.SIGKILL)
    pytest.fail("the server lives on without its owner")

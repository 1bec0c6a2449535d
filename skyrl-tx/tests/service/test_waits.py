"""A server that hangs is explained by its waits, from files alone."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from service_users import Client, running, wait_until

from skyrl_gym.waits import read_records, recorded_run
from skyrl_inspect.explain.diagnosis import find_causes
from skyrl_inspect.explain.evidence import observe
from skyrl_inspect.explain.text import headline


def cause(folder: Path) -> str:
    return headline(find_causes(observe(folder)))


@pytest.fixture
def recorded(tmp_path: Path) -> Iterator[Path]:
    with recorded_run(tmp_path / "waits", "server", explainer=lambda _: f": {cause(tmp_path)}"):
        yield tmp_path


@pytest.mark.process
async def test_server_names_stopped_engine(recorded: Path):
    async with running(recorded) as service:
        alice = await Client(service).begin()
        model = await alice.model()
        process = service.link.process
        assert process is not None
        os.kill(process.pid, signal.SIGSTOP)
        step = await alice.step(model, 1)
        polled = asyncio.create_task(service.futures.retrieve("alice", step["request_id"], 60.0))
        await wait_until(lambda: service.link.deaths == 1)
        assert f"engine (pid {process.pid}) is stopped" in (service.link.last_death or "")
        await polled
    server = next(record for record in read_records(recorded / "waits") if record.role == "server")
    assert f"the result of optimize {model}:1" in {wait.what for wait in server.waits if wait.on == "engine"}

"""Four gloo ranks of a sharded policy and four engines, each a process: whatever is slow or dies, no rank hangs."""

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from skyrl_train.errors import WorkerError
from skyrl_train.weight_sync.plan import Route
from skyrl_train_testing.sync_ranks import SyncRanks

pytestmark = [pytest.mark.slow, pytest.mark.process]

OWN_RANK = [Route("shared_memory", sources=(rank,)) for rank in range(4)]
MIXED = [*OWN_RANK[:2], Route("broadcast"), Route("broadcast")]
SHAPES: list[tuple[str, tuple[int, ...]]] = [(f"layer.{index}", (96 + index, 50)) for index in range(12)]
MOST = 4 * 25_000
"""Two or three tensors a bucket."""
DEADLINE_SECONDS = 6.0


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SyncRanks]:
    with SyncRanks(
        4, 4, SHAPES, tmp_path_factory.mktemp("logs"), most=MOST, deadline_seconds=DEADLINE_SECONDS
    ) as ranks:
        yield ranks


def sync(policy: SyncRanks, version: int) -> None:
    policy.load(version, 0.02)
    policy.send(version)
    assert policy.count_different(version) == [0, 0, 0, 0]


@pytest.mark.parametrize(
    "routes",
    [MIXED, *(pytest.param(routes, marks=pytest.mark.full) for routes in (OWN_RANK, [Route("broadcast")] * 4))],
    ids=["mixed", "own", "broadcast"],
)
def test_random_delays_and_slow_engine_keep_bits(policy, routes):
    policy.connect(routes)
    policy.engines.call(1, "be_slow", 0.05)
    for version in (1, 2, 3):
        sync(policy, version)
    policy.engines.call(1, "be_slow", 0.0)


@pytest.mark.parametrize("routes", [OWN_RANK, MIXED], ids=["own", "mixed"])
def test_crashed_engine_is_named_on_every_rank_and_next_sync_works(policy, routes):
    policy.connect(routes)
    sync(policy, 1)
    policy.load(2, 0.02)
    blow = threading.Timer(0.1, policy.engines.processes[2].kill)
    began = time.monotonic()
    blow.start()
    error = policy.get_error_of_send(2)
    assert time.monotonic() - began < 4 * DEADLINE_SECONDS
    assert "weight sync failed at bucket" in error and "of version 2" in error
    assert "engine 2: died (exit code -9)" in error or "weight-sync group died" in error
    policy.engines.restart(2)
    policy.connect(routes)
    sync(policy, 3)


def test_hanging_engine_is_named_after_deadline(policy):
    policy.connect(OWN_RANK)
    policy.load(2, 0.02)
    policy.engines.call(3, "be_slow", 60.0)
    began = time.monotonic()
    error = policy.get_error_of_send(2)
    assert DEADLINE_SECONDS <= time.monotonic() - began < 3 * DEADLINE_SECONDS
    assert "at bucket 0 of version 2 (layer.0 to layer.1): engine 3 did not answer within 6 s" in error
    policy.engines.restart(3)


def test_crashed_rank_ends_call_and_is_named(policy):
    """The last test: the group is gone with it."""
    policy.connect(OWN_RANK)
    policy.load(4, 0.3)

    async def kill_in_mid_send() -> None:
        sending = asyncio.ensure_future(policy.start_send(4))
        await asyncio.sleep(1.0)
        os.kill(policy.ranks.pids()[3], signal.SIGKILL)
        await sending

    began = time.monotonic()
    with pytest.raises(WorkerError, match=r"policy worker 3 .*signal 9|Connection closed by peer"):
        policy.run(kill_in_mid_send())
    assert time.monotonic() - began < 15

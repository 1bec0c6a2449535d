"""Colocation: the protocol as a table, and its driver with engines and workers that log their calls."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from skyrl_train.errors import WorkerError
from skyrl_train.orchestration.colocation import Colocation
from skyrl_train.orchestration.colocation_protocol import (
    ALL_SHARE,
    EMPTY,
    ENGINES_ONLY,
    NO_SHARING,
    POLICY,
    POLICY_AND_REF_SHARE,
    SYNC,
    WEIGHTS,
    ColocationError,
    DeviceState,
    Engines,
    events_of,
    missing_steps,
    next_state,
)
from skyrl_train.training_backends.host_store import Transfer
from skyrl_train.workers.worker import Worker

CRITIC, REF = DeviceState(Engines.ASLEEP, "critic"), DeviceState(Engines.ASLEEP, "ref")
STATES = {"awake": ENGINES_ONLY, "weights": WEIGHTS, "sync": SYNC, "empty": EMPTY, "policy": POLICY}
STATES |= {"critic": CRITIC, "ref": REF}

# What follows in each state; where a step is illegal, what must come first.
ALL_STEPS = """
                | awake   | weights        | sync      | empty          | policy       | critic   | ref
generate        | = awake | wake cache     | off+      | wake weights+  | off+         | off+     | off+
sleep           | = empty | = empty        | = policy  | wake weights   | wake weights | off+     | off+
wake weights    | sleep   | sleep          | sleep     | = weights      | = sync       | off      | off
wake cache      | sleep+  | = awake        | off       | wake weights   | off+         | off+     | off+
send weights    | sleep+  | onload policy  | = sync    | onload policy+ | wake weights | off+     | off+
start engine    | = awake | = weights      | off       | = empty        | off          | off      | off
onload policy   | sleep   | = sync         | off       | = policy       | off          | off      | off
onload critic   | sleep   | sleep          | off+      | = critic       | off          | off      | off
onload ref      | sleep   | sleep          | off+      | = ref          | off          | off      | off
use policy      | sleep+  | onload policy+ | sleep     | onload policy  | = policy     | off+     | off+
use critic      | sleep+  | sleep+         | off+      | onload critic  | off+         | = critic | off+
use ref         | sleep+  | sleep+         | off+      | onload ref     | off+         | off+     | = ref
offload policy  | sleep+  | onload policy  | = weights | onload policy  | = empty      | off+     | off+
offload critic  | sleep+  | sleep+         | off+      | onload critic  | off+         | = empty  | off+
offload ref     | sleep+  | sleep+         | off+      | onload ref     | off+         | off+     | = empty
"""


def cells() -> list[tuple[str, str, str]]:
    """(state, event, cell) of the table; a `+` says that more events follow the one named, `off` means offloading
    the worker on the device."""
    header, *rows = [[cell.strip() for cell in line.split("|")] for line in ALL_STEPS.strip("\n").splitlines()]
    return [(state, row[0], cell) for row in rows for state, cell in zip(header[1:], row[1:], strict=True)]


def test_table_has_every_state_and_event():
    assert {state for state, _, _ in cells()} == set(STATES)
    assert set(STATES.values()) == set(ALL_SHARE)
    assert {event for _, event, _ in cells()} == set(events_of(ALL_SHARE))
    assert len(cells()) == 7 * 15


@pytest.mark.parametrize("state, event, cell", cells())
def test_each_event_reaches_next_state_or_names_missing_events(state, event, cell):
    if cell.startswith("="):
        assert next_state(STATES[state], event) == STATES[cell.removeprefix("= ")]
        return
    with pytest.raises(ColocationError) as refused:
        next_state(STATES[state], event)
    assert str(refused.value).startswith(f"cannot {event} with engines ")
    first, *more = missing_steps(STATES[state], event)
    assert first == cell.removesuffix("+").replace("off", f"offload {STATES[state].worker}")
    assert bool(more) == cell.endswith("+")
    here = STATES[state]
    for step in (first, *more, event):  # and indeed that is the way
        here = next_state(here, step)


@pytest.mark.parametrize("engines", Engines)
@pytest.mark.parametrize("worker", [None, "policy", "critic", "ref"])
def test_device_state_rejects_invalid_combinations(engines, worker):
    """7 of 12: workers never stand beside awake engines, and only the policy beside their weights."""
    if (engines, worker) in {(state.engines, state.worker) for state in STATES.values()}:
        assert DeviceState(engines, worker) in ALL_SHARE
    else:
        with pytest.raises(ValueError, match="no memory for"):
            DeviceState(engines, worker)


def test_refusal_names_missing_events():
    with pytest.raises(ColocationError) as refused:
        next_state(POLICY, "wake cache")
    assert str(refused.value) == (
        "cannot wake cache with engines asleep, the policy on the device; first: offload policy, wake weights"
    )


def test_unknown_event_raises_value_error():
    with pytest.raises(ValueError, match="'wake up'"):
        next_state(EMPTY, "wake up")


@pytest.mark.parametrize(
    "state, event, following",
    [
        (EMPTY, "onload policy", POLICY),
        (EMPTY, "onload ref", REF),
        (EMPTY, "send weights", None),  # the policy is in host memory
        (POLICY, "send weights", POLICY),
        (POLICY, "offload policy", EMPTY),
        (POLICY, "onload ref", None),
        (REF, "send weights", None),
        (REF, "use policy", None),
        (REF, "use ref", REF),
        (REF, "offload ref", EMPTY),
    ],
)
def test_policy_and_reference_alternate_on_device_without_engines(state, event, following):
    assert "sleep" not in events_of(POLICY_AND_REF_SHARE)
    if following is None:
        with pytest.raises(ColocationError):
            next_state(state, event, POLICY_AND_REF_SHARE)
    else:
        assert next_state(state, event, POLICY_AND_REF_SHARE) == following


def test_protocol_without_sharing_has_no_events():
    assert events_of(NO_SHARING) == ()


class Diary:
    """Log of the calls of engines and workers, in order."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.fails: set[str] = set()
        self.fails_once: set[str] = set()

    async def write(self, line: str) -> None:
        self.lines.append(line)
        await asyncio.sleep(0)
        if line in self.fails:
            raise OSError(f"{line} went wrong")
        if line in self.fails_once:
            self.fails_once.remove(line)
            raise WorkerError(f"{line} went wrong")

    def take(self) -> list[str]:
        lines, self.lines = self.lines, []
        return lines

    async def send(self) -> None:
        await self.write("weights travel")

    async def start_new(self) -> "Engine":
        await self.write("new starts")
        return Engine(self, "new")


class Engine:
    receives_all_weights = False

    def __init__(self, diary: Diary, name: str = "engines"):
        self.diary, self.name = diary, name

    async def sleep(self, level: int = 1) -> None:
        await self.diary.write(f"{self.name} sleep" if level == 1 else f"{self.name} drop weights")

    async def wake_up(self, tags: list[str] | None = None) -> None:
        assert tags is not None
        await self.diary.write(f"{self.name} wake {tags[0]}")


class Group:
    def __init__(self, diary: Diary, name: str):
        self.diary, self.name = diary, name

    async def init_model(self) -> None:
        await self.diary.write(f"{self.name} loads")

    async def call_all(self, method: Callable[..., None]) -> list[Any]:
        move = {
            Worker.offload_to_cpu: "off",
            Worker.offload_optimizer: "optimizer off",
            Worker.release_cached_memory: "free",
            Worker.backload_to_gpu: "on",
        }[method]
        await self.diary.write(f"{self.name} {move}")
        return []


Started = tuple[Colocation, Diary]


async def started(
    groups: tuple[str, ...] = ("policy", "critic", "ref"), all_weights: bool = False, **sharing: Any
) -> Started:
    diary = Diary()
    engines = Engine(diary)
    engines.receives_all_weights = all_weights
    colocation = Colocation(engines, **{"engines_share_device": True, **sharing})
    await colocation.start([Group(diary, name) for name in groups])
    return colocation, diary


async def started_with_failed_sync(failing: str) -> Started:
    colocation, diary = await started()
    diary.fails = {failing}
    with pytest.raises(OSError, match=failing):
        await colocation.sync(diary.send)
    diary.fails = set()
    diary.take()
    return colocation, diary


@pytest.mark.parametrize(
    ("offload", "left", "back"),
    [("keep", "ref free", []), ("optimizer", "ref optimizer off", ["policy on"]), ("all", "ref off", ["policy on"])],
)
async def test_offload_mode_decides_what_workers_move(offload: Any, left: str, back: list[str]):
    colocation, diary = await started(("policy", "ref"), offload=offload)
    assert diary.take() == ["engines sleep", "ref loads", left, "policy loads"]
    await colocation.sync(diary.send)
    off = left.replace("ref", "policy")
    assert diary.take() == ["engines wake weights", "weights travel", off, "engines wake kv_cache"]
    await colocation.after_generating()
    assert diary.take() == ["engines sleep", *back]
    assert str(colocation.state) == "engines asleep, the policy on the device"


async def test_moves_are_metrics_of_slowest_ranks():
    colocation, _ = await started(("policy",))
    assert colocation.take_metrics() == {}

    async def call_all(method: Callable[..., None]) -> list[Any]:
        return [Transfer(4_000_000_000, 0.1), Transfer(3_000_000_000, 0.2)]

    [group] = colocation._groups["policy"]
    group.call_all = call_all
    await colocation.sync(Diary().send)
    assert colocation.take_metrics() == pytest.approx(
        {"timing/offload": 0.2, "memory/offload_gb": 3.0, "memory/offload_gb_per_second": 15.0}
    )
    assert colocation.take_metrics() == {}


async def test_training_step_moves_in_documented_order():
    colocation, diary = await started()
    assert diary.take() == [
        "engines sleep",
        *("critic loads", "critic off"),
        *("ref loads", "ref off"),
        "policy loads",
    ]

    async def send() -> str:
        colocation.check("send weights")
        await diary.write("weights travel")
        return "sent"

    sync = ["engines wake weights", "weights travel", "policy off", "engines wake kv_cache"]
    assert await colocation.sync(send) == "sent"
    assert diary.take() == sync
    colocation.check("generate")
    await colocation.after_generating()
    async with colocation.swapped_in("ref"):
        colocation.check("use ref")
    async with colocation.swapped_in("critic"):
        colocation.check("use critic")
    colocation.check("use policy")
    assert diary.take() == [
        *("engines sleep", "policy on"),
        *("policy off", "ref on", "ref off", "policy on"),
        *("policy off", "critic on", "critic off", "policy on"),
    ]
    await colocation.sync(send)
    assert diary.take() == sync
    assert colocation.state == ENGINES_ONLY


async def test_refused_moves_make_no_calls():
    colocation, diary = await started()
    diary.take()
    for step in (lambda: colocation.onload("ref"), colocation.after_generating):
        with pytest.raises(ColocationError):
            await step()
    with pytest.raises(ColocationError, match="cannot generate with engines asleep"):
        colocation.check("generate")
    await colocation.recover()
    diary.take()
    with pytest.raises(ColocationError, match=r"first: onload policy$"):
        await colocation.sync(diary.send)
    assert diary.take() == ["engines wake weights"]


async def test_models_with_own_devices_are_never_moved():
    colocation, diary = await started(engines_share_device=False)
    assert sorted(diary.take()) == ["critic loads", "policy loads", "ref loads"]
    for event in ("generate", "use critic", "send weights"):
        colocation.check(event)
    await colocation.sync(diary.send)
    await colocation.after_generating()
    async with colocation.swapped_in("ref"):
        pass
    assert await colocation.send_between(diary.send)
    await colocation.recover()
    assert diary.take() == ["weights travel"] * 2


async def test_policy_and_reference_share_device_without_engines():
    colocation, diary = await started(engines_share_device=False, policy_and_ref_share=True)
    lines = diary.take()
    assert [line for line in lines if "critic" not in line] == ["ref loads", "ref off", "policy loads"]
    await colocation.sync(diary.send)
    await colocation.after_generating()
    async with colocation.swapped_in("critic"):
        pass
    assert diary.take() == ["weights travel"]
    async with colocation.swapped_in("ref"):
        with pytest.raises(ColocationError, match="offload ref, onload policy"):
            await colocation.sync(diary.send)
    assert diary.take() == ["policy off", "ref on", "ref off", "policy on"]


@pytest.mark.parametrize(
    "all_share, policy_and_ref_share, beside",
    [(True, False, []), (False, True, ["policy", "critic"]), (False, False, ["policy", "critic", "ref"])],
)
def test_models_without_shared_device_compute_next_to_engines(all_share, policy_and_ref_share, beside):
    colocation = Colocation(None, engines_share_device=all_share, policy_and_ref_share=policy_and_ref_share)
    assert [name for name in ("policy", "critic", "ref") if colocation.stays_beside_engines(name)] == beside


async def test_training_without_engines_swaps_models():
    diary = Diary()
    colocation = Colocation(None, engines_share_device=True)
    await colocation.start([Group(diary, "policy"), Group(diary, "ref")])
    async with colocation.swapped_in("ref"):
        pass
    assert diary.take() == [
        *("ref loads", "ref off", "policy loads"),
        *("policy off", "ref on", "ref off", "policy on"),
    ]


@pytest.mark.parametrize("failing", ["engines wake weights", "policy off", "engines wake kv_cache"])
async def test_failed_move_blocks_moves_until_recovery(failing):
    colocation, diary = await started()
    diary.fails = {failing}
    with pytest.raises(OSError, match=failing):
        await colocation.sync(diary.send)
    for step in (colocation.after_generating, lambda: colocation.onload("policy")):
        with pytest.raises(ColocationError, match="recover"):
            await step()
    diary.fails = set()
    diary.take()
    await colocation.recover()
    assert diary.take() == ["policy off", "critic off", "ref off", "engines sleep"]
    assert colocation.state == EMPTY
    await colocation.onload("policy")
    await colocation.sync(diary.send)
    colocation.check("generate")


async def test_engines_drop_weights_when_sync_sends_all_weights():
    """But not before `send_between`, which brings them to one engine alone, also if it fails."""
    colocation, diary = await started(("policy",), all_weights=True)
    assert diary.take() == ["engines drop weights", "policy loads"]
    await colocation.sync(diary.send)
    await colocation.after_generating()
    assert "engines drop weights" in diary.take()
    with pytest.raises(ColocationError):  # and a refused sleep changes nothing
        await colocation.after_generating()
    await colocation.sync(diary.send)
    diary.take()
    assert await colocation.send_between(diary.send)
    assert diary.take() == [
        *(
            "engines sleep",
            "policy on",
            "engines wake weights",
            "weights travel",
            "policy off",
            "engines wake kv_cache",
        ),
    ]
    diary.fails_once = {"weights travel"}
    with pytest.raises(WorkerError):
        await colocation.send_between(diary.send)
    assert "engines drop weights" not in diary.take()
    colocation.check("generate")


@pytest.mark.parametrize(
    "failing", ["engines drop weights", "engines wake weights", "weights travel", "policy off", "engines wake kv_cache"]
)
async def test_engines_without_weights_generate_only_after_sync(failing):
    colocation, diary = await started(("policy",), all_weights=True)
    await colocation.sync(diary.send)
    diary.fails = {failing}
    with pytest.raises(OSError, match=failing):
        await colocation.after_generating()
        await colocation.sync(diary.send)
    diary.fails = set()
    await colocation.recover()
    async with colocation._lock:
        with pytest.raises(ColocationError, match="recover, then sync"):
            await colocation._resume_generation()
    await colocation.recover()
    await colocation.onload("policy")
    diary.take()
    await colocation.sync(diary.send)
    assert "weights travel" in diary.take()
    colocation.check("generate")


async def test_engine_restart_after_failed_sleep_makes_no_moves():
    colocation, diary = await started(("policy",), all_weights=True)
    await colocation.sync(diary.send)
    diary.fails = {"engines drop weights"}
    with pytest.raises(OSError):
        await colocation.after_generating()
    diary.fails = set()
    diary.take()
    with pytest.raises(ColocationError, match="level 2") as failure:
        await colocation.send_between(diary.send)
    assert "unknown since 'sleep' failed" in str(failure.value.__context__)
    assert diary.take() == []
    with pytest.raises(ColocationError, match="'sleep'"):
        await colocation.onload("policy")
    await colocation.recover()
    await colocation.onload("policy")
    await colocation.sync(diary.send)
    colocation.check("generate")


async def test_failed_recovery_can_be_repeated():
    colocation, diary = await started()
    diary.fails = {"engines sleep"}
    with pytest.raises(OSError):
        await colocation.recover()
    with pytest.raises(ColocationError, match="since 'recover' failed"):
        await colocation.onload("policy")
    diary.fails = set()
    await colocation.recover()
    await colocation.onload("policy")


async def test_failed_send_can_be_repeated():
    colocation, diary = await started()
    diary.take()
    diary.fails = {"weights travel"}
    with pytest.raises(OSError):
        await colocation.sync(diary.send)
    assert colocation.state == SYNC
    diary.fails = set()
    await colocation.sync(diary.send)
    assert diary.take() == [
        "engines wake weights",
        *("weights travel", "weights travel"),
        *("policy off", "engines wake kv_cache"),
    ]


async def test_engine_crashed_asleep_restarts_when_sync_frees_memory():
    colocation, diary = await started()
    diary.take()

    starting = asyncio.create_task(colocation.start_engine(diary.start_new))
    await asyncio.sleep(0.05)
    assert diary.take() == []  # the policy has the device
    await colocation.sync(diary.send)
    assert (await starting).name == "new"
    assert diary.take() == [
        *("policy off", "new starts", "new sleep", "policy on"),
        *("engines wake weights", "weights travel", "policy off", "engines wake kv_cache"),
    ]


async def test_engine_crashed_during_sync_restarts_before_sync_repeats():
    colocation, diary = await started_with_failed_sync("weights travel")
    starting = asyncio.create_task(colocation.start_engine(diary.start_new))
    await asyncio.sleep(0)
    await colocation.sync(diary.send)
    await starting
    assert diary.take() == [
        *("policy off", "new starts", "new sleep", "new wake weights", "policy on"),
        *("weights travel", "policy off", "engines wake kv_cache"),
    ]


async def test_recovery_waits_for_starting_engines():
    colocation, diary = await started_with_failed_sync("engines wake weights")
    await colocation.recover(lambda: colocation.start_engine(diary.start_new))
    assert diary.take() == [
        *("policy off", "critic off", "ref off"),
        *("new starts", "new sleep"),
        "engines sleep",
    ]


async def test_engine_started_during_generation_receives_weights_between_syncs():
    colocation, diary = await started()
    assert not await colocation.send_between(diary.send)  # the next sync brings them
    await colocation.sync(diary.send)
    diary.take()

    await colocation.start_engine(diary.start_new)
    assert diary.take() == ["new starts"]  # awake, as the others
    sent, _ = await asyncio.gather(
        colocation.send_between(diary.send),
        colocation.after_generating(),  # comes meanwhile, and waits its turn
    )
    assert sent
    assert diary.take() == [
        *("engines sleep", "policy on", "engines wake weights", "weights travel"),
        *("policy off", "engines wake kv_cache"),
        *("engines sleep", "policy on"),
    ]


@pytest.mark.parametrize("failing_again", [None, "engines sleep", "engines wake kv_cache"])
@pytest.mark.parametrize(
    "failing",
    ["engines sleep", "policy on", "engines wake weights", "weights travel", "policy off", "engines wake kv_cache"],
)
async def test_engines_continue_when_receiver_crashes_between_syncs(failing, failing_again):
    """The engine may restart, too: no worker stays on the device."""
    colocation, diary = await started()
    await colocation.sync(diary.send)
    diary.fails_once = {failing}

    with pytest.raises(WorkerError, match=failing):
        sending = asyncio.ensure_future(colocation.send_between(diary.send))
        while diary.fails_once:
            await asyncio.sleep(0)
        diary.fails_once = {failing_again} - {None}
        await sending
    assert not diary.fails_once
    assert colocation.state == ENGINES_ONLY
    colocation.check("generate")
    await colocation.start_engine(diary.start_new)
    assert await colocation.send_between(diary.send)
    colocation.check("generate")


async def test_engines_continue_when_send_is_cancelled_between_syncs():
    colocation, diary = await started()
    await colocation.sync(diary.send)
    sending = asyncio.ensure_future(colocation.send_between(asyncio.Event().wait))
    while colocation.state != SYNC:
        await asyncio.sleep(0)
    sending.cancel()
    await colocation.start_engine(diary.start_new)  # waits until the device is free
    with pytest.raises(asyncio.CancelledError):
        await sending
    assert colocation.state == ENGINES_ONLY
    colocation.check("generate")


async def test_engine_start_timeout_names_worker_on_device():
    colocation, diary = await started(start_timeout_seconds=0.05)

    with pytest.raises(ColocationError, match=r"0\.05 s.*offload policy"):
        await colocation.start_engine(diary.start_new)
    await colocation.sync(diary.send)  # does not wait for who gave up
    colocation.check("generate")

"""Causes of a hang are named from records of waits and states of processes: one table of situations."""

import sysconfig
from dataclasses import replace
from typing import Any

import pytest

from skyrl_gym.waits import NEXT_CALL, PEERS, Wait
from skyrl_inspect.explain.diagnosis import HangCause, Kind, find_causes, innermost_own_frame
from skyrl_inspect.explain.evidence import ELSEWHERE, GONE, Child, ProcessEvidence, Situation, parse_stacks
from skyrl_train.utils.explanations import SCHEDULER, TRAINER

NOW = 1000.0
RANKS = "policy worker 0, policy worker 1"


def wait(number: int, who: str, what: str, on: str = "", *, parent: int = 0, age: float = 40.0, **more: Any) -> Wait:
    return Wait(number, parent, who, what, on, NOW - age, **more)


def process(role: str, pid: int, *waits: Wait, state: str = "S", **more: Any) -> ProcessEvidence:
    return ProcessEvidence(role, pid, "here", state, list(waits), **more)


def trainer(*waits: Wait, **more: Any) -> ProcessEvidence:
    return process(TRAINER, 1, *waits, **more)


def diagnosed(*processes: ProcessEvidence, **more: Any) -> list[HangCause]:
    return find_causes(Situation(NOW, list(processes), **more))


def in_training(deadline: float = 0.0) -> ProcessEvidence:
    return trainer(
        wait(1, TRAINER, "phase train", age=42),
        wait(2, TRAINER, "forward_backward", RANKS, parent=1, deadline=deadline),
    )


def rank(number: int, *waits: Wait, **more: Any) -> ProcessEvidence:
    return process(f"policy worker {number}", 10 + number, *waits, **more)


def in_collective(number: int, what: str, **more: Any) -> ProcessEvidence:
    role = f"policy worker {number}"
    return rank(number, wait(1, role, "forward_backward"), wait(2, role, what, PEERS, parent=1, age=39), **more)


def test_stopped_rank_is_cause_and_peer_waits():
    first, *others = diagnosed(
        in_training(deadline=41),
        rank(0, wait(1, "policy worker 0", "forward_backward"), state="T"),
        in_collective(1, "all_gather #12 of layers.3"),
    )
    assert first.cause == "policy worker 0 (pid 10) is stopped, for example by SIGSTOP or a debugger"
    assert first.remedy == "kill -CONT 10 continues it"
    assert first.is_expired
    assert others == []
    [by_peer] = [f for f in diagnosed(in_collective(1, "all_gather #12"), rank(0, state="T")) if f.chain]
    assert by_peer.chain[0].startswith("policy worker 1 (pid 11): all_gather #12, waiting for its peers, for 39.0 s")


def test_wait_chain_leads_from_engine_to_trainer():
    """Rank 1 is in a gather for rank 0, which waits for the engine, which is stopped."""
    first, *_ = diagnosed(
        trainer(wait(1, TRAINER, "send_weights", RANKS)),
        rank(
            0,
            wait(1, "policy worker 0", "send_weights"),
            wait(2, "policy worker 0", "the weights to arrive", "engine 0", parent=1),
        ),
        rank(
            1,
            wait(1, "policy worker 1", "send_weights"),
            wait(2, "policy worker 1", "all_gather_object #7", PEERS, parent=1),
        ),
        process("engine 0", 20, wait(1, "engine 0", "update_named_weights"), state="T"),
    )
    assert first.cause.startswith("engine 0 (pid 20) is stopped")
    assert [line.split(" (")[0] for line in first.chain] == [
        "policy worker 0",
        "policy worker 1",
        "policy worker 1",
        "trainer",
    ]


def test_rank_missing_collective_is_named():
    idle = rank(
        1,
        wait(5, "policy worker 1", "all_reduce #11", PEERS, ended=NOW - 39),
        wait(6, "policy worker 1", NEXT_CALL, TRAINER),
    )
    first, *_ = diagnosed(in_training(), in_collective(0, "all_reduce #12"), idle)
    assert first.kind is Kind.LEFT_OUT
    assert first.cause == (
        "policy worker 1 (pid 11) skipped all_reduce #12: it has started 11 collectives and waits for the next call"
    )


def test_ranks_in_different_collectives_are_shown_with_their_lines():
    stacks = {7: ['File "torch/site-packages/x.py", line 1 in all_gather', 'File "my_loss.py", line 3 in loss']}
    role = "policy worker 1"
    other = rank(1, wait(2, role, "all_gather #12", PEERS, thread=7), stacks=stacks)
    [first] = diagnosed(in_training(), in_collective(0, "all_reduce #12"), other)
    assert first.kind is Kind.DIFFERENT
    assert "policy worker 0 (pid 10) in all_reduce #12" in first.cause
    assert 'policy worker 1 (pid 11) in all_gather #12, at "my_loss.py", line 3 in loss' in first.cause


def test_computing_ranks_report_line_and_collective_count():
    """On CUDA no rank waits in a collective: the one that is behind shows by its number."""
    done = wait(1, "policy worker 0", "all_reduce #57", PEERS, ended=NOW - 1)
    first = rank(0, done, wait(2, "policy worker 0", "optim_step"))
    second = rank(1, replace(done, who="policy worker 1", what="all_reduce #56"))
    [found, *_] = diagnosed(trainer(wait(1, TRAINER, "optim_step", RANKS)), first, second)
    assert "(collectives begun: policy worker 0: 57, policy worker 1: 56)" in found.cause


@pytest.mark.parametrize(
    "on, more, words",
    [
        ("lock /runs/x.lock", {"lock_holders": {"/runs/x.lock": ["pid 77 (rsync), which does not belong to this run"]}},
         "pid 77 (rsync), which does not belong to this run holds the lock /runs/x.lock"),
        ("lock /a, b", {}, "a process on another machine holds the lock /a, b"),
        ("file /nfs/ckpts/a.safetensors", {}, "trainer (pid 1) cannot finish writing /nfs/ckpts/a.safetensors"),
        ("http://judge:8000/v1", {}, "no reply from http://judge:8000/v1"),
        (SCHEDULER, {"ray": {"total": {"CPU": 2}, "free": {"CPU": 0}, "waiting": ["actor WorkerProcess (PENDING)"]}},
         "Ray's scheduler has no resources for it (waiting for resources in Ray: actor WorkerProcess (PENDING); free: "
         "{'CPU': 0} of {'CPU': 2})"),
        ("engine 3", {}, "engine 3 has not started, or reports no waits"),
    ],
)  # fmt: skip
def test_external_cause_is_named(on: str, more: dict[str, Any], words: str):
    [found] = diagnosed(trainer(wait(1, TRAINER, "phase generate"), wait(2, TRAINER, "it", on, parent=1)), **more)
    assert (found.kind, found.cause) == (Kind.OUTSIDE, words)


def test_hung_environment_is_named_before_waiting_samples():
    threading = f'File "{sysconfig.get_path("stdlib")}/threading.py", line 1 in acquire'
    stacks = {9: [threading, 'File "my_env.py", line 8 in step']}
    found = diagnosed(
        trainer(
            wait(1, TRAINER, "phase generate", age=50),
            wait(2, "sample a_0", "an episode", parent=1),
            wait(3, "sample a_0", "step of environment 'sql'", parent=2, deadline=41),
            wait(4, "threads", "a call of an environment", parent=3, thread=9),
            wait(5, "sample b_0", "an episode", parent=1, age=30),
            wait(6, "sample b_0", "a free one", "threads", parent=5, age=30),
            stacks=stacks,
        )
    )
    [only] = found
    assert only.cause == (
        "sample a_0 (pid 1) does not finish step of environment 'sql', at \"my_env.py\", line 8 in step"
    )
    assert (only.num_chains, only.is_expired) == (2, True)


def test_deadlock_is_shown_as_cycle():
    first, *_ = diagnosed(
        trainer(wait(1, TRAINER, "phase x"), wait(2, TRAINER, "a", "engine 0", parent=1)),
        process("engine 0", 20, wait(1, "engine 0", "b", TRAINER)),
    )
    assert first.kind is Kind.CYCLE
    assert first.cause.startswith("deadlock: trainer in phase x")


def test_exited_process_counts_until_replaced():
    dead = process("engine 0", 20, wait(1, "engine 0", "update_named_weights"), state=GONE, began=1.0, log="e.log")
    waiting_for_it = trainer(wait(1, TRAINER, "send_weights", "engine 0"))
    first, *_ = diagnosed(waiting_for_it, dead)
    assert first.cause == "engine 0 (pid 20) is dead; its last wait: update_named_weights"
    assert "e.log" in first.remedy
    started = process("engine 0", 21, wait(1, "engine 0", "generate"), began=2.0)
    first, *_ = diagnosed(waiting_for_it, dead, started)
    assert first.cause == "engine 0 (pid 21) does not finish generate"


def test_stopped_engine_child_is_cause():
    engine = process("engine 0", 20, wait(1, "engine 0", "generate"), children=[Child(23, "VLLM::EngineCore", "T")])
    first, *_ = diagnosed(trainer(wait(1, TRAINER, "generate", "engine 0")), engine)
    assert first.cause == "a child of engine 0 (pid 20) is stopped: pid 23, VLLM::EngineCore"


def test_process_waiting_for_disk_is_named_with_file():
    saving = [wait(1, "policy worker 0", "save_checkpoint"), wait(2, "policy worker 0", "a write", "file /x", parent=1)]
    first, *_ = diagnosed(trainer(wait(1, TRAINER, "save_checkpoint", "policy worker 0")), rank(0, *saving, state="D"))
    assert first.cause == (
        "policy worker 0 (pid 10) is blocked in the kernel, waiting for a disk or a device in a write, "
        "waiting for file /x"
    )


def test_just_expired_wait_counts_as_present():
    given_up = {"ended": NOW - 1.0, "was_given_up": True, "deadline": 39.0}
    [found] = diagnosed(trainer(wait(1, TRAINER, "the reply", "http://judge", **given_up)))
    assert found.is_expired
    assert diagnosed(trainer(wait(1, TRAINER, "the reply", "http://judge", ended=NOW - 1.0))) == []
    assert diagnosed(trainer(wait(1, TRAINER, "the reply", "http://judge", **given_up | {"ended": NOW - 60}))) == []


def test_processes_of_other_machines_are_followed_by_their_waits():
    far = rank(0, wait(1, "policy worker 0", "a write", "file /nfs/x"), state=ELSEWHERE)
    [found] = diagnosed(trainer(wait(1, TRAINER, "save_checkpoint", "policy worker 0")), far)
    assert found.cause == "policy worker 0 (pid 10) cannot finish writing /nfs/x"


def test_expired_wait_ranks_above_older_wait_without_deadline():
    found = diagnosed(
        trainer(
            wait(1, "a", "x", "http://old", age=500),
            wait(2, "b", "y", "http://late", age=60, deadline=60),
        )
    )
    assert [each.cause for each in found] == ["no reply from http://late", "no reply from http://old"]


def test_stacks_of_faulthandler_are_read_by_thread():
    text = (
        'Thread 0x00007f01 (most recent call first):\n  File "a.py", line 3 in f\n  File "b.py", line 4 in g\n\n'
        'Current thread 0x00007f02 (most recent call first):\n  File "c.py", line 5 in h\n'
    )
    assert parse_stacks(text) == {
        0x7F01: ['File "a.py", line 3 in f', 'File "b.py", line 4 in g'],
        0x7F02: ['File "c.py", line 5 in h'],
    }
    assert innermost_own_frame(['File "/x/site-packages/t.py", line 1 in a', 'File "/mine.py", line 2 in b']) == (
        '"/mine.py", line 2 in b'
    )
    assert innermost_own_frame([]) == ""

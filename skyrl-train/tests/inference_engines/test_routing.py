"""Routing of requests to engines, and the queue before them."""

from collections import Counter

import pytest

from skyrl_train.inference_engines.routing import (
    Interrupted,
    QueueEntry,
    Router,
    SlotGrant,
    SlotRequest,
    engine_of_session,
)

SESSIONS = [f"trajectory {i}" for i in range(2000)]


@pytest.mark.parametrize(
    "session, of_three, without_1, without_0",
    [  # read off once: they may never change, for a run that goes on must find its sessions where they were
        ("a", 0, 0, 1),
        ("b", 0, 0, 2),
        ("c", 1, 0, 1),
        ("7_1", 2, 2, 2),
        (7, 1, 0, 1),
    ],
)
def test_session_keeps_its_engine_when_others_leave(session, of_three, without_1, without_0):
    assert engine_of_session(session, [0, 1, 2]) == engine_of_session(session, [2, 0, 1]) == of_three
    assert engine_of_session(session, [0, 2]) == without_1
    assert engine_of_session(session, [1, 2]) == without_0


def test_engine_death_moves_only_its_sessions_evenly():
    before = {session: engine_of_session(session, [0, 1, 2, 3]) for session in SESSIONS}
    after = {session: engine_of_session(session, [0, 1, 3]) for session in SESSIONS}
    moved = [session for session in SESSIONS if before[session] != after[session]]
    assert {before[session] for session in moved} == {2}
    assert all(400 < count < 600 for count in Counter(before.values()).values())
    assert all(100 < count < 230 for count in Counter(after[session] for session in moved).values())


def granted(entry: QueueEntry) -> SlotGrant | None:
    return entry.granted.result() if entry.granted.done() else None


def open_router(num_engines: int, limit: int | None = None) -> Router:
    router = Router(num_engines, limit)
    router.set_engines(range(num_engines))
    return router


async def test_new_requests_go_to_engine_with_fewest_requests():
    router = open_router(3)
    first = granted(router.request_slots(0, [SlotRequest()] * 7))
    assert first == SlotGrant({0: [0, 3, 6], 1: [1, 4], 2: [2, 5]}, None)
    router.release(2, [SlotRequest()] * 2)
    assert granted(router.request_slots(1, [SlotRequest()] * 3)) == SlotGrant({2: [0, 1], 1: [2]}, None)


async def test_prompt_length_breaks_ties_between_engines():
    router = open_router(2)
    granted(router.request_slots(0, [SlotRequest(num_tokens=900), SlotRequest(num_tokens=10)]))
    assert granted(router.request_slots(1, [SlotRequest(num_tokens=10)])) == SlotGrant({1: [0]}, None)


async def test_suspect_engine_keeps_sessions_but_gets_no_new_requests():
    router = open_router(2)
    [of_0] = [session for session in ("a", "7_0", "x") if engine_of_session(session, [0, 1]) == 0][:1]
    router.set_engines([0, 1], doubtful=[0])
    assert granted(router.request_slots(0, [SlotRequest(of_0), SlotRequest(), SlotRequest()])) == SlotGrant(
        {0: [0], 1: [1, 2]}, None
    )
    router.set_engines([0], doubtful=[0])
    assert granted(router.request_slots(1, [SlotRequest()])) == SlotGrant({0: [0]}, None), "better than none"


async def test_requests_above_limit_wait_in_order_of_arrival():
    router = open_router(1, limit=2)
    batch = granted(router.request_slots(0, [SlotRequest()] * 3))
    assert batch is not None and batch.slots == {0: [0, 1]}
    assert batch.rest is not None
    later = router.request_slots(1, [SlotRequest()])
    router.release(0, [SlotRequest()])
    assert granted(batch.rest) == SlotGrant({0: [2]}, None), "the rest of a batch keeps its place"
    assert granted(later) is None
    earlier = router.request_slots(0, [SlotRequest()])  # one that was interrupted comes back with its ticket
    router.release(0, [SlotRequest()])
    assert granted(earlier) == SlotGrant({0: [0]}, None)
    assert granted(later) is None and router.num_waiting == 1
    router.release(0, [SlotRequest()])
    assert granted(later) == SlotGrant({0: [0]}, None)
    assert router.num_under_way(0) == 2


async def test_request_waiting_for_full_engine_is_passed_but_not_starved():
    router = open_router(2, limit=1)
    session = next(s for s in SESSIONS if engine_of_session(s, [0, 1]) == 0)
    assert granted(router.request_slots(0, [SlotRequest(session)])) == SlotGrant({0: [0]}, None)
    stuck = router.request_slots(1, [SlotRequest(session)])
    assert granted(router.request_slots(2, [SlotRequest()])) == SlotGrant({1: [0]}, None), "the other engine is free"
    newcomer = router.request_slots(3, [SlotRequest()])
    router.release(0, [SlotRequest(session)])
    assert granted(stuck) == SlotGrant({0: [0]}, None), "before the newcomer, who could have had it as well"
    assert granted(newcomer) is None


async def test_no_slots_are_granted_while_admission_is_paused_or_no_engine_is_open():
    router = Router(1)
    router.pause_admission("paused")
    router.pause_admission("asleep")
    entry = router.request_slots(0, [SlotRequest()])
    for step in (lambda: router.set_engines([0]), lambda: router.resume_admission("paused")):
        step()
        assert granted(entry) is None
    router.resume_admission("asleep")
    assert granted(entry) == SlotGrant({0: [0]}, None)


async def test_withdrawn_entries_keep_no_slots():
    router = open_router(1, limit=1)
    taken = router.request_slots(0, [SlotRequest(), SlotRequest()])
    router.withdraw(router.request_slots(1, [SlotRequest()]))
    router.withdraw(taken)  # granted, but nobody came for it
    assert (router.num_waiting, router.num_under_way(0)) == (0, 0)
    assert granted(router.request_slots(2, [SlotRequest()])) == SlotGrant({0: [0]}, None)


async def test_interrupt_ends_waits_and_failure_ends_later_waits_too():
    router = Router(1)
    entry = router.request_slots(0, [SlotRequest()])
    router.interrupt()
    with pytest.raises(Interrupted):
        entry.granted.result()
    entry = router.request_slots(1, [SlotRequest()])
    router.fail(RuntimeError("over"))
    for late in (entry, router.request_slots(2, [SlotRequest()])):
        with pytest.raises(RuntimeError, match="over"):
            late.granted.result()

"""Who goes where, and who waits for whom."""

import asyncio
from collections import Counter

import pytest

from skyrl_train.inference_engines.routing import Grant, Interrupted, Router, Waiter, Want, engine_of_session

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
def test_a_session_has_one_engine_whatever_the_others_do(session, of_three, without_1, without_0):
    assert engine_of_session(session, [0, 1, 2]) == engine_of_session(session, [2, 0, 1]) == of_three
    assert engine_of_session(session, [0, 2]) == without_1
    assert engine_of_session(session, [1, 2]) == without_0


def test_a_death_moves_the_sessions_of_that_engine_alone_and_evenly():
    before = {session: engine_of_session(session, [0, 1, 2, 3]) for session in SESSIONS}
    after = {session: engine_of_session(session, [0, 1, 3]) for session in SESSIONS}
    moved = [session for session in SESSIONS if before[session] != after[session]]
    assert {before[session] for session in moved} == {2}
    assert all(400 < count < 600 for count in Counter(before.values()).values())
    assert all(100 < count < 230 for count in Counter(after[session] for session in moved).values())


def granted(waiter: Waiter) -> Grant | None:
    return waiter.granted.result() if waiter.granted.done() else None


def open_router(num_engines: int, limit: int | None = None) -> Router:
    router = Router(num_engines, limit)
    router.set_engines(range(num_engines))
    return router


async def test_new_requests_go_where_least_is_under_way():
    router = open_router(3)
    first = granted(router.ask(0, [Want()] * 7))
    assert first == Grant({0: [0, 3, 6], 1: [1, 4], 2: [2, 5]}, None)
    router.release(2, [Want()] * 2)
    assert granted(router.ask(1, [Want()] * 3)) == Grant({2: [0, 1], 1: [2]}, None)


async def test_among_equally_many_requests_the_shorter_prompts_decide():
    router = open_router(2)
    granted(router.ask(0, [Want(num_tokens=900), Want(num_tokens=10)]))
    assert granted(router.ask(1, [Want(num_tokens=10)])) == Grant({1: [0]}, None)


async def test_a_doubtful_engine_keeps_its_sessions_and_gets_nothing_new():
    router = open_router(2)
    [of_0] = [session for session in ("a", "7_0", "x") if engine_of_session(session, [0, 1]) == 0][:1]
    router.set_engines([0, 1], doubtful=[0])
    assert granted(router.ask(0, [Want(of_0), Want(), Want()])) == Grant({0: [0], 1: [1, 2]}, None)
    router.set_engines([0], doubtful=[0])
    assert granted(router.ask(1, [Want()])) == Grant({0: [0]}, None), "better than none"


async def test_above_the_limit_requests_wait_in_the_order_in_which_they_came():
    router = open_router(1, limit=2)
    batch = granted(router.ask(0, [Want()] * 3))
    assert batch is not None and batch.places == {0: [0, 1]}
    assert batch.rest is not None
    later = router.ask(1, [Want()])
    router.release(0, [Want()])
    assert granted(batch.rest) == Grant({0: [2]}, None), "the rest of a batch keeps its place"
    assert granted(later) is None
    earlier = router.ask(0, [Want()])  # one that was interrupted comes back with its ticket
    router.release(0, [Want()])
    assert granted(earlier) == Grant({0: [0]}, None)
    assert granted(later) is None and router.num_waiting == 1
    router.release(0, [Want()])
    assert granted(later) == Grant({0: [0]}, None)
    assert router.num_under_way(0) == 2


async def test_who_waits_for_a_full_engine_is_passed_but_not_starved():
    router = open_router(2, limit=1)
    session = next(s for s in SESSIONS if engine_of_session(s, [0, 1]) == 0)
    assert granted(router.ask(0, [Want(session)])) == Grant({0: [0]}, None)
    stuck = router.ask(1, [Want(session)])
    assert granted(router.ask(2, [Want()])) == Grant({1: [0]}, None), "the other engine is free"
    newcomer = router.ask(3, [Want()])
    router.release(0, [Want(session)])
    assert granted(stuck) == Grant({0: [0]}, None), "before the newcomer, who could have had it as well"
    assert granted(newcomer) is None


async def test_nobody_goes_while_a_reason_to_hold_is_left_or_no_engine_is_open():
    router = Router(1)
    router.hold("paused")
    router.hold("asleep")
    waiter = router.ask(0, [Want()])
    for step in (lambda: router.set_engines([0]), lambda: router.let_go("paused")):
        step()
        assert granted(waiter) is None
    router.let_go("asleep")
    assert granted(waiter) == Grant({0: [0]}, None)


async def test_who_goes_away_leaves_no_place_taken():
    router = open_router(1, limit=1)
    taken = router.ask(0, [Want(), Want()])
    waits = asyncio.create_task(router.granted_to(router.ask(1, [Want()])))
    await asyncio.sleep(0)
    waits.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waits
    router.withdraw(taken)  # granted, but nobody came for it
    assert (router.num_waiting, router.num_under_way(0)) == (0, 0)
    assert granted(router.ask(2, [Want()])) == Grant({0: [0]}, None)


async def test_waits_end_by_an_interruption_or_by_failure_and_the_latter_stays():
    router = Router(1)
    waiter = router.ask(0, [Want()])
    router.interrupt()
    with pytest.raises(Interrupted):
        await router.granted_to(waiter)
    waiter = router.ask(1, [Want()])
    router.fail(RuntimeError("over"))
    for late in (waiter, router.ask(2, [Want()])):
        with pytest.raises(RuntimeError, match="over"):
            await router.granted_to(late)
